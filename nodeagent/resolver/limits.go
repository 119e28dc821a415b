package resolver

import (
	"hash/maphash"
	"net/netip"
	"sync"

	"github.com/elastic/go-freelru"
	"golang.org/x/time/rate"
)

// Limits of one client address and of all clients of a VPC. Queries beyond the rate are discarded, those beyond the
// other limits are refused.
const (
	clientRate        = 1000 // queries per second, also the burst
	clientForwarded   = 64   // forwarded queries without an answer
	vpcForwarded      = 512  // at most; see forward
	clientConnections = 16   // TCP connections
	vpcConnections    = 256

	// knownClients is the number of client addresses whose usage is remembered. A host has fewer ports in one VPC.
	knownClients = 2048
)

// limits counts what clients use.
type limits struct {
	mu                     sync.Mutex // guards everything below, also the clients
	clients                *freelru.LRU[netip.Addr, *usage]
	forwarded, connections int // of all clients
}

// usage counts the queries of one client.
type usage struct {
	rate                   *rate.Limiter
	forwarded, connections int
}

func newLimits() *limits {
	seed := maphash.MakeSeed()
	clients, err := freelru.New[netip.Addr, *usage](knownClients, func(a netip.Addr) uint32 {
		return uint32(maphash.Comparable(seed, a))
	})
	if err != nil {
		panic(err) // the arguments are constants
	}
	return &limits{clients: clients}
}

// of returns the usage of a client. The caller holds l.mu.
func (l *limits) of(client netip.Addr) *usage {
	u, ok := l.clients.Get(client)
	if !ok {
		u = &usage{rate: rate.NewLimiter(clientRate, clientRate)}
		l.clients.Add(client, u)
	}
	return u
}

// admit counts a query and returns false if the client exceeds its rate.
func (l *limits) admit(client netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of(client).rate.Allow()
}

// forward begins a forwarded query. If the limits permit it, the caller must call end after it. The parameter free is
// the number of further queries that the host can forward now (Forwarder.free). A VPC may have at most vpcForwarded
// forwarded queries, and at most half as many as are free. So any number of VPCs at their limits leaves some queries
// for other VPCs.
func (l *limits) forward(client netip.Addr, free int) (end func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.of(client)
	return l.take(&u.forwarded, clientForwarded, &l.forwarded, min(vpcForwarded, max(free/2, 1)))
}

// connect begins a TCP connection. If the limits permit it, the caller must call end after it.
func (l *limits) connect(client netip.Addr) (end func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.of(client)
	return l.take(&u.connections, clientConnections, &l.connections, vpcConnections)
}

func (l *limits) take(one *int, oneLimit int, all *int, allLimit int) (end func(), ok bool) {
	if *one >= oneLimit || *all >= allLimit {
		return nil, false
	}
	*one++
	*all++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		*one--
		*all--
	}, true
}
