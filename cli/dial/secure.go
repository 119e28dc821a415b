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

// Exposed is the error of Open if a secret would be sent to Endpoint, which is on another host, in plaintext. Nothing
// was sent.
type Exposed struct{ Endpoint string }

func (e *Exposed) Error() string {
	return fmt.Sprintf("a secret would be sent to %s in plaintext", e.Endpoint)
}

// exposed returns an *Exposed error if Open would send a secret to another host in plaintext. This is the case if calls
// contain a secret, no TLS is configured, opts.Plaintext is false, and an endpoint is not on loopback. The error names
// the first such endpoint.
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

// onLoopback reports whether the host of a host:port is localhost or a loopback address. It reports false for any other
// name, even if that resolves to a loopback address.
func onLoopback(endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// transport returns the transport credentials for a connection: TLS, or plaintext if config is nil. If a TLS handshake
// fails, they store its error in the attempt a.
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

// ClientHandshake implements credentials.TransportCredentials. It stores the error of a failed handshake in n.attempt.
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

// ofTLS returns a text for the error of a failed TLS handshake, or "" for any other error.
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
