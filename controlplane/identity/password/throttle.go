package password

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Network is where an address misses from: the address, or of IPv6 the /64 that one customer has.
func Network(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if ip = ip.Unmap(); ip.Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// wider is the network whose requests share the queue: the /24 of an IPv4 address, else what Network gives. Misses are not
// counted by it: a user would be refused for a neighbour's.
func wider(network string) string {
	if ip, err := netip.ParseAddr(network); err == nil && ip.Is4() {
		if p, err := ip.Prefix(24); err == nil {
			return p.String()
		}
	}
	return network
}

// Limits of wrong passwords on one member.
const (
	// MaxMisses in missWindow from one network end the trying of a name from there until the window ends.
	MaxMisses  = 10
	missWindow = int64(time.Minute / time.Millisecond)
	// MaxNameMisses in nameWindow from all networks end the trying of a name from networks from which it never logged in,
	// until the window ends. A person who mistypes stays far below it; a guesser has 2,400 tries a day.
	MaxNameMisses = 100
	nameWindow    = int64(time.Hour / time.Millisecond)
	// maxRemembers is how many names, and how many names from a network, have their misses counted.
	maxRemembers = 10_000
	// evictSample is how many of them are compared to find one that can be forgotten.
	evictSample = 16
)

type attempt struct {
	user    cloud.UserID
	network string
}

type count struct {
	since cloud.Time
	n     int
}

// throttle counts misses in windows, for a bounded number of keys.
type throttle[K comparable] struct {
	most   int
	window int64

	mu     sync.Mutex
	counts map[K]*count
}

func newThrottle[K comparable](most int, window int64) *throttle[K] {
	return &throttle[K]{most: most, window: window, counts: map[K]*count{}}
}

// allow reports whether a key has fewer misses than most in its window.
func (t *throttle[K]) allow(k K, now cloud.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.counts[k]
	return c == nil || now-c.since >= t.window || c.n < t.most
}

// miss counts one miss.
func (t *throttle[K]) miss(k K, now cloud.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.counts[k]; c != nil && now-c.since < t.window {
		c.n++
		return
	}
	if _, had := t.counts[k]; !had && len(t.counts) >= maxRemembers {
		t.evict(now)
	}
	t.counts[k] = &count{since: now, n: 1}
}

// evict forgets one of a few keys, which a map gives in no order: one whose window is over, or else the one with the fewest
// misses, or else the oldest. Misses in many other names do not make a name that is being guessed forgotten: each of them
// would have to be missed as often.
func (t *throttle[K]) evict(now cloud.Time) {
	var victim K
	var least *count
	sampled := 0
	for k, c := range t.counts {
		if now-c.since >= t.window {
			victim = k
			break
		}
		if least == nil || c.n < least.n || c.n == least.n && c.since < least.since {
			victim, least = k, c
		}
		if sampled++; sampled == evictSample {
			break
		}
	}
	delete(t.counts, victim)
}
