package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Forwarder accepts TCP connections in one network namespace and forwards each to the same address in the namespace of
// the process. With it, an agent in a namespace of its own reaches members that listen on loopback.
type Forwarder struct {
	listeners []net.Listener
	stop      context.CancelFunc
	work      sync.WaitGroup
}

// Forward listens on addresses, host:port each, in the network namespace at path.
func Forward(path string, addresses ...string) (*Forwarder, error) {
	ctx, stop := context.WithCancel(context.Background())
	f := &Forwarder{stop: stop}
	for _, address := range addresses {
		l, err := ListenIn(path, address)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen on %s in %s: %w", address, path, err), f.Close())
		}
		f.listeners = append(f.listeners, l)
		f.work.Go(func() { f.serve(ctx, l, address) })
	}
	return f, nil
}

// Close ends all connections and listeners.
func (f *Forwarder) Close() error {
	f.stop()
	var errs []error
	for _, l := range f.listeners {
		errs = append(errs, l.Close())
	}
	f.work.Wait()
	return errors.Join(errs...)
}

func (f *Forwarder) serve(ctx context.Context, l net.Listener, address string) {
	for {
		in, err := l.Accept()
		if err != nil {
			return // Close has closed the listener
		}
		f.work.Go(func() {
			defer in.Close()
			out, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err != nil {
				return // the member does not run; the caller sees a closed connection
			}
			defer out.Close()
			end := context.AfterFunc(ctx, func() { in.Close(); out.Close() })
			defer end()
			var copies sync.WaitGroup
			for _, c := range [][2]net.Conn{{in, out}, {out, in}} {
				copies.Go(func() {
					io.Copy(c[0], c[1])
					// End both directions, as a broken connection does.
					in.Close()
					out.Close()
				})
			}
			copies.Wait()
		})
	}
}

// ListenIn opens a TCP listener in the network namespace at path.
func ListenIn(path, address string) (l net.Listener, err error) {
	err = inNamespace(path, func() error {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// DialIn connects to a TCP address from the network namespace at path.
func DialIn(ctx context.Context, path, address string) (c net.Conn, err error) {
	err = inNamespace(path, func() error {
		c, err = (&net.Dialer{}).DialContext(ctx, "tcp", address)
		return err
	})
	return c, err
}

// inNamespace calls f on a thread of its own in the network namespace at path.
func inNamespace(path string, f func() error) error {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return nsthread.In(ns, f)
}
