package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
)

// boundListener is a listener that was opened, and what answers there: gRPC, HTTP, or on a port for etcd's clients both.
type boundListener struct {
	name, address string
	grpc          *grpc.Server
	http          http.Handler
}

// listenerSet are the listeners of a member.
type listenerSet struct {
	log *slog.Logger
	// opened is told of each; optional.
	opened    func(boundListener)
	failed    chan error
	grpc      []*grpc.Server
	http      []*http.Server
	splitters []*etcdrpc.Splitter
	work      sync.WaitGroup
}

func newListenerSet(log *slog.Logger, opened func(boundListener), failed chan error) *listenerSet {
	return &listenerSet{log: log, opened: opened, failed: failed}
}

// serve opens a listener for one of the two and serves it until close. HTTP is plaintext without a configuration; a gRPC
// server has its credentials.
func (e *listenerSet) serve(name, address string, g *grpc.Server, h http.Handler, secure *tls.Config) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", name, err)
	}
	e.notifyOpened(boundListener{name, listener.Addr().String(), g, h})
	if g != nil {
		e.grpc = append(e.grpc, g)
		e.work.Go(func() { e.reportEnd(name, g.Serve(listener)) })
		return nil
	}
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	s := &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		// Longer than the longest wait of a REST call, a stop of 30 s and its margin.
		WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
	e.http = append(e.http, s)
	e.work.Go(func() { e.reportEnd(name, s.Serve(listener)) })
	return nil
}

func (e *listenerSet) notifyOpened(d boundListener) {
	if e.opened != nil {
		e.opened(d)
	}
}

func (e *listenerSet) reportEnd(name string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		e.failed <- fmt.Errorf("serve %s: %w", name, err)
	}
}

// close lets requests end for a while, then cuts.
func (e *listenerSet) close(drainTime time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	var drain sync.WaitGroup
	for _, s := range e.splitters {
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
