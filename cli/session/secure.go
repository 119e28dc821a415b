package session

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
)

// maxCA is the maximum size in bytes of the file that --tls-ca names. Its content is saved in the login.
const maxCA = 32 << 10

// way returns a Login that holds only the endpoints and TLS options for a connection. The TLS options come from the
// flags and the environment. If saved has all these endpoints, its TLS options are added, so that the connection uses
// TLS if the saved login does. The parameter secure is true if an endpoint has https://, which also selects TLS.
func (s *Session) way(endpoints []string, secure bool, saved *account.Login) (account.Login, error) {
	w := account.Login{Endpoints: endpoints, TLS: secure || s.flags.tls, Plaintext: s.flags.plaintext}
	if text := s.env("TRIVET_INSECURE_PLAINTEXT"); text != "" {
		forced, err := strconv.ParseBool(text)
		if err != nil {
			return w, Usagef("TRIVET_INSECURE_PLAINTEXT: want true or false, got %q", text)
		}
		w.Plaintext = w.Plaintext || forced
	}
	source, file := "--tls-ca", s.flags.tlsCA
	if file == "" && !s.flags.tls {
		source, file = "TRIVET_TLS_CA", s.env("TRIVET_TLS_CA")
	}
	if file != "" {
		text, err := readCA(file)
		if err != nil {
			return w, fmt.Errorf("%s: %w", source, err)
		}
		w.TLS, w.CA = true, text
	}
	if saved != nil && covers(saved, endpoints) == nil {
		if saved.TLS && w.CA == "" && !s.flags.tls {
			w.CA = saved.CA
		}
		w.TLS, w.Plaintext = w.TLS || saved.TLS, w.Plaintext || saved.Plaintext
	}
	w.Plaintext = w.Plaintext && !w.TLS
	return w, nil
}

// readCA returns the content of a file with certificates of a certificate authority in PEM. It returns an error if the
// file contains none or is longer than maxCA.
func readCA(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxCA+1))
	switch {
	case err != nil:
		return "", err
	case len(text) > maxCA:
		return "", fmt.Errorf("%s is longer than %d bytes: give a file with one certificate authority, or --tls to use those of the system", path, maxCA)
	case !x509.NewCertPool().AppendCertsFromPEM(text):
		return "", fmt.Errorf("%s contains no PEM certificate", path)
	}
	return string(text), nil
}

func (s *Session) open(way account.Login, token account.Secret) (*dial.Conn, error) {
	opts := dial.Options{Endpoints: way.Endpoints, Token: token, Confides: s.secret != "", Plaintext: way.Plaintext, Dialer: s.Dialer}
	if s.choosing {
		opts.Org, opts.Project = s.Tenant()
	}
	if way.TLS {
		opts.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		if way.CA != "" {
			opts.TLS.RootCAs = x509.NewCertPool()
			if !opts.TLS.RootCAs.AppendCertsFromPEM([]byte(way.CA)) {
				return nil, errors.New("tls_ca of the saved login contains no certificate: log in again")
			}
		}
	}
	conn, err := dial.Open(opts)
	s.conn = conn
	var bare *dial.Exposed
	if errors.As(err, &bare) {
		what := cmp.Or(s.secret, "the token")
		err = fmt.Errorf("%s would be sent to %s in plaintext, where others on the network can read it: give --tls-ca FILE, or --tls, or "+
			"--insecure-plaintext to send it anyway", what, bare.Endpoint)
	}
	return conn, err
}
