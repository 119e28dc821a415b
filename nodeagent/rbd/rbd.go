// Package rbd gives the agent access to the RBD images of a Ceph cluster. A [Cluster] runs the helper program
// trivet-rbd, which links librbd. The Cluster is also a gRPC connection to the helper: pass the Cluster to
// rbdv1.NewRbdServiceClient.
//
// # Decisions
//
//   - librbd runs in a process of its own. A call of librbd can crash or can wait without end, and cannot be cancelled.
//     A call that passes its deadline makes the Cluster kill the helper. The next call starts another one. Other calls
//     of the killed helper fail with UNAVAILABLE, and may be repeated.
//   - Each call has a deadline: that of its context, or [Options.Timeout]. The deadline of a stream is always that of
//     its context, because the duration of an import depends on its size.
//   - The agent and the helper share a socket pair, so that no other process can reach the helper. The helper exits
//     when the agent does. The key of the Ceph user is sent over this socket only. No file, argument or environment
//     variable contains the key.
//   - The helper runs as an unprivileged user and needs no capability.
//   - QEMU opens images by its own librbd. No data of a running VM passes the helper.
//
// The package does not know VMs, volumes or the control plane.
package rbd

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// Options configure a Cluster.
type Options struct {
	// Program is the path of trivet-rbd. Required.
	Program string
	// UID and GID are the user and the group that the helper runs as. 0 means those of the agent.
	UID, GID uint32
	// Timeout limits a call whose context has no deadline. The default is 30 s.
	Timeout time.Duration
	// Log receives the lines that the helper writes to its standard error, and the reason when the agent kills the
	// helper. Required.
	Log *slog.Logger
}

// Cluster is a Ceph cluster. It implements grpc.ClientConnInterface. Its methods may be called concurrently.
type Cluster struct {
	options Options
	connect *rbdv1.ConnectRequest

	// starting has a value while a call starts a helper, which can take as long as the cluster needs to answer. Other
	// calls wait until the helper has started, each until its own deadline.
	starting chan struct{}

	mu     sync.Mutex
	helper *helper // nil before the first call, and after a helper has ended
	closed bool
}

var _ grpc.ClientConnInterface = (*Cluster)(nil)

// New returns a Cluster, whose helper starts with the first call. Each helper is connected with connect.
func New(o Options, connect *rbdv1.ConnectRequest) *Cluster {
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	return &Cluster{options: o, connect: connect, starting: make(chan struct{}, 1)}
}

var errClosed = status.Error(codes.FailedPrecondition, "the connection to the Ceph cluster is closed")

// Close ends the helper and waits for its end. Calls in progress fail, and later calls fail with FAILED_PRECONDITION.
func (c *Cluster) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.helper != nil {
		c.helper.end()
		c.helper = nil
	}
}

// Invoke makes a call without streams.
func (c *Cluster) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	ctx, cancel := c.withDeadline(ctx)
	defer cancel()
	h, err := c.running(ctx)
	if err != nil {
		return err
	}
	err = h.conn.Invoke(ctx, method, args, reply, opts...)
	c.check(h, method, err)
	return err
}

// NewStream begins a call with streams. Its context must have a deadline.
func (c *Cluster) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		return nil, status.Error(codes.InvalidArgument, method+": the context of a stream needs a deadline")
	}
	h, err := c.running(ctx)
	if err != nil {
		return nil, err
	}
	opts = append(opts, grpc.OnFinish(func(err error) { c.check(h, method, err) }))
	return h.conn.NewStream(ctx, desc, method, opts...)
}

func (c *Cluster) withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, bounded := ctx.Deadline(); bounded {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.options.Timeout)
}

// running returns the running helper. If no helper runs, it starts and connects one.
func (c *Cluster) running(ctx context.Context) (*helper, error) {
	select {
	case c.starting <- struct{}{}:
		defer func() { <-c.starting }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	h, err := c.current()
	if h != nil || err != nil {
		return h, err
	}
	h, err = start(c.options)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "start trivet-rbd: %v", err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.options.Timeout)
	defer cancel()
	if _, err := rbdv1.NewRbdServiceClient(h.conn).Connect(bounded, c.connect); err != nil {
		h.end()
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		h.end()
		return nil, errClosed
	}
	c.helper = h
	return h, nil
}

// current returns the helper, or nil if none runs.
func (c *Cluster) current() (*helper, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed
	}
	if c.helper != nil && c.helper.ended() {
		c.helper.end() // releases the resources of the ended helper
		c.helper = nil
	}
	return c.helper, nil
}

// check ends the helper if a gRPC call has passed its deadline, because the cause can be a librbd call that never
// returns.
func (c *Cluster) check(h *helper, method string, err error) {
	if status.Code(err) != codes.DeadlineExceeded {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.helper != h {
		return // another call has ended it already
	}
	c.options.Log.Warn("trivet-rbd is killed, because a call passed its deadline", "method", method, "pid", h.pid())
	h.end()
	c.helper = nil
}
