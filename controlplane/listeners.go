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

// boundListener describes an open listener and its servers: gRPC or HTTP, or both on a port for etcd's clients.
type boundListener struct {
	name, address string
	grpc          *grpc.Server
	http          http.Handler
}

// listenerSet is a set of listeners that close together.
type listenerSet struct {
	log *slog.Logger
	// opened, if set, is called with every listener that was opened.
	opened func(boundListener)
	// failed receives the errors of listeners that end before close.
	failed    chan error
	grpc      []*grpc.Server
	http      []*http.Server
	splitters []*etcdrpc.Splitter
	work      sync.WaitGroup
}

func newListenerSet(log *slog.Logger, opened func(boundListener), failed chan error) *listenerSet {
	return &listenerSet{log: log, opened: opened, failed: failed}
}

// serve opens a listener for a gRPC server or an HTTP handler, one of which is nil, and serves it until close. HTTP is
// plaintext if secure is nil. A gRPC server has credentials of its own.
func (l *listenerSet) serve(name, address string, g *grpc.Server, h http.Handler, secure *tls.Config) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", name, err)
	}
	l.notifyOpened(boundListener{name, listener.Addr().String(), g, h})
	if g != nil {
		l.grpc = append(l.grpc, g)
		l.work.Go(func() { l.reportEnd(name, g.Serve(listener)) })
		return nil
	}
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	s := l.newHTTPServer(h)
	l.http = append(l.http, s)
	l.work.Go(func() { l.reportEnd(name, s.Serve(listener)) })
	return nil
}

// newHTTPServer returns a server with the limits of every HTTP port: a header must arrive within 10 s, the whole
// request within 30 s, and a response takes at most 2 minutes.
func (l *listenerSet) newHTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		// The longest wait of a REST call is stopping a VM: 30 s and a margin.
		WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(l.log.Handler(), slog.LevelDebug),
	}
}

// notifyOpened calls opened.
func (l *listenerSet) notifyOpened(d boundListener) {
	if l.opened != nil {
		l.opened(d)
	}
}

// reportEnd sends err to failed unless it means that the server was stopped.
func (l *listenerSet) reportEnd(name string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		l.failed <- fmt.Errorf("serve %s: %w", name, err)
	}
}

// close refuses new requests, waits up to drain for those under way, and then cancels them. It returns after every
// server has stopped.
func (l *listenerSet) close(drain time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	var stopped sync.WaitGroup
	for _, s := range l.splitters {
		s.Close() // Serve returns the same error
	}
	for _, s := range l.http {
		stopped.Go(func() {
			if s.Shutdown(ctx) != nil {
				s.Close()
			}
		})
	}
	for _, s := range l.grpc {
		stopped.Go(func() {
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
	stopped.Wait()
	l.work.Wait()
}
