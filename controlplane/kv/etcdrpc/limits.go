package etcdrpc

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// Bounds on the streams (Watch, LeaseKeepAlive, RangeStream, Snapshot) that are open at a time on one member, over all of
// its ports. One more is ResourceExhausted. etcd has no such bound; its clients carry all watches of a program over a
// few streams.
const (
	// maxClientStreams bounds one user of etcd's Auth or, where no user is known, one address (an IPv6 /64).
	maxClientStreams = 2048
	// maxStreams bounds all clients of a member.
	maxStreams = 8192
)

// openStreams counts the open streams of a member.
type openStreams struct {
	mu      sync.Mutex
	all     int
	clients map[string]int
}

// clientOf identifies the client of a call for bounds: the user of etcd's Auth or, if there is none, the address.
func clientOf(ctx context.Context, user string) string {
	if user != "" {
		return "user " + user
	}
	return "address " + rpc.Network(ctx).String()
}

// errSlowReader ends a watch stream whose client reads nothing while others wait for memory. etcd's client opens the
// stream again after UNAVAILABLE, and each of its watches goes on from its revision.
var errSlowReader = status.Error(codes.Unavailable,
	"etcdserver: the watch stream was ended because its client reads nothing and the member needs the memory: read faster")

// take counts one more stream of the client of ctx, or returns ResourceExhausted. Call done when the stream has ended.
func (o *openStreams) take(ctx context.Context, user string) (done func(), err error) {
	client := clientOf(ctx, user)
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := o.clients[client]; n >= maxClientStreams {
		return nil, status.Errorf(codes.ResourceExhausted,
			"etcdserver: %s has %d streams open on this member, which is the limit: share a stream among watches", client, n)
	}
	if o.all >= maxStreams {
		return nil, status.Errorf(codes.ResourceExhausted,
			"etcdserver: all clients together have %d streams open on this member, which is the limit: use another member", o.all)
	}
	if o.clients == nil {
		o.clients = map[string]int{}
	}
	o.all++
	o.clients[client]++
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.all--
		if o.clients[client]--; o.clients[client] == 0 {
			delete(o.clients, client)
		}
	}, nil
}
