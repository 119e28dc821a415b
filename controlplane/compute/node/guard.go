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

// guard holds the open connections on which a host presented a certificate, so that they can be closed when the host is
// evicted or banned. Calls and streams are authenticated only when they begin, and some streams are open for days.
type guard struct {
	mu    sync.Mutex // guards conns
	conns map[*guardedConn]bool
}

// guardedConn is one TLS connection of a host, with the host's certificate (leaf).
type guardedConn struct {
	net.Conn
	raw   net.Conn // the TCP connection below TLS
	node  cloud.NodeID
	leaf  *x509.Certificate
	guard *guard
}

// closeRaw closes the TCP connection, which ends every call and stream on it. It sends no TLS alert, because sending
// one could block if the host does not read.
func (c *guardedConn) closeRaw() { c.raw.Close() }

// Close implements net.Conn.
func (c *guardedConn) Close() error {
	c.guard.mu.Lock()
	delete(c.guard.conns, c)
	c.guard.mu.Unlock()
	return c.Conn.Close()
}

// Credentials returns the TLS credentials of the server for agents on port 7443, based on config, which comes from
// mtls.ServerOptional. The connections of hosts are registered so that Guard can close them.
func (s *Service) Credentials(config *tls.Config) credentials.TransportCredentials {
	return guardedCredentials{credentials.NewTLS(config), &s.guard}
}

type guardedCredentials struct {
	credentials.TransportCredentials
	guard *guard
}

// ServerHandshake implements credentials.TransportCredentials.
func (w guardedCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	t, ok := info.(credentials.TLSInfo)
	if !ok || len(t.State.PeerCertificates) == 0 {
		return conn, info, nil
	}
	leaf := t.State.PeerCertificates[0]
	id, err := mtls.IDOf(leaf)
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	c := &guardedConn{conn, raw, cloud.NodeID(id.Name), leaf, w.guard}
	if !w.guard.add(c) {
		return nil, nil, errors.Join(fmt.Errorf("host %s has %d connections", id.Name, maxConnections), conn.Close())
	}
	return c, info, nil
}

// Clone implements credentials.TransportCredentials.
func (w guardedCredentials) Clone() credentials.TransportCredentials {
	return guardedCredentials{w.TransportCredentials.Clone(), w.guard}
}

// add registers a connection and returns true. If the host already has maxConnections connections, it returns false and
// does not register the connection.
func (g *guard) add(c *guardedConn) bool {
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

// filter returns the connections for which choose returns true.
func (g *guard) filter(choose func(*guardedConn) bool) (out []*guardedConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		if choose(c) {
			out = append(out, c)
		}
	}
	return out
}

func anyConn(*guardedConn) bool { return true }

const (
	// freshInterval is how often a member checks that its records are current, as confirmed by a quorum. Without the
	// check, a partitioned member would not notice an eviction.
	freshInterval = time.Second
	// freshTimeout is the maximum duration of the check that this member's records are current. If the check fails, the
	// member closes the connections of all hosts. The hosts then connect to another member and continue interrupted
	// image reads there.
	freshTimeout = 5 * time.Second
)

// Guard closes this member's connections from hosts that are evicted or banned, until ctx ends. Every member runs it.
func (s *Service) Guard(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.guardOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		s.opts.Log.Warn("watch of evictions failed; retrying", "err", err)
		select {
		case <-time.After(freshInterval):
		case <-ctx.Done():
		}
	}
}

// guardOnce checks every connection once. It then checks a host's connections again when the host's record is deleted
// or its eviction changes, and all connections when any ban changes. It returns the error that ended a watch.
func (s *Service) guardOnce(ctx context.Context) error {
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
	// Start the watches before the first check. Otherwise a change between the check and the start of a watch would be
	// missed.
	work.Go(func() {
		end(forEachChange(ctx, Nodes.WatchPaths(s.opts.Store, from), func(c store.PathChange) error {
			if !c.Deleted {
				return nil
			}
			return s.recheck(func(g *guardedConn) bool { return string(g.node) == c.Path[0] })
		}))
	})
	work.Go(func() {
		end(forEachChange(ctx, evictions.WatchPaths(s.opts.Store, from), func(c store.PathChange) error {
			return s.recheck(func(g *guardedConn) bool { return string(g.node) == c.Path[0] })
		}))
	})
	work.Go(func() {
		end(forEachChange(ctx, bans.WatchPaths(s.opts.Store, from), func(store.PathChange) error { return s.recheck(anyConn) }))
	})
	if err := s.recheck(anyConn); err != nil {
		return err
	}
	tick := time.NewTicker(freshInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.closeIfStale(ctx, freshTimeout)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// forEachChange calls the function take for each change that the watch w returns. It ends when take or the watch
// returns an error, and returns this error.
func forEachChange(ctx context.Context, w *store.PathWatch, take func(store.PathChange) error) error {
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

// recheck checks the connections for which choose returns true. It closes a connection if its host is evicted or banned
// or has no record, and then also deletes the host's entry in lastHeartbeat.
func (s *Service) recheck(choose func(*guardedConn) bool) error {
	chosen := s.guard.filter(choose)
	if len(chosen) == 0 || mutant.On(mutant.KeepEvictedOpen) {
		return nil
	}
	return s.opts.Store.Local(func(v *store.View) error {
		for _, c := range chosen {
			why := checkHost(v, c.node, c.leaf)
			if why == nil {
				continue
			}
			s.opts.Log.Info("closing a host's connection", "node", c.node, "why", why)
			c.closeRaw()
			s.mu.Lock()
			delete(s.lastHeartbeat, c.node)
			s.mu.Unlock()
		}
		return nil
	})
}

// closeIfStale checks, within the given time, that this member's records are at most freshInterval old. If that cannot
// be confirmed, it closes the connections of all hosts. If ctx ends first, it closes none.
func (s *Service) closeIfStale(ctx context.Context, within time.Duration) {
	if len(s.guard.filter(anyConn)) == 0 {
		return
	}
	limited, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := s.opts.Store.Recent(limited, freshInterval, func(*store.View) error { return nil })
	if err == nil || ctx.Err() != nil {
		return
	}
	open := s.guard.filter(anyConn)
	s.opts.Log.Warn("closing the connections of all hosts: evictions could not be read", "count", len(open), "err", err)
	for _, c := range open {
		c.closeRaw()
	}
}
