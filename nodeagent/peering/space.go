package peering

import (
	"context"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// requestTimeout limits the wait for the kernel's answer to one netlink request.
const requestTimeout = 20 * time.Second

// space is a network namespace during one call.
type space struct {
	*netspace.Space
	ctx    context.Context // of the call
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
	s, err := netspace.Open(path, requestTimeout, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	return &space{Space: s, ctx: ctx, result: r}, nil
}

// changed records a write.
func (s *space) changed(format string, args ...any) {
	s.result.Changes = append(s.result.Changes, fmt.Sprintf(format, args...))
}

// setSettings writes those settings of the namespace that differ.
func (s *space) setSettings(all []netspace.Setting) error {
	return s.Set(all, func(one netspace.Setting) { s.changed("sysctl -w %s=%s", one.Path, one.Value) })
}
