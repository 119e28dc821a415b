// Package dial connects to a control plane of several members, each of which can serve every call. [Conn] uses the
// first endpoint that can be reached, and fails over to the next one if that endpoint cannot be reached or returns
// UNAVAILABLE.
//
// Conn implements grpc.ClientConnInterface for the generated clients. policy.go lists the methods that are safe to
// retry. Decisions:
//
//   - Endpoints are tried in the given order, each for [Connect] at most, and one endpoint is used until it fails.
//     There is no load balancing, because `trivet image import` reads a file of the host that serves the call: the
//     user must be able to choose the host.
//   - A call that was not sent is sent to the next endpoint, whatever the method. A call that may have been executed
//     is retried only if the method is safe to retry; retries of a create use the same idempotency key.
//   - A Conn must not be used by several goroutines at the same time.
//   - A secret is sent to another host over TLS only, with the server's name verified, unless Options.Plaintext is set
//     (secure.go).
package dial

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/shared/retry"
)

const (
	// Connect is the timeout for connecting to one endpoint, after which the next one is tried.
	Connect = 3 * time.Second
	// MaxAnswer is the maximum size of a response in bytes. A page of VMs fits, even if each VM has the maximum number
	// of labels.
	MaxAnswer = 64 << 20
)

// Options configures a Conn.
type Options struct {
	// Endpoints lists the host:port of each member, at least one.
	Endpoints []string
	// Token is sent with each call, as a bearer token. Optional.
	Token account.Secret
	// Org and Project are sent as the tenant of each call, in its metadata. If they are empty, the tenant comes from
	// the request or from the token.
	Org, Project string
	// Confides is true if requests contain a secret other than Token, such as a password. Open then returns *Exposed in
	// the same cases as with a Token.
	Confides bool
	// TLS is the TLS configuration; nil for plaintext.
	TLS *tls.Config
	// Plaintext allows sending secrets to other hosts without TLS.
	Plaintext bool
	// Dialer makes connections instead of a TCP dialer. Optional.
	Dialer func(ctx context.Context, endpoint string) (net.Conn, error)
	// Connect and CreatePatience override the constants of the same names, unless they are 0.
	Connect, CreatePatience time.Duration
}

// Conn makes gRPC calls to one of several endpoints of a cluster, and fails over between them. One goroutine at a time may
// use it: see Clone.
type Conn struct {
	opts    Options
	members []*member
	current int
	// requestID is the request ID of the last unary call to which a member has responded, or empty.
	requestID string
}

// Open returns a Conn, which connects to an endpoint only when the first call is made. It returns an *Exposed error if
// a secret would be sent to another host in plaintext.
func Open(opts Options) (*Conn, error) {
	if len(opts.Endpoints) == 0 {
		return nil, errors.New("no endpoint")
	}
	if err := exposed(&opts); err != nil {
		return nil, err
	}
	if opts.Dialer == nil {
		opts.Dialer = func(ctx context.Context, endpoint string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", endpoint)
		}
	}
	if opts.Connect == 0 {
		opts.Connect = Connect
	}
	if opts.CreatePatience == 0 {
		opts.CreatePatience = CreatePatience
	}
	c := &Conn{opts: opts}
	for _, e := range opts.Endpoints {
		c.members = append(c.members, &member{endpoint: e})
	}
	return c, nil
}

// Close closes the connections to all endpoints.
func (c *Conn) Close() error {
	var all []error
	for _, m := range c.members {
		all = append(all, m.close())
	}
	return errors.Join(all...)
}

// Each returns one Conn per endpoint, which calls only that endpoint. The caller must close each of them.
func (c *Conn) Each() []*Conn {
	all := make([]*Conn, len(c.members))
	for i, m := range c.members {
		all[i] = &Conn{opts: c.opts, members: []*member{{endpoint: m.endpoint}}}
	}
	return all
}

// Clone returns a Conn to the same endpoints with connections of its own, for another goroutine. The caller must close it.
func (c *Conn) Clone() *Conn {
	clone := &Conn{opts: c.opts, current: c.current}
	for _, m := range c.members {
		clone.members = append(clone.members, &member{endpoint: m.endpoint})
	}
	return clone
}

// Endpoint returns the endpoint that the last call used or, after a failure, that the next call tries first.
func (c *Conn) Endpoint() string { return c.members[c.current].endpoint }

// Next makes the next call try the endpoint after the current one first. Callers use it after a stream has ended with
// UNAVAILABLE.
func (c *Conn) Next() { c.current = (c.current + 1) % len(c.members) }

// Invoke makes a unary call, and retries it as the method's policy allows. It returns an *Unreachable error if no
// endpoint can be reached, and an *Unavailable error if an endpoint was reached but returned UNAVAILABLE.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	p := policies[method]
	patience := p.patience
	if p.create {
		patience = c.opts.CreatePatience
		key, err := uuid.NewRandom()
		if err != nil {
			return fmt.Errorf("generate an idempotency key: %w", err)
		}
		ctx = metadata.AppendToOutgoingContext(ctx, "idempotency-key", key.String())
	}
	var last error
	_ = retry.Do(ctx, retry.Pauses{First: firstPause, Last: lastPause, Within: patience}, func() error {
		if last = c.once(ctx, method, p, args, reply, opts); !worthAnother(last, p) {
			return retry.Permanent(last)
		}
		return last
	})
	if worthAnother(last, p) && errors.Is(ctx.Err(), context.Canceled) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return last // even after the deadline, because this error says more than "deadline exceeded"
}

