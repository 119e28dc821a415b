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

// maxCA bounds an authority's file, in bytes: it is kept in the login. The system's authorities are for --tls.
const maxCA = 32 << 10

// way is how endpoints are spoken with, as a login without who: what was asked for, and what the saved login knows of
// these endpoints. Nothing makes a way plaintext that the saved login has as TLS.
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

// readCA reads the certificates of an authority.
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
		return "", fmt.Errorf("%s is longer than %d bytes: name the file of the one authority, or give --tls for those of the system", path, maxCA)
	case !x509.NewCertPool().AppendCertsFromPEM(text):
		return "", fmt.Errorf("%s holds no certificate in PEM", path)
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
				return nil, errors.New("the saved login's tls_ca holds no certificate: log in again")
			}
		}
	}
	conn, err := dial.Open(opts)
	var bare *dial.Exposed
	if errors.As(err, &bare) {
		what := cmp.Or(s.secret, "the token")
		err = fmt.Errorf("%s would go to %s in plaintext, for everybody on the way to read: give --tls-ca FILE, or --tls, or "+
			"--insecure-plaintext to send it all the same", what, bare.Endpoint)
	}
	return conn, err
}
