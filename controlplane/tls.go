package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/certfile"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// warnAboutPlaintext logs whether the ports for tenants or for etcd's clients are plaintext. If other hosts can reach
// these ports, it logs an error.
func warnAboutPlaintext(c config.Config, log *slog.Logger) {
	switch {
	case c.PlaintextBeyondLoopback():
		log.Error("INSECURE: tenants' tokens and passwords cross the network in plaintext, readable for everyone on the path: set --tls-cert and --tls-key",
			"address", c.Listen)
	case c.KV.PlaintextAddress() != "":
		log.Error("INSECURE: the ports for etcd's clients are plaintext beyond loopback: give --kv-etcd-cert and --kv-etcd-key", "addresses", c.KV.EtcdListen)
	case !c.TLS.Enabled() && c.Dev:
		log.Info("tenants' ports are plaintext, on loopback only")
	case !c.TLS.Enabled():
		log.Warn("tenants' ports are plaintext, on loopback only: --tls-cert and --tls-key make them TLS")
	}
}

// tenantTLS holds the TLS configurations of the ports for tenants. All fields are nil if these ports are plaintext.
type tenantTLS struct {
	pair *certfile.Pair
	// rest is the TLS configuration of the REST APIs except the key-value REST API. That API has the configuration
	// kvREST, because other members forward requests to it.
	rest, kvREST *tls.Config
	// forwardClient is for requests that this member forwards to the key-value REST API of another member.
	forwardClient *tls.Config
}

// forwardProtocol is the ALPN protocol that members offer when they forward a request to the key-value REST API of
// another member. It selects mutual TLS with certificates of the cluster's own authority. The names in the tenants'
// certificate then do not matter.
const forwardProtocol = "trivet-forward"

// openTLS returns the TLS configurations of the ports for tenants, with the configured certificate. Without one, it
// returns an empty tenantTLS.
//
// REST over TLS is limited to HTTP/1.1, so that it behaves as in plaintext. gRPC negotiates HTTP/2 itself.
func openTLS(c config.Config, own mtls.Source, authority *mtls.Authority, log *slog.Logger) (*tenantTLS, error) {
	if !c.TLS.Enabled() {
		return &tenantTLS{}, nil
	}
	pair, err := certfile.Open(certfile.Options{Cert: c.TLS.Cert, Key: c.TLS.Key, Log: log})
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	t := &tenantTLS{pair: pair, rest: pair.Config("http/1.1"), kvREST: pair.Config("http/1.1")}
	members := mtls.Server(own, authority.Certificate(), mtls.OnlyKind(mtls.Member))
	members.NextProtos = []string{"http/1.1"}
	t.kvREST.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if slices.Contains(hello.SupportedProtos, forwardProtocol) {
			return members, nil
		}
		return nil, nil
	}
	t.forwardClient = mtls.Client(own, authority.Certificate(), mtls.OnlyKind(mtls.Member))
	t.forwardClient.NextProtos = []string{forwardProtocol, "http/1.1"}
	return t, nil
}

// grpc returns new credentials for a gRPC port, or nil for plaintext. Call it once for each server.
func (t *tenantTLS) grpc() credentials.TransportCredentials {
	if t.pair == nil {
		return nil
	}
	return credentials.NewTLS(t.pair.Config())
}

// runReload reloads the certificate files when they change, until ctx ends. On SIGHUP it checks the files at once.
// Without certificate files it ignores SIGHUP, unless dev is true: then SIGHUP ends the process, for example when the
// terminal is closed.
func (t *tenantTLS) runReload(ctx context.Context, dev bool) {
	if t.pair == nil && dev {
		return
	}
	hurry := make(chan os.Signal, 1)
	signal.Notify(hurry, syscall.SIGHUP)
	defer signal.Stop(hurry)
	if t.pair != nil {
		t.pair.Run(ctx, hurry)
		return
	}
	<-ctx.Done()
}

// clientURLRetryPause is the time between two calls of updateClientURL.
const clientURLRetryPause = 2 * time.Second

// runClientURLUpdate calls updateClientURL until it succeeds. The call fails while the cluster has no leader.
func runClientURLUpdate(ctx context.Context, c config.Config, members *membership.Service, log *slog.Logger) {
	for {
		limited, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := updateClientURL(limited, c, members)
		cancel()
		if err == nil {
			return
		}
		log.Debug("announce the URL for clients", "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(clientURLRetryPause):
		}
	}
}

// updateClientURL corrects the scheme of the client URL in this member's record. The record may have been written
// before TLS was turned on or off. A URL that an operator has set is not changed.
func updateClientURL(ctx context.Context, c config.Config, members *membership.Service) error {
	now := c.ClientURL(c.Listen)
	other := c
	other.TLS = config.TLS{}
	if !c.TLS.Enabled() {
		other.TLS.Cert = "-"
	}
	before := other.ClientURL(c.Listen)
	all, err := members.List(ctx, false)
	if err != nil {
		return err
	}
	for _, m := range all {
		if at := slices.Index(m.ClientURLs, before); m.ID == c.NodeID && at >= 0 {
			urls := slices.Clone(m.ClientURLs)
			urls[at] = now
			_, err := members.Update(ctx, membership.UpdateRequest{ID: m.ID, ClientURLs: urls})
			return err
		}
	}
	return nil
}
