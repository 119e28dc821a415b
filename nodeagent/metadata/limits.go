package metadata

import (
	"context"
	"fmt"
	"hash/maphash"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/elastic/go-freelru"
	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits restricts what guests can use of the host. In each VPC, all addresses without a port together are restricted
// as one port.
type Limits struct {
	// HeaderBytes is the maximum size of a request's line and headers. Up to 4 KiB more are accepted.
	HeaderBytes int
	// BodyBytes is the maximum size of a request's body, which is ignored.
	BodyBytes int64
	// RequestTime is the time to receive a request and send the response. A connection without a request is closed
	// after the same time.
	RequestTime time.Duration
	// Connections is the maximum number of open connections of a port. More are closed when they are accepted.
	Connections int
	// RequestsPerSecond and Burst restrict the requests of a port. More requests get the status 503.
	RequestsPerSecond float64
	Burst             int
}

// DefaultLimits are sufficient for several clients in a guest that read the whole tree at the same time.
var DefaultLimits = Limits{
	HeaderBytes:       8 << 10,
	BodyBytes:         1 << 10,
	RequestTime:       10 * time.Second,
	Connections:       16,
	RequestsPerSecond: 100,
	Burst:             400,
}

// withDefaults returns l with the default values for fields that are zero.
func (l Limits) withDefaults() Limits {
	d := DefaultLimits
	setDefault(&l.HeaderBytes, d.HeaderBytes)
	setDefault(&l.BodyBytes, d.BodyBytes)
	setDefault(&l.RequestTime, d.RequestTime)
	setDefault(&l.Connections, d.Connections)
	setDefault(&l.RequestsPerSecond, d.RequestsPerSecond)
	setDefault(&l.Burst, d.Burst)
	return l
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// caller identifies the object of a limit: a port, or, if port is empty, all addresses of the VPC that have no port.
type caller struct {
	vpc  cloud.VPCID
	port cloud.PortID
}

// maxRates is the number of callers whose rate is remembered. If there are more, the caller that has made no request
// for the longest time is forgotten, and may send a burst again.
const maxRates = 16 << 10

// gate counts the connections and the requests of callers.
type gate struct {
	limits Limits

	mu    sync.Mutex
	open  map[caller]int // callers with at least one connection
	rates *freelru.LRU[caller, *rate.Limiter]
}

func newGate(l Limits) (*gate, error) {
	seed := maphash.MakeSeed()
	hash := func(c caller) uint32 { return uint32(maphash.Comparable(seed, c)) }
	rates, err := freelru.New[caller, *rate.Limiter](maxRates, hash)
	if err != nil {
		return nil, fmt.Errorf("make table of rates: %w", err)
	}
	return &gate{limits: l, open: map[caller]int{}, rates: rates}, nil
}

// connect counts a new connection. It returns false if the caller has the maximum number of connections.
func (g *gate) connect(c caller) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open[c] >= g.limits.Connections {
		return false
	}
	g.open[c]++
	return true
}

// disconnect is called once for each connection that connect counted.
func (g *gate) disconnect(c caller) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open[c]--; g.open[c] == 0 {
		delete(g.open, c)
	}
}

// request reports whether the caller may make a request now.
func (g *gate) request(c caller) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	limiter, ok := g.rates.Get(c)
	if !ok {
		limiter = rate.NewLimiter(rate.Limit(g.limits.RequestsPerSecond), g.limits.Burst)
		g.rates.Add(c, limiter)
	}
	return limiter.Allow()
}

// gatedListener accepts connections of callers that have less than the maximum number of connections.
type gatedListener struct {
	net.Listener
	gate   *gate
	vpc    cloud.VPCID
	lookup func(cloud.VPCID, netip.Addr) (*Instance, bool)
}

// Accept returns a *connection. It resets connections above the limit.
func (l *gatedListener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &connection{Conn: accepted, gate: l.gate, caller: caller{vpc: l.vpc}}
		if remote, ok := accepted.RemoteAddr().(*net.TCPAddr); ok {
			c.source = remote.AddrPort().Addr().Unmap().WithZone("")
		}
		if i, ok := l.lookup(l.vpc, c.source); ok {
			c.caller.port = i.Port
		}
		if l.gate.connect(c.caller) {
			return c, nil
		}
		if tcp, ok := accepted.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // Close then sends a reset; an error changes nothing for the server
		}
		_ = accepted.Close()
	}
}

// connection is an accepted connection and the caller to which it belongs.
type connection struct {
	net.Conn
	source netip.Addr
	caller caller
	gate   *gate
	closed sync.Once
}

// Close may be called several times.
func (c *connection) Close() error {
	c.closed.Do(func() { c.gate.disconnect(c.caller) })
	return c.Conn.Close()
}

type connectionKey struct{}

// withConnection is http.Server.ConnContext for connections from a gatedListener.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}
