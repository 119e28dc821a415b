package edge

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// requestTimeout limits the wait for the kernel's answer to one netlink request.
const requestTimeout = 30 * time.Second

// namespaceDir is where ip-netns(8) mounts namespaces.
const namespaceDir = "/run/netns"

func (e *Edge) name() string { return e.options.Prefix + namespaceName }
func (e *Edge) path() string { return filepath.Join(namespaceDir, e.name()) }

// createNamespace makes the edge namespace unless it exists.
func (e *Edge) createNamespace(r *Result) error {
	created, err := nsthread.Create(e.name())
	if created {
		r.Changes = append(r.Changes, "ip netns add "+e.name())
	}
	return err
}

// space is a network namespace during one call.
type space struct {
	*netlink.Handle
	ctx     context.Context // of the call
	path    string
	ns      netns.NsHandle
	changes *[]string // those of the call's Result
}

func openSpace(ctx context.Context, path string, r *Result) (*space, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open netlink sockets in %s: %w", path, err)
	}
	if err := handle.SetSocketTimeout(requestTimeout); err != nil {
		handle.Close()
		ns.Close()
		return nil, fmt.Errorf("limit the time of netlink requests in %s: %w", path, err)
	}
	return &space{Handle: handle, ctx: ctx, path: path, ns: ns, changes: &r.Changes}, nil
}

func (s *space) close() {
	s.Close()
	s.ns.Close()
}

// changed records a write.
func (s *space) changed(format string, args ...any) {
	*s.changes = append(*s.changes, fmt.Sprintf("[%s] ", filepath.Base(s.path))+fmt.Sprintf(format, args...))
}

// in calls f on a thread in the namespace.
func (s *space) in(f func() error) error {
	return nsthread.In(s.ns, f)
}

// dumpAttempts is how often a list is read while it changes.
const dumpAttempts = 10

// dump reads a list from the kernel. The kernel reports when the list changed meanwhile; then dump repeats.
func dump[T any](what string, read func() (T, error)) (T, error) {
	var list T
	var err error
	for range dumpAttempts {
		list, err = read()
		if !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return list, fmt.Errorf("list %s: %w", what, err)
	}
	return list, nil
}

// absent reports whether an error of a deletion means that there was nothing to delete.
func absent(err error) bool {
	return errors.As(err, new(netlink.LinkNotFoundError)) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) ||
		errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ESRCH) // the error for routes
}
