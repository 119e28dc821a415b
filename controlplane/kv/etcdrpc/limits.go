package etcdrpc

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// Limits of the streams (Watch, LeaseKeepAlive, RangeStream, Snapshot) that are open at a time on one member, on all of
// its ports together. A stream beyond the limits fails with ResourceExhausted. etcd has no such limits; its clients
// multiplex all watches of a program over a few streams.
const (
	// maxClientStreams limits the streams of one user of etcd's Auth or, if a call has no user, of one address (an IPv6
	// /64).
	maxClientStreams = 2048
	// maxStreams limits the streams of all clients of a member together.
	maxStreams = 8192
)

// openStreams counts the open streams of a member, in total and per client.
type openStreams struct {
	mu      sync.Mutex
	all     int
	clients map[string]int
}

// clientOf returns the text that identifies the client of a call when its streams are counted. The text is the user of
// etcd's Auth or, if there is none, the address.
func clientOf(ctx context.Context, user string) string {
	if user != "" {
		return "user " + user
	}
	return "address " + rpc.Network(ctx).String()
}

// errSlowReader ends a watch stream whose client does not read while other streams need memory. etcd's client reopens
// the stream after UNAVAILABLE, and resumes each of its watches from its revision.
var errSlowReader = status.Error(codes.Unavailable,
	"etcdserver: the watch stream was closed, because its client does not read and the member needs the memory")

// acquire counts a new stream of a client, who is identified by the user or, without a user, by the address in ctx. It
// returns ResourceExhausted if a limit is reached. The caller must call done when the stream has ended.
func (o *openStreams) acquire(ctx context.Context, user string) (done func(), err error) {
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
