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

// Exposed says that a secret would go to an endpoint on another host in plaintext: nothing was sent.
type Exposed struct{ Endpoint string }

func (e *Exposed) Error() string {
	return fmt.Sprintf("what is secret would go to %s in plaintext", e.Endpoint)
}

// exposed finds an endpoint that may not be told what is secret.
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

// onLoopback says whether host:port is this host. A name that is not localhost may be anybody, whatever it means now.
func onLoopback(endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// transport are the credentials of a connection; what goes wrong with its handshake is noted in the attempt.
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

// ofTLS says why a handshake failed; empty when it was something else.
func ofTLS(err error) string {
	var plain tls.RecordHeaderError
	var stranger x509.UnknownAuthorityError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.As(err, &plain):
		return "does not speak TLS"
	case errors.As(err, &stranger):
		return "its certificate is of an authority that is not trusted here; name that with --tls-ca"
	case errors.As(err, &untrusted):
		return untrusted.Err.Error()
	}
	return ""
}
