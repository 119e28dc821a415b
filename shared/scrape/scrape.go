// Package scrape has the settings of a port that serves metrics to Prometheus, which members and agents share: TLS, a
// token, and the URL at which Prometheus reaches the port.
//
// Decisions:
//
//   - The files of the certificate and of the token are read at each use, so that a renewed file is used without a
//     restart.
//   - A token is refused if it would cross the network in plaintext.
//   - A port on a loopback address has no URL unless the operator sets one: other machines cannot reach it.
package scrape

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// minToken is the minimum length of a token in bytes.
const minToken = 16

// Port has the settings of a port for metrics. The names in errors are those of the settings.
type Port struct {
	// Listen is the host:port that serves metrics, or empty for none (metrics_listen).
	Listen string
	// Address is the host:port at which Prometheus reaches the port. If it is empty, URL derives it from Listen
	// (metrics_address).
	Address string
	// Cert and Key are the paths of PEM files, or empty for plaintext (metrics_cert, metrics_key).
	Cert, Key string
	// Token is the path of a file with a token, or empty if requests need none (metrics_token).
	Token string
}

// Validate checks the settings. It does not read the files.
func (p Port) Validate() error {
	if (p.Cert == "") != (p.Key == "") {
		return errors.New("metrics_cert, metrics_key: set both or neither")
	}
	if p.Address != "" {
		host, port, err := net.SplitHostPort(p.Address)
		if err != nil || host == "" || port == "" {
			return fmt.Errorf("metrics_address: %q is not host:port", p.Address)
		}
	}
	if p.Listen == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(p.Listen)
	if err != nil {
		return fmt.Errorf("metrics_listen: %w", err)
	}
	if p.Token != "" && p.Cert == "" && !loopback(host) {
		return errors.New("metrics_token: set metrics_cert and metrics_key too, because the token would be sent without encryption")
	}
	return nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// URL returns the URL at which Prometheus reaches the port, without a path, such as https://10.0.1.1:7444. It returns ""
// if the port serves nothing. If Listen has no host or an unspecified one, such as 0.0.0.0, the URL has the host that the
// function own returns. While Address is empty, URL also returns "" if the host is a loopback address or unspecified.
func (p Port) URL(own func() (host string, err error)) (string, error) {
	if p.Listen == "" {
		return "", nil
	}
	address := p.Address
	if address == "" {
		host, port, err := net.SplitHostPort(p.Listen)
		if err != nil {
			return "", err
		}
		if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
			if host, err = own(); err != nil {
				return "", fmt.Errorf("find the address of metrics_listen: %w", err)
			}
		}
		if ip, err := netip.ParseAddr(host); loopback(host) || err == nil && ip.IsUnspecified() {
			return "", nil
		}
		address = net.JoinHostPort(host, port)
	}
	scheme := "http"
	if p.Cert != "" {
		scheme = "https"
	}
	return scheme + "://" + address, nil
}

// maxURL is the maximum length of a URL that CheckURL accepts, in bytes.
const maxURL = 300

// CheckURL returns an error unless text is "" or a URL as Port.URL returns it.
func CheckURL(text string) error {
	if text == "" {
		return nil
	}
	u, err := url.Parse(text)
	if err != nil || len(text) > maxURL || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" ||
		text != u.Scheme+"://"+u.Host {
		return fmt.Errorf("%q is not http://HOST:PORT or https://HOST:PORT", text)
	}
	return nil
}

// TLS returns the TLS configuration of the port, or nil for plaintext. It returns an error if the certificate cannot be
// read. The files are read again for each connection.
func (p Port) TLS() (*tls.Config, error) {
	if p.Cert == "" {
		return nil, nil
	}
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(p.Cert, p.Key)
		if err != nil {
			return nil, fmt.Errorf("read metrics_cert and metrics_key: %w", err)
		}
		return &pair, nil
	}
	if _, err := load(nil); err != nil {
		return nil, err
	}
	return &tls.Config{GetCertificate: load, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

// ReadToken returns the function that reads the token which requests must have, or nil if they need none. The file is
// read at each call of the function.
func (p Port) ReadToken() func() (string, error) {
	if p.Token == "" {
		return nil
	}
	return func() (string, error) {
		text, err := os.ReadFile(p.Token)
		if err != nil {
			return "", fmt.Errorf("read metrics_token: %w", err)
		}
		token := strings.TrimSpace(string(text))
		if len(token) < minToken {
			return "", fmt.Errorf("read metrics_token: the token in %s has fewer than %d bytes", p.Token, minToken)
		}
		return token, nil
	}
}

// RequireToken returns a handler that passes a request to next if its header Authorization has the token that the function
// read returns. Other requests get 401. All requests get 500 if the token cannot be read. If read is nil, RequireToken
// returns next.
func RequireToken(read func() (string, error), log *slog.Logger, next http.Handler) http.Handler {
	if read == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		want, err := read()
		if err != nil {
			log.Error("cannot check a request for metrics", "err", err)
			http.Error(w, "the token for metrics cannot be read: see the log", http.StatusInternalServerError)
			return
		}
		// Compare hashes, so that the time of the comparison does not depend on the length of the sent token.
		sent, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		a, b := sha256.Sum256([]byte(sent)), sha256.Sum256([]byte(want))
		if (!bearer || subtle.ConstantTimeCompare(a[:], b[:]) != 1) && !mutant.On(mutant.IgnoreScrapeToken) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, r.URL.Path+` requires the header "Authorization: Bearer TOKEN" with the token in the file of the `+
				"setting metrics_token", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