// once makes a call to the first endpoint that can be reached, without a retry. If that endpoint returns UNAVAILABLE,
// once makes the next call start with another endpoint.
func (c *Conn) once(ctx context.Context, method string, p policy, args, reply any, opts []grpc.CallOption) error {
	m, err := c.ready(ctx)
	if err != nil {
		return err
	}
	var header metadata.MD
	err = m.conn.Invoke(c.outgoing(ctx), method, args, reply, append(opts[:len(opts):len(opts)], grpc.Header(&header))...)
	if id := requestID(header); id != "" {
		c.requestID = id
		err = withRequestID(err, id)
	}
	if status.Code(err) != codes.Unavailable {
		return err
	}
	c.Next()
	return &Unavailable{Endpoint: m.endpoint, Doubtful: p != repeatable, Err: err}
}

// NewStream opens a stream to the first endpoint that can be reached, starting with the current one. It does not retry.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	m, err := c.ready(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := m.conn.NewStream(c.outgoing(ctx), desc, method, opts...)
	if err != nil {
		return nil, err
	}
	return identifiedStream{stream}, nil
}

// ActIn makes later calls name an org and a project in their metadata. It must not be called concurrently with calls.
func (c *Conn) ActIn(org, project string) { c.opts.Org, c.opts.Project = org, project }

func (c *Conn) outgoing(ctx context.Context) context.Context {
	if c.opts.Token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+string(c.opts.Token))
	}
	if c.opts.Org != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "trivet-org", c.opts.Org)
	}
	if c.opts.Project != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "trivet-project", c.opts.Project)
	}
	return ctx
}

// ready connects to the endpoints in order, starting with the current one, and returns the first that can be reached.
func (c *Conn) ready(ctx context.Context) (*member, error) {
	if err := ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	var tried []Tried
	for range c.members {
		m := c.members[c.current]
		err := m.ready(ctx, &c.opts)
		if err == nil {
			return m, nil
		}
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return nil, &Unreachable{Tried: append(tried, Tried{m.endpoint, "no answer in time"}), Late: len(tried) == 0}
		case ctx.Err() != nil:
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		tried = append(tried, Tried{m.endpoint, why(err, c.opts.Connect)})
		c.Next()
	}
	return nil, &Unreachable{Tried: tried}
}

// member is one endpoint with its connection. A failed connection is discarded, so that gRPC's backoff does not delay
// the next attempt.
type member struct {
	endpoint string
	conn     *grpc.ClientConn
	attempt  *attempt
}

// attempt holds the result of dialling one connection. It is stored here because gRPC does not return the error of
// dialling.
type attempt struct {
	mu      sync.Mutex
	dialled bool
	err     error
}

var (
	errNotGRPC  = errors.New("accepts connections, but does not speak gRPC")
	errNotPlain = errors.New("accepts connections, but does not speak gRPC without TLS; for TLS give --tls-ca or --tls")
	errSilent   = errors.New("accepts connections, but does not answer")
)

func (m *member) ready(ctx context.Context, opts *Options) error {
	if m.conn == nil {
		if err := m.open(opts); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Connect)
	defer cancel()
	for {
		state := m.conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.TransientFailure:
			if opts.TLS == nil {
				return m.failed(errNotPlain)
			}
			return m.failed(errNotGRPC)
		case connectivity.Idle:
			m.conn.Connect()
		}
		if !m.conn.WaitForStateChange(ctx, state) {
			return m.failed(errSilent)
		}
	}
}

func (m *member) open(opts *Options) error {
	a := &attempt{}
	conn, err := grpc.NewClient("passthrough:///"+m.endpoint,
		grpc.WithTransportCredentials(transport(opts.TLS, a)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := opts.Dialer(ctx, m.endpoint)
			a.mu.Lock()
			defer a.mu.Unlock()
			a.dialled, a.err = true, err
			return conn, err
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: opts.Connect}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxAnswer)),
		grpc.WithUserAgent("trivet"),
	)
	m.conn, m.attempt = conn, a
	return err
}

// failed closes the connection and returns the error of dialling it. If dialling succeeded, failed returns the
// parameter named otherwise. If dialling has not ended, failed returns context.DeadlineExceeded.
func (m *member) failed(otherwise error) error {
	_ = m.close()
	m.attempt.mu.Lock()
	defer m.attempt.mu.Unlock()
	switch {
	case m.attempt.err != nil:
		return m.attempt.err
	case m.attempt.dialled:
		return otherwise
	}
	return context.DeadlineExceeded
}

func (m *member) close() error {
	if m.conn == nil {
		return nil
	}
	conn := m.conn
	m.conn = nil
	return conn.Close()
}

// why returns a short text for err, the error with which an endpoint could not be reached. limit is the timeout for
// connecting, which the text names after a timeout.
func why(err error, limit time.Duration) string {
	var dns *net.DNSError
	var op *net.OpError
	var network net.Error
	if text := ofTLS(err); text != "" {
		return text
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		return fmt.Sprintf("no answer within %v", limit)
	case errors.As(err, &dns) && dns.IsNotFound:
		return "no such host"
	case errors.As(err, &op):
		err = op.Err
	}
	// Remove the name of the system call, as in "connect: connection refused".
	return strings.TrimPrefix(err.Error(), "connect: ")
}
