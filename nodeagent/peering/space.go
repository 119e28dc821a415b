package peering

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// requestTimeout limits the wait for the kernel's answer to one netlink request.
const requestTimeout = 20 * time.Second

// space is a network namespace during one call.
type space struct {
	*netlink.Handle
	ctx    context.Context // of the call
	path   string
	ns     netns.NsHandle
	result *Result
}

// openSpace opens the namespace at path. It returns fs.ErrNotExist if there is none.
func openSpace(ctx context.Context, path string, r *Result) (*space, error) {
	mounted, err := nsthread.Exists(path)
	if err == nil && !mounted {
		err = fs.ErrNotExist // the file of a namespace whose removal was interrupted
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open netlink socket in %s: %w", path, err)
	}
	if err := handle.SetSocketTimeout(requestTimeout); err != nil {
		handle.Close()
		ns.Close()
		return nil, fmt.Errorf("limit the time of netlink requests in %s: %w", path, err)
	}
	return &space{Handle: handle, ctx: ctx, path: path, ns: ns, result: r}, nil
}

func (s *space) close() {
	s.Close()
	s.ns.Close()
}

// in calls f on a thread in the namespace.
func (s *space) in(f func() error) error { return nsthread.In(s.ns, f) }

// changed records a write.
func (s *space) changed(format string, args ...any) {
	s.result.Changes = append(s.result.Changes, fmt.Sprintf(format, args...))
}

// dumpAttempts is how often dump reads a list that changes meanwhile.
const dumpAttempts = 10

// dump reads a list from the kernel. It repeats the request, up to dumpAttempts times, if the kernel reports that the
// list changed meanwhile.
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
		errors.Is(err, unix.ESRCH) // the error for routes
}

// setting is a sysctl. The path is relative to /proc/sys.
type setting struct{ path, value string }

// setSettings writes those settings of the namespace that differ.
func (s *space) setSettings(all []setting) error {
	return s.in(func() error {
		for _, one := range all {
			path := filepath.Join("/proc/sys", one.path)
			have, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(one.path, "net/ipv6/") {
				continue // a kernel without IPv6
			}
			if err == nil && strings.TrimSpace(string(have)) != one.value {
				err = os.WriteFile(path, []byte(one.value), 0)
				s.changed("sysctl -w %s=%s", one.path, one.value)
			}
			if err != nil {
				return fmt.Errorf("change a setting: %w", err)
			}
		}
		return nil
	})
}
