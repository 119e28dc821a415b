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

// warnAboutPlaintext says what is not protected.
func warnAboutPlaintext(c config.Config, log *slog.Logger) {
	switch {
	case c.PlaintextBeyondLoopback():
		log.Error("INSECURE: tenants' tokens and passwords cross the network in plaintext, for everybody on the way to read and use: give --tls-cert and --tls-key",
			"address", c.Listen)
	case c.KV.PlaintextAddress() != "":
		log.Error("INSECURE: the ports for etcd's clients are plaintext beyond loopback: give --kv-etcd-cert and --kv-etcd-key", "addresses", c.KV.EtcdListen)
	case !c.TLS.Enabled() && c.Dev:
		log.Info("tenants' ports are plaintext, on loopback only")
	case !c.TLS.Enabled():
		log.Warn("tenants' ports are plaintext, on loopback only: --tls-cert and --tls-key make them TLS")
	}
}

// tenantTLS is what tenants' ports speak; nil in a field is plaintext.
type tenantTLS struct {
	pair *certfile.Pair
	// rest is for HTTP, keys for that of the key-value store, where members hand requests on as well.
	rest, kvREST *tls.Config
	// toMember is how this member speaks with another's key-value REST.
	forwardClient *tls.Config
}

// forwardProtocol is what members offer (ALPN) when they hand a request on to another one's key-value REST. They get
// mutual TLS with the cluster's own certificates then: which names the tenants' certificate has is of no matter to them.
const forwardProtocol = "trivet-forward"

// openTLS reads the certificate, if there is one.
//
// REST over TLS is HTTP/1.1 as it is in plaintext: what was tested there holds here. gRPC asks for HTTP/2 itself.
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

// grpc are the credentials of a gRPC port, nil for plaintext. Each server gets its own.
func (t *tenantTLS) grpc() credentials.TransportCredentials {
	if t.pair == nil {
		return nil
	}
	return credentials.NewTLS(t.pair.Config())
}

// runReload follows the files until ctx ends. SIGHUP makes it look at once; without files it is heard and means nothing, but to
// a member at somebody's terminal (dev), which ends with it.
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

// clientURLRetryPause is the time between two attempts to announce.
const clientURLRetryPause = 2 * time.Second

// runClientURLUpdate announces until it is done: it takes a leader.
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

// updateClientURL corrects the scheme of the URL that this member's record has for its clients: it may have been written before
// TLS was turned on, or off. URLs that an operator gave are left alone.
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
