package mtls

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func authority(t *testing.T, cluster string, seed byte) *Authority {
	a, err := NewAuthority(cluster, bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	require.NoError(t, err)
	return a
}

func issued(t *testing.T, a *Authority, kind Kind, name string, at time.Time, life time.Duration) Source {
	c, err := a.IssueFor(kind, name, at, life)
	require.NoError(t, err)
	return func() (*tls.Certificate, error) { return c, nil }
}

// handshake connects a client to a server, and returns the error of each. It exchanges one byte, because a TLS 1.3
// client gets the server's rejection only when it reads.
func handshake(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	b, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	a, err := listener.Accept()
	require.NoError(t, err)
	defer a.Close()
	defer b.Close()
	done := make(chan error, 1)
	go func() {
		s := tls.Server(a, server)
		err := s.HandshakeContext(ctx)
		if err == nil {
			_, err = s.Write([]byte{1})
		} else {
			a.Close()
		}
		done <- err
	}()
	c := tls.Client(b, client)
	clientErr = c.HandshakeContext(ctx)
	if clientErr == nil {
		_, clientErr = io.ReadFull(c, make([]byte, 1))
	}
	b.Close()
	return <-done, clientErr
}

// TestWhichKindsConnect presents certificates of every kind to a listener of every kind. Only the intended pairs may
// connect.
func TestWhichKindsConnect(t *testing.T) {
	now := time.Now()
	ours, theirs := authority(t, "ours", 1), authority(t, "theirs", 2)
	impostor := authority(t, "ours", 2) // an authority with another key, for the same cluster ID
	clients := map[string]Source{
		"none":                  nil,
		"member":                issued(t, ours, Member, "2", now, time.Hour),
		"node":                  issued(t, ours, Node, "n1", now, time.Hour),
		"other member":          issued(t, theirs, Member, "2", now, time.Hour),
		"other node":            issued(t, theirs, Node, "n1", now, time.Hour),
		"impostor":              issued(t, impostor, Member, "2", now, time.Hour),
		"expired member":        issued(t, ours, Member, "2", now.Add(-2*time.Hour), time.Hour),
		"node not yet valid":    issued(t, ours, Node, "n1", now.Add(2*time.Hour), time.Hour),
		"expired node":          issued(t, ours, Node, "n1", now.Add(-2*time.Hour), time.Hour),
		"node expired for long": issued(t, ours, Node, "n1", now.Add(-48*time.Hour), time.Hour),
	}
	own := issued(t, ours, Member, "1", now, time.Hour)
	ports := []struct {
		name   string
		config *tls.Config
		lets   map[string]bool
	}{
		{"peers", Server(own, ours.Certificate(), OnlyKind(Member)), map[string]bool{"member": true}},
		{"agents", ServerOptional(own, ours.Certificate(), OnlyKind(Node), 24*time.Hour), map[string]bool{"node": true, "none": true, "expired node": true}},
	}
	for _, port := range ports {
		for name, source := range clients {
			serverErr, clientErr := handshake(t, port.config, Client(source, ours.Certificate(), OnlyKind(Member)))
			if port.lets[name] {
				require.NoError(t, serverErr, "%s at %s", name, port.name)
				require.NoError(t, clientErr, "%s at %s", name, port.name)
			} else {
				require.Error(t, serverErr, "%s at %s", name, port.name)
				require.Error(t, clientErr, "%s at %s", name, port.name)
			}
		}
	}
}

// TestOnlyAMemberServes checks that a client accepts only members of its own cluster as servers, and no node.
func TestOnlyAMemberServes(t *testing.T) {
	now := time.Now()
	ours, theirs := authority(t, "ours", 1), authority(t, "theirs", 2)
	agent := issued(t, ours, Node, "n1", now, time.Hour)
	for name, server := range map[string]Source{
		"node": agent, "other": issued(t, theirs, Member, "1", now, time.Hour),
	} {
		_, err := handshake(t, ServerOptional(server, ours.Certificate(), OnlyKind(Node), 0), Client(agent, ours.Certificate(), OnlyKind(Member)))
		require.Error(t, err, name)
	}
}

func TestPin(t *testing.T) {
	now := time.Now()
	ours, theirs := authority(t, "ours", 1), authority(t, "theirs", 2)
	serving := func(a *Authority) *tls.Config {
		own := issued(t, a, Member, "1", now, time.Hour)
		return ServerOptional(func() (*tls.Certificate, error) {
			c, err := own()
			return WithAuthority(c, a.Certificate()), err
		}, a.Certificate(), OnlyKind(Node), 0)
	}
	_, err := handshake(t, serving(ours), ClientPinned(Pin(ours.Certificate())))
	require.NoError(t, err)
	_, err = handshake(t, serving(theirs), ClientPinned(Pin(ours.Certificate())))
	require.ErrorContains(t, err, "another certificate authority")
}

func TestSameSeedSameAuthority(t *testing.T) {
	require.Equal(t, authority(t, "c", 1).Certificate().Raw, authority(t, "c", 1).Certificate().Raw)
	require.NotEqual(t, Pin(authority(t, "c", 1).Certificate()), Pin(authority(t, "c", 3).Certificate()))
}

func TestOfRefusesOtherForms(t *testing.T) {
	_, err := IDOf(&x509.Certificate{})
	require.ErrorContains(t, err, "0 URIs")
}

// TestVerificationUsesConfiguredClock checks that the dates of a certificate are compared with Config.Time, if it is
// set.
func TestVerificationUsesConfiguredClock(t *testing.T) {
	ours, now := authority(t, "ours", 1), time.Now()
	leaf, err := issued(t, ours, Member, "2", now, 24*time.Hour)()
	require.NoError(t, err)
	state := tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf.Leaf}}
	c := Client(nil, ours.Certificate(), OnlyKind(Member))
	for ahead, good := range map[time.Duration]bool{0: true, -10 * time.Minute: true, 10 * time.Minute: true, -2 * time.Hour: false, 25 * time.Hour: false} {
		c.Time = func() time.Time { return now.Add(ahead) }
		require.Equal(t, good, c.Clone().VerifyConnection(state) == nil, ahead)
	}
}
