// Package dial connects to a control plane of several members, each of which can serve every call. [Conn] uses the
// first endpoint that can be reached, and fails over to the next one if that endpoint cannot be reached or returns
// UNAVAILABLE.
//
// Conn implements grpc.ClientConnInterface for the generated clients. policy.go lists the methods that are safe to
// retry. Decisions:
//
//   - Endpoints are tried in the given order, each for [Connect] at most, and one endpoint is used until it fails.
//     There is no load balancing, because `trivet image import` reads a file of the host that serves the call: the
//     caller chooses it.
//   - A call that was not sent is sent to the next endpoint, whatever the method. A call that may have been executed
//     is retried only if the method is safe to retry; retries of a create use the same idempotency key.
//   - Calls are made one at a time.
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
	// Connect is the time to connect to one endpoint before the next one is tried.
	Connect = 3 * time.Second
	// MaxAnswer is the maximum size of a response in bytes. A page of VMs with the maximum of labels fits.
	MaxAnswer = 64 << 20
)

// Options of a connection.
type Options struct {
	// Endpoints lists at least one host:port.
	Endpoints []string
	// Token is sent with each call; optional.
	Token account.Secret
	// Org and Project name the tenant of every call. When they are empty, the request or the token decides.
	Org, Project string
	// Confides declares that the requests contain secrets, even without a Token.
	Confides bool
	// TLS is the TLS configuration; nil for plaintext.
	TLS *tls.Config
	// Plaintext allows sending secrets to other hosts in plaintext.
	Plaintext bool
	// Dialer replaces TCP; optional.
	Dialer func(ctx context.Context, endpoint string) (net.Conn, error)
	// Connect and CreatePatience replace the constants of the same names; optional.
	Connect, CreatePatience time.Duration
}

// Conn is a connection to a cluster.
type Conn struct {
	opts    Options
	members []*member
	current int
	// key is the idempotency key of all creates of this Conn.
	key string
}

// Open returns a connection. It dials with the first call. It returns an *Exposed error if a secret would be sent to
// another host in plaintext.
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
	key, err := uuid.NewRandom()
	if err != nil {
		return nil, fmt.Errorf("generate an idempotency key: %w", err)
	}
	c := &Conn{opts: opts, key: key.String()}
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

// Each returns one connection per endpoint, for calls to all endpoints. The caller closes each of them.
func (c *Conn) Each() []*Conn {
	all := make([]*Conn, len(c.members))
	for i, m := range c.members {
		all[i] = &Conn{opts: c.opts, members: []*member{{endpoint: m.endpoint}}, key: c.key}
	}
	return all
}

// Endpoint returns the endpoint that is in use, or is tried first.
func (c *Conn) Endpoint() string { return c.members[c.current].endpoint }

// Next switches to the next endpoint. Callers use it when a stream ends with UNAVAILABLE.
func (c *Conn) Next() { c.current = (c.current + 1) % len(c.members) }

// Invoke makes a unary call, with retries. It returns an *Unreachable error if no endpoint can be reached, and an
// *Unavailable error if an endpoint was reached but returned UNAVAILABLE.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	p := policies[method]
	patience := p.patience
	if p.create {
		patience = c.opts.CreatePatience
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
	return last // also after the deadline, because it is more useful than "deadline exceeded"
}

// once makes a call to the first endpoint that can be reached.
func (c *Conn) once(ctx context.Context, method string, p policy, args, reply any, opts []grpc.CallOption) error {
	m, err := c.ready(ctx)
	if err != nil {
		return err
	}
	err = m.conn.Invoke(c.outgoing(ctx, p), method, args, reply, opts...)
	if status.Code(err) != codes.Unavailable {
		return err
	}
	c.Next()
	return &Unavailable{Endpoint: m.endpoint, Doubtful: p != again, Err: err}
}

// NewStream opens a stream to the first endpoint that can be reached.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	m, err := c.ready(ctx)
	if err != nil {
		return nil, err
	}
	return m.conn.NewStream(c.outgoing(ctx, policies[method]), desc, method, opts...)
}

func (c *Conn) outgoing(ctx context.Context, p policy) context.Context {
	if c.opts.Token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+string(c.opts.Token))
	}
	if c.opts.Org != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "trivet-org", c.opts.Org)
	}
	if c.opts.Project != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "trivet-project", c.opts.Project)
	}
	if p.create {
		ctx = metadata.AppendToOutgoingContext(ctx, "idempotency-key", c.key)
	}
	return ctx
}

// ready returns the first member, starting with the current one, to which there is a connection.
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
			return nil, &Unreachable{append(tried, Tried{m.endpoint, "no answer in time"})}
		case ctx.Err() != nil:
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		tried = append(tried, Tried{m.endpoint, why(err, c.opts.Connect)})
		c.Next()
	}
	return nil, &Unreachable{tried}
}

// member is one endpoint. A failed connection is discarded, so that the next attempt starts without gRPC's backoff.
type member struct {
	endpoint string
	conn     *grpc.ClientConn
	attempt  *attempt
}

// attempt records the result of dialling one connection.
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

// failed closes the connection and returns the error of dialling it, or otherwise if dialling succeeded.
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

// why formats the reason why an endpoint could not be reached.
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
	// Drop the name of the system call, as in "connect: connection refused".
	return strings.TrimPrefix(err.Error(), "connect: ")
}
