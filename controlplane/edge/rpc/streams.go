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

// Limits of the streams that are open at a time on one member, over all of its ports for tenants. A stream beyond a
// limit gets ResourceExhausted.
const (
	// MaxPrincipalStreams is the maximum number of open streams of one user or service account. A program that watches
	// each VM of a project needs one stream per VM. One principal can use at most half of MaxProjectStreams.
	MaxPrincipalStreams = 128
	// MaxProjectStreams is the maximum number of open streams in one project, of all principals together.
	MaxProjectStreams = 256
	// MaxOrgStreams is the maximum number of open streams in one org, in all of its projects together. It is needed
	// because an org can create many projects.
	MaxOrgStreams = 1024
	// MaxMemberStreams is the maximum number of open streams of all tenants together. It limits memory: an idle stream
	// costs about 30 KiB. It does not apply to operators (Caller.IsCloudAdmin), so that they can work on a member that
	// tenants have filled.
	MaxMemberStreams = 8192
	// MaxOpenStreams is the maximum number of open streams of unauthenticated callers: health, reflection, and calls
	// that will be refused. MaxAddressStreams is the maximum from one IPv4 address or one IPv6 /64 network.
	MaxOpenStreams    = 512
	MaxAddressStreams = 32
)

// Streams counts the open streams of a member, and the bytes of messages that their clients have not read. All servers
// of a member share one Streams.
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

// scope is the key of a counter of streams, such as all streams of one principal or in one project, with its limit.
type scope struct {
	what, id string
	most     int
}

// full returns the ResourceExhausted fault for one more stream in a scope that is at its limit.
func (s scope) full() error {
	name := s.what + " have"
	if s.id != "" {
		name = s.what + " " + s.id + " has"
	}
	return fault.New(fault.ResourceExhausted,
		"%s %d streams open on this member, which is the limit: close some of them, or open this one on another member", name, s.most).
		WithReason("TOO_MANY_STREAMS").With("limit", s.most).MayRetry()
}

// callerScopes returns the counters to which a stream is added when it is opened, before its request is read.
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

// tenantScopes returns the counters to which a stream is also added when it is admitted for the tenant t.
func tenantScopes(t cloud.Tenant) (scopes []scope) {
	if t.Project != "" {
		scopes = append(scopes, scope{"project", t.String(), MaxProjectStreams})
	}
	if t.Org != "" {
		scopes = append(scopes, scope{"org", string(t.Org), MaxOrgStreams})
	}
	return scopes
}

// take adds one stream to the counter of each of the scopes. If one of them is at its limit, take adds nothing and
// returns ResourceExhausted.
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

// releaseScopes counts one stream less in each of the scopes.
func (s *Streams) releaseScopes(scopes []scope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range scopes {
		if s.counts[one]--; s.counts[one] == 0 {
			delete(s.counts, one)
		}
	}
}

// open returns the number of open streams in one scope.
func (s *Streams) open(one scope) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[one]
}

// admitStream adds a stream to the counters of its caller at once. When the call is admitted, it adds the stream to the
// counters of the tenant and calls admitted with the tenant. The caller must call release when the stream has ended.
func (s *Streams) admitStream(ctx context.Context, admitted func(cloud.Tenant)) (release func(), err error) {
	scopes := callerScopes(ctx, auth.CallerOf(ctx))
	if err := s.take(scopes); err != nil {
		return nil, err
	}
	var once sync.Once
	auth.OnAdmit(ctx, func(t cloud.Tenant) (err error) {
		once.Do(func() {
			more := tenantScopes(t)
			if err = s.take(more); err == nil {
				scopes = append(scopes, more...)
				admitted(t)
			}
		})
		return err
	})
	return func() { s.releaseScopes(scopes) }, nil
}

// limitStream adds a stream to the counters of its caller and its tenant while it runs the stream's handler. It ends
// the stream's context if the token becomes invalid.
func (e *edge) limitStream(ctx context.Context, ss grpc.ServerStream, run func(grpc.ServerStream) error) error {
	s := e.opts.Streams
	var f *flow
	release, err := s.admitStream(ctx, func(t cloud.Tenant) { f.bind(string(t.Org)) })
	if err != nil {
		return err
	}
	defer release()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	f = s.newFlow(ctx, end)
	defer f.close()
	if auth.CallerOf(ctx) != nil {
		stop, err := e.whileValid(ctx, end)
		if err != nil {
			return err
		}
		defer stop()
	}
	err = run(&stream{ServerStream: ss, ctx: ctx, flow: f})
	var why *fault.Fault
	if cause := context.Cause(ctx); err != nil && errors.As(cause, &why) {
		return cause
	}
	return err
}

// Open counts a stream of a server other than gRPC, such as the events of a REST API, against the same limits. The
// returned context ends, with a fault as its cause, when the token becomes invalid or the caller loses the right to the
// call. The caller of Open must call leave when the stream has ended.
func (s *Streams) Open(ctx context.Context, checks *auth.Rechecker, token string) (_ context.Context, leave func(), err error) {
	release, err := s.admitStream(ctx, func(cloud.Tenant) {})
	if err != nil {
		return nil, nil, err
	}
	ctx, end := context.WithCancelCause(ctx)
	stop := checks.WhileValid(ctx, token, end)
	return ctx, func() {
		stop()
		end(nil)
		release()
	}, nil
}
