package password

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Network returns the network in which wrong passwords are counted together: the IPv4 address itself, or the /64 of an
// IPv6 address, because one customer typically has a whole /64.
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

// widerNetwork returns the network to which maxShare applies: the /24 of an IPv4 address, or the argument unchanged for
// IPv6. Wrong passwords are not counted per /24, because the wrong passwords of one user would then block the
// neighbours in the /24.
func widerNetwork(network string) string {
	if ip, err := netip.ParseAddr(network); err == nil && ip.Is4() {
		if p, err := ip.Prefix(24); err == nil {
			return p.String()
		}
	}
	return network
}

// Limits of wrong passwords on one member.
const (
	// MaxMisses is the maximum number of wrong passwords for one user name from one network within missWindow. At the
	// maximum, further attempts are refused until the window ends.
	MaxMisses  = 10
	missWindow = int64(time.Minute / time.Millisecond)
	// MaxNameMisses is the maximum number of wrong passwords for one user name from all networks together within
	// nameWindow. At the maximum, attempts from networks from which the user never logged in are refused until the
	// window ends. A person who mistypes stays far below the maximum; an attacker has 2,400 guesses a day on each
	// member.
	MaxNameMisses = 100
	nameWindow    = int64(time.Hour / time.Millisecond)
	// maxRemembers is the maximum number of keys in one throttle.
	maxRemembers = 10_000
	// evictSample is the maximum number of keys that evict compares.
	evictSample = 16
)

// attempt is the key under which wrong passwords are counted: a user name and a network.
type attempt struct {
	user    cloud.UserID
	network string
}

type count struct {
	since cloud.Time
	n     int
}

// throttle counts misses (wrong passwords or secrets) per key within a time window, for a bounded number of keys.
type throttle[K comparable] struct {
	most   int
	window int64

	mu     sync.Mutex
	counts map[K]*count
}

func newThrottle[K comparable](most int, window int64) *throttle[K] {
	return &throttle[K]{most: most, window: window, counts: map[K]*count{}}
}

// allow reports whether the key k has had fewer than t.most misses in its current window.
func (t *throttle[K]) allow(k K, now cloud.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.counts[k]
	return c == nil || now-c.since >= t.window || c.n < t.most || mutant.On(mutant.UnlimitedGuesses)
}

// miss counts one wrong password or secret for the key k. If k is new and there are maxRemembers keys, miss evicts
// another key.
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

// evict compares up to evictSample arbitrary keys and removes one: a key whose window is over, or else the key with the
// fewest misses, and of several the oldest. So an attacker cannot evict the count of one user name cheaply: each other
// user name would need as many wrong passwords.
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
