package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// door is a listener that was opened, and what answers there: gRPC, HTTP, or on a port for etcd's clients both.
type door struct {
	name, address string
	grpc          *grpc.Server
	http          http.Handler
}

// edges are the listeners of a member.
type edges struct {
	log *slog.Logger
	// opened is told of each; optional.
	opened func(door)
	failed chan error
	grpc   []*grpc.Server
	http   []*http.Server
	splits []*etcdrpc.Splitter
	work   sync.WaitGroup
}

// drainTime is how long a request may take to end when the member stops. Streams of tenants do not end by themselves.
const drainTime = 2 * time.Second

// serve opens a listener for one of the two and serves it until close. HTTP is plaintext without a configuration; a gRPC
// server has its credentials.
func (e *edges) serve(name, address string, g *grpc.Server, h http.Handler, secure *tls.Config) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", name, err)
	}
	e.tell(door{name, listener.Addr().String(), g, h})
	if g != nil {
		e.grpc = append(e.grpc, g)
		e.work.Go(func() { e.ended(name, g.Serve(listener)) })
		return nil
	}
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	s := e.httpServer(h)
	e.http = append(e.http, s)
	e.work.Go(func() { e.ended(name, s.Serve(listener)) })
	return nil
}

// httpServer returns a server with the limits of every HTTP port: a header must arrive within 10 s, the whole request
// within 30 s, and an answer takes at most 2 minutes.
func (e *edges) httpServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		// Longer than the longest wait of a REST call, a stop of 30 s and its margin.
		WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
}

func (e *edges) tell(d door) {
	if e.opened != nil {
		e.opened(d)
	}
}

func (e *edges) ended(name string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		e.failed <- fmt.Errorf("serve %s: %w", name, err)
	}
}

// close lets requests end for a while, then cuts.
func (e *edges) close(drainTime time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	var drain sync.WaitGroup
	for _, s := range e.splits {
		s.Close() // it says nothing that Serve does not
	}
	for _, s := range e.http {
		drain.Go(func() {
			if s.Shutdown(ctx) != nil {
				s.Close()
			}
		})
	}
	for _, s := range e.grpc {
		drain.Go(func() {
			graceful := make(chan struct{})
			go func() { s.GracefulStop(); close(graceful) }()
			select {
			case <-graceful:
			case <-ctx.Done():
				s.Stop()
				<-graceful
			}
		})
	}
	drain.Wait()
	e.work.Wait()
}

// leaf signs this member's certificate, and a new one at half its life.
func leaf(authority *mtls.Authority, member uint64, now func() time.Time) mtls.Source {
	var mu sync.Mutex
	var current *tls.Certificate
	return func() (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if now := now(); current == nil || now.After(current.Leaf.NotAfter.Add(-leafLife/2)) {
			c, err := authority.IssueFor(mtls.Member, strconv.FormatUint(member, 10), now, leafLife)
			if err != nil {
				return nil, err
			}
			current = c
		}
		return current, nil
	}
}

// withAuthority shows the authority beside the leaf, for agents that hold only its pin.
func withAuthority(source mtls.Source, authority *mtls.Authority) mtls.Source {
	return func() (*tls.Certificate, error) {
		c, err := source()
		if err != nil {
			return nil, err
		}
		return mtls.WithAuthority(c, authority.Certificate()), nil
	}
}

// at makes a listener judge certificates by the member's time.
func at(c *clock.Clock, config *tls.Config) *tls.Config {
	config.Time = c.Now
	return config
}
