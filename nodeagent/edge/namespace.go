package edge

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
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
	*netspace.Space
	ctx     context.Context // of the call
	changes *[]string       // those of the call's Result
}

func openSpace(ctx context.Context, path string, r *Result) (*space, error) {
	s, err := netspace.Open(path, requestTimeout, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &space{Space: s, ctx: ctx, changes: &r.Changes}, nil
}

// changed records a write.
func (s *space) changed(format string, args ...any) {
	*s.changes = append(*s.changes, fmt.Sprintf("[%s] ", filepath.Base(s.Path))+fmt.Sprintf(format, args...))
}

// setSettings writes those settings of the namespace that differ.
func (s *space) setSettings(all []netspace.Setting) error {
	return s.Set(all, func(one netspace.Setting) { s.changed("sysctl -w %s=%s", one.Path, one.Value) })
}
