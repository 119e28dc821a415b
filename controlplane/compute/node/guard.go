package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// guard holds the connections on which hosts presented a certificate, so that they can be closed. Calls and streams are
// authenticated only when they begin, and some streams are open for days.
type guard struct {
	mu    sync.Mutex // guards conns
	conns map[*guarded]bool
}

// guarded is one connection of a host.
type guarded struct {
	net.Conn
	raw   net.Conn // the connection below TLS
	node  cloud.NodeID
	leaf  *x509.Certificate
	guard *guard
}

// cut closes the connection, and with it every call and stream on it. It sends no TLS alert, since the host may not
// read it.
func (c *guarded) cut() { c.raw.Close() }

// Close implements net.Conn.
func (c *guarded) Close() error {
	c.guard.mu.Lock()
	delete(c.guard.conns, c)
	c.guard.mu.Unlock()
	return c.Conn.Close()
}

// Credentials returns the transport credentials of the server on port 7443. config comes from mtls.ServerOptional.
func (s *Service) Credentials(config *tls.Config) credentials.TransportCredentials {
	return watched{credentials.NewTLS(config), &s.guard}
}

type watched struct {
	credentials.TransportCredentials
	guard *guard
}

// ServerHandshake implements credentials.TransportCredentials.
func (w watched) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	t, ok := info.(credentials.TLSInfo)
	if !ok || len(t.State.PeerCertificates) == 0 {
		return conn, info, nil
	}
	leaf := t.State.PeerCertificates[0]
	id, err := mtls.Of(leaf)
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	c := &guarded{conn, raw, cloud.NodeID(id.Name), leaf, w.guard}
	if !w.guard.add(c) {
		return nil, nil, errors.Join(fmt.Errorf("host %s has %d connections", id.Name, maxConnections), conn.Close())
	}
	return c, info, nil
}

// Clone implements credentials.TransportCredentials.
func (w watched) Clone() credentials.TransportCredentials {
	return watched{w.TransportCredentials.Clone(), w.guard}
}

// add registers a connection. It returns false if the host has maxConnections already.
func (g *guard) add(c *guarded) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for other := range g.conns {
		if other.node == c.node {
			n++
		}
	}
	if n < maxConnections {
		g.conns[c] = true
	}
	return n < maxConnections
}

// some returns the connections for which choose returns true.
func (g *guard) some(choose func(*guarded) bool) (out []*guarded) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		if choose(c) {
			out = append(out, c)
		}
	}
	return out
}

func everyone(*guarded) bool { return true }

const (
	// freshEvery is how often a member checks that its records are current, so that it would have seen an eviction.
	freshEvery = time.Second
	// blindTime limits that check. A member that fails it closes the connections of all hosts; they connect to another
	// member and continue interrupted image reads there.
	blindTime = 5 * time.Second
)

// Guard closes the connections of evicted or banned hosts on this member until ctx ends. Every member runs it.
func (s *Service) Guard(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.guardOn(ctx)
		if ctx.Err() != nil {
			return
		}
		s.opts.Log.Warn("evictions are read again", "err", err)
		select {
		case <-time.After(freshEvery):
		case <-ctx.Done():
		}
	}
}

// guardOn checks every connection once, and then those that a change of records affects.
func (s *Service) guardOn(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer end(nil)
	var from int64
	if err := s.opts.Store.Local(func(v *store.View) error {
		from = v.Revision() + 1
		return nil
	}); err != nil {
		return err
	}
	// Start the watches before the first check: a change in between is then handled twice instead of never.
	work.Go(func() {
		end(heed(ctx, Nodes.WatchPaths(s.opts.Store, from), func(c store.PathChange) error {
			if !c.Deleted {
				return nil
			}
			return s.review(func(g *guarded) bool { return string(g.node) == c.Path[0] })
		}))
	})
	work.Go(func() {
		end(heed(ctx, evictions.WatchPaths(s.opts.Store, from), func(c store.PathChange) error {
			return s.review(func(g *guarded) bool { return string(g.node) == c.Path[0] })
		}))
	})
	work.Go(func() {
		end(heed(ctx, bans.WatchPaths(s.opts.Store, from), func(store.PathChange) error { return s.review(everyone) }))
	})
	if err := s.review(everyone); err != nil {
		return err
	}
	tick := time.NewTicker(freshEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.beFresh(ctx, blindTime)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// heed calls take for each change of a watch until one call fails.
func heed(ctx context.Context, w *store.PathWatch, take func(store.PathChange) error) error {
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			if err := take(c); err != nil {
				return err
			}
		}
	}
}

// review closes the chosen connections whose host is evicted, banned or unknown, and deletes the hosts' last-heartbeat
// times.
func (s *Service) review(choose func(*guarded) bool) error {
	chosen := s.guard.some(choose)
	if len(chosen) == 0 || mutant.On(mutant.KeepEvictedOpen) {
		return nil
	}
	return s.opts.Store.Local(func(v *store.View) error {
		for _, c := range chosen {
			why := judge(v, c.node, c.leaf)
			if why == nil {
				continue
			}
			s.opts.Log.Info("closing a host's connection", "node", c.node, "why", why)
			c.cut()
			s.mu.Lock()
			delete(s.seen, c.node)
			s.mu.Unlock()
		}
		return nil
	})
}

// beFresh closes all hosts' connections if this member cannot confirm within the given time that its records are
// current.
func (s *Service) beFresh(ctx context.Context, within time.Duration) {
	if len(s.guard.some(everyone)) == 0 {
		return
	}
	limited, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := s.opts.Store.Recent(limited, freshEvery, func(*store.View) error { return nil })
	if err == nil || ctx.Err() != nil {
		return
	}
	open := s.guard.some(everyone)
	s.opts.Log.Warn("closing the connections of all hosts: whether one was evicted cannot be known", "count", len(open), "err", err)
	for _, c := range open {
		c.cut()
	}
}
