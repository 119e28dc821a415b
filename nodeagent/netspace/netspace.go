// Package netspace opens network namespaces for packages that read and change network devices, addresses, routes and
// settings in them. It contains what all of them need: a netlink handle with a time limit, repeated requests for lists
// that change meanwhile, and sysctls that are written only if they differ. It decides nothing about networks.
package netspace

import (
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

// Space is an open network namespace. Its methods must not be called after Close.
type Space struct {
	// Handle sends netlink requests to the namespace.
	*netlink.Handle
	NS netns.NsHandle
	// Path is the path of the namespace's file.
	Path string
}

// Open opens the namespace at path with netlink sockets for families, such as unix.NETLINK_ROUTE. timeout limits the
// wait for the kernel's answer to one request.
func Open(path string, timeout time.Duration, families ...int) (*Space, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	handle, err := netlink.NewHandleAt(ns, families...)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open netlink sockets in %s: %w", path, err)
	}
	s := &Space{Handle: handle, NS: ns, Path: path}
	if err := handle.SetSocketTimeout(timeout); err != nil {
		s.Close()
		return nil, fmt.Errorf("limit the time of netlink requests in %s: %w", path, err)
	}
	return s, nil
}

// Close closes the sockets and the namespace's file. The namespace continues to exist.
func (s *Space) Close() {
	s.Handle.Close()
	s.NS.Close()
}

// In calls f on a thread in the namespace.
func (s *Space) In(f func() error) error { return nsthread.In(s.NS, f) }

// Setting is a sysctl. Path is relative to /proc/sys.
type Setting struct{ Path, Value string }

// Set writes those settings of the namespace that differ, and calls changed after each write. It leaves out settings of
// IPv6 if the kernel has none.
func (s *Space) Set(all []Setting, changed func(Setting)) error {
	return s.In(func() error {
		for _, one := range all {
			path := filepath.Join("/proc/sys", one.Path)
			have, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(one.Path, "net/ipv6/") {
				continue
			}
			if err == nil && strings.TrimSpace(string(have)) != one.Value {
				err = os.WriteFile(path, []byte(one.Value), 0)
				changed(one)
			}
			if err != nil {
				return fmt.Errorf("change a setting: %w", err)
			}
		}
		return nil
	})
}

// listAttempts is the maximum number of times that List calls read.
const listAttempts = 10

// List reads a list from the kernel. It repeats the request if the kernel reports that the list changed meanwhile. what
// names the list in errors.
func List[T any](what string, read func() (T, error)) (T, error) {
	var list T
	var err error
	for range listAttempts {
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

// Absent reports whether an error of a deletion means that there was nothing to delete.
func Absent(err error) bool {
	return errors.As(err, new(netlink.LinkNotFoundError)) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) ||
		errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ESRCH) // the error for routes
}
