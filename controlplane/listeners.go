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

	"github.com/trivet-cloud/trivet/controlplane/edge/split"
)

// boundListener is an open listener with the servers that serve it: a gRPC or an HTTP server, or both on a port for
// etcd's clients.
type boundListener struct {
	name, address string
	grpc          *grpc.Server
	http          http.Handler
}

// listenerSet is a set of listeners that are closed together.
type listenerSet struct {
	log *slog.Logger
	// opened, if set, is called with each listener after it was opened.
	opened func(boundListener)
	// failed receives the errors of servers that end before close is called.
	failed    chan error
	grpc      []*grpc.Server
	http      []*http.Server
	splitters []*split.Splitter
	work      sync.WaitGroup
}

func newListenerSet(log *slog.Logger, opened func(boundListener), failed chan error) *listenerSet {
	return &listenerSet{log: log, opened: opened, failed: failed}
}

// serve opens a listener and serves it until close is called. Either g, a gRPC server, or h, an HTTP handler, is set;
// the other one is nil. HTTP is plaintext if secure is nil. A gRPC server has its own credentials, so secure is not
// used for it.
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

// serveSplit opens a listener that serves gRPC and HTTP/1 on the same port. secure is nil for plaintext. The gRPC server
// must have the transport credentials of package split.
func (l *listenerSet) serveSplit(name, address string, g *grpc.Server, h http.Handler, secure *tls.Config) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", name, err)
	}
	s := l.newHTTPServer(h)
	l.notifyOpened(boundListener{name, listener.Addr().String(), g, h})
	ports := split.New(listener, secure)
	l.grpc, l.http, l.splitters = append(l.grpc, g), append(l.http, s), append(l.splitters, ports)
	l.work.Go(func() { l.reportEnd(name, ports.Serve()) })
	l.work.Go(func() { l.reportEnd(name, ignoreClosed(g.Serve(ports.GRPC()))) })
	l.work.Go(func() { l.reportEnd(name, ignoreClosed(s.Serve(ports.HTTP()))) })
	return nil
}

// newHTTPServer returns a server with the time limits of every HTTP port: the header of a request must arrive within 10
// s, the entire request within 30 s, and the response must be sent within 2 minutes after the header. Package rest
// extends the last limit when a handler has returned, because some calls wait longer.
func (l *listenerSet) newHTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(l.log.Handler(), slog.LevelDebug),
	}
}

// notifyOpened calls l.opened if it is set.
func (l *listenerSet) notifyOpened(d boundListener) {
	if l.opened != nil {
		l.opened(d)
	}
}

// reportEnd is called when the server with this name has ended. It sends the server's error to l.failed, unless the
// server was stopped on purpose.
func (l *listenerSet) reportEnd(name string, err error) {
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		l.failed <- fmt.Errorf("serve %s: %w", name, err)
	}
}

// close refuses new requests and waits until running requests have ended, at most for the duration drain. Then it
// cancels the rest, and returns when every server has stopped.
func (l *listenerSet) close(drain time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	var stopped sync.WaitGroup
	for _, s := range l.splitters {
		s.Close() // Serve returns the same error, which is reported
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
