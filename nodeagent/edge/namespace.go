package edge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
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
	mounted, err := isNamespace(e.path())
	switch {
	case mounted:
		return nil
	case err == nil:
		// The file of a namespace of which the creation or the removal was interrupted.
		if err := os.Remove(e.path()); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := shareNamespaceDir(); err != nil {
		return fmt.Errorf("share mounts below %s: %w", namespaceDir, err)
	}
	err = nsthread.Do(func() error {
		ns, err := netns.NewNamed(e.name())
		if err != nil {
			return fmt.Errorf("create network namespace %s: %w", e.name(), err)
		}
		return ns.Close()
	})
	if err == nil {
		r.Changes = append(r.Changes, "ip netns add "+e.name())
	}
	return err
}

// isNamespace reports whether a namespace is mounted at path. It returns fs.ErrNotExist if there is no file.
func isNamespace(path string) (bool, error) {
	var info unix.Statfs_t
	if err := unix.Statfs(path, &info); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return info.Type == unix.NSFS_MAGIC, nil
}

// shareNamespaceDir makes mounts below namespaceDir take effect in all mount namespaces, as ip-netns(8) does, under the
// same lock. Otherwise a process with its own mount namespace keeps a copy of each mount, and thereby the namespace.
func shareNamespaceDir() error {
	if err := os.MkdirAll(namespaceDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(namespaceDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	err = unix.Mount("", namespaceDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	// Only mount points can be shared.
	if err := unix.Mount(namespaceDir, namespaceDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", namespaceDir, "none", unix.MS_SHARED|unix.MS_REC, "")
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
