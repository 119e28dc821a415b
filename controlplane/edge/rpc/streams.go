package rpc

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Bounds on the streams that are open at a time on one member, over all of its ports for tenants. A further stream gets
// ResourceExhausted.
const (
	// MaxPrincipalStreams bounds one user or service account. A program that watches each VM of a project needs one
	// stream for each of them; half of its project's streams stay for others.
	MaxPrincipalStreams = 128
	// MaxProjectStreams bounds all principals that act in one project.
	MaxProjectStreams = 256
	// MaxOrgStreams bounds all projects of an org together, since an org can create many projects.
	MaxOrgStreams = 1024
	// MaxMemberStreams bounds the memory that idle streams cost a member: about 30 KiB each. It does not apply to
	// operators (Caller.IsCloudAdmin), so that they can work on a member that tenants have filled.
	MaxMemberStreams = 8192
	// MaxOpenStreams bounds the streams of unauthenticated callers: health, reflection, and calls that will be refused.
	// MaxAddressStreams bounds such streams from one IPv4 address or one IPv6 /64 network.
	MaxOpenStreams    = 512
	MaxAddressStreams = 32
)

// Streams counts the open streams of a member, and the bytes that they hold because clients have not read them. The
// servers of a member share one.
type Streams struct {
	mu     sync.Mutex
	counts map[scope]int
	unsent unsent
	conns  map[string]*conn
}

// NewStreams returns a Streams with no open streams.
func NewStreams() *Streams {
	s := &Streams{counts: map[scope]int{}, conns: map[string]*conn{}}
	s.unsent.init(&s.mu)
	return s
}

// scope is the key of a stream counter (such as a principal or a project) with its limit.
type scope struct {
	what, id string
	most     int
}

// full returns the error for one more stream in a scope that is at its limit.
func (s scope) full() error {
	name := s.what + " have"
	if s.id != "" {
		name = s.what + " " + s.id + " has"
	}
	return fault.New(fault.ResourceExhausted,
		"%s %d streams open on this member, which is the limit: close some of them, or open this one on another member", name, s.most).
		WithReason("TOO_MANY_STREAMS").With("limit", s.most).MayRetry()
}

// callerScopes returns the scopes that count a stream when it is opened, before its request is read.
func callerScopes(ctx context.Context, c *cloud.Caller) []scope {
	if c == nil || !c.Authenticated() {
		return []scope{
			{"address", Network(ctx).String(), MaxAddressStreams},
			{"all unauthenticated callers together", "", MaxOpenStreams},
		}
	}
	scopes := []scope{{"principal", string(c.User), MaxPrincipalStreams}}
	if !c.IsCloudAdmin() {
		scopes = append(scopes, scope{"all tenants together", "", MaxMemberStreams})
	}
	return scopes
}

// tenantScopes returns the scopes that count a stream when it is admitted for a tenant.
func tenantScopes(t cloud.Tenant) (scopes []scope) {
	if t.Project != "" {
		scopes = append(scopes, scope{"project", t.String(), MaxProjectStreams})
	}
	if t.Org != "" {
		scopes = append(scopes, scope{"org", string(t.Org), MaxOrgStreams})
	}
	return scopes
}

// take counts one more stream in each of scopes. If a scope is full it returns ResourceExhausted and counts none.
func (s *Streams) take(scopes []scope) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range scopes {
		if s.counts[one] >= one.most {
			return one.full()
		}
	}
	for _, one := range scopes {
		s.counts[one]++
	}
	return nil
}

// releaseScopes counts one stream less in each of scopes.
func (s *Streams) releaseScopes(scopes []scope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range scopes {
		if s.counts[one]--; s.counts[one] == 0 {
			delete(s.counts, one)
		}
	}
}

// open returns the number of open streams in a scope.
func (s *Streams) open(one scope) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[one]
}

// limitStream counts a stream for its caller and its tenant, and runs it until it returns or its token becomes invalid.
func (e *edge) limitStream(ctx context.Context, ss grpc.ServerStream, run func(grpc.ServerStream) error) error {
	s := e.opts.Streams
	scopes := callerScopes(ctx, auth.CallerOf(ctx))
	if err := s.take(scopes); err != nil {
		return err
	}
	defer func() { s.releaseScopes(scopes) }()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	f := s.newFlow(ctx, end)
	defer f.close()
	var admitted sync.Once
	auth.OnAdmit(ctx, func(t cloud.Tenant) (err error) {
		admitted.Do(func() {
			more := tenantScopes(t)
			if err = s.take(more); err == nil {
				scopes = append(scopes, more...)
				f.bind(string(t.Org))
			}
		})
		return err
	})
	if auth.CallerOf(ctx) != nil {
		stop, err := e.whileValid(ctx, end)
		if err != nil {
			return err
		}
		defer stop()
	}
	err := run(&stream{ServerStream: ss, ctx: ctx, flow: f})
	var why *fault.Fault
	if cause := context.Cause(ctx); err != nil && errors.As(cause, &why) {
		return cause
	}
	return err
}
