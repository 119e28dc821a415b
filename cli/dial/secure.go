package dial

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Exposed is the error if a secret would be sent to another host in plaintext. Nothing was sent.
type Exposed struct{ Endpoint string }

func (e *Exposed) Error() string {
	return fmt.Sprintf("a secret would be sent to %s in plaintext", e.Endpoint)
}

// exposed returns an *Exposed error for the first endpoint to which secrets must not be sent.
func exposed(opts *Options) error {
	if opts.TLS != nil || opts.Plaintext || opts.Token == "" && !opts.Confides {
		return nil
	}
	for _, e := range opts.Endpoints {
		if !onLoopback(e) && !mutant.On(mutant.SecretInPlaintext) {
			return &Exposed{e}
		}
	}
	return nil
}

// onLoopback reports whether host:port is on loopback. A host name other than localhost is not, whatever it resolves
// to.
func onLoopback(endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// transport returns the transport credentials of a connection. A failed handshake is recorded in a.
func transport(config *tls.Config, a *attempt) credentials.TransportCredentials {
	if config == nil {
		return insecure.NewCredentials()
	}
	return noting{credentials.NewTLS(config), a}
}

type noting struct {
	credentials.TransportCredentials
	attempt *attempt
}

// ClientHandshake implements credentials.TransportCredentials.
func (n noting) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := n.TransportCredentials.ClientHandshake(ctx, authority, conn)
	if err != nil {
		n.attempt.mu.Lock()
		n.attempt.err = err
		n.attempt.mu.Unlock()
	}
	return secure, info, err
}

// Clone implements credentials.TransportCredentials.
func (n noting) Clone() credentials.TransportCredentials {
	return noting{n.TransportCredentials.Clone(), n.attempt}
}

// ofTLS formats the reason of a failed TLS handshake; "" for any other error.
func ofTLS(err error) string {
	var plain tls.RecordHeaderError
	var stranger x509.UnknownAuthorityError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.As(err, &plain):
		return "does not speak TLS"
	case errors.As(err, &stranger):
		return "its certificate is signed by an unknown authority; give the authority with --tls-ca"
	case errors.As(err, &untrusted):
		return untrusted.Err.Error()
	}
	return ""
}
