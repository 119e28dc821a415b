package password

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Network returns the network by which wrong passwords are counted: the IPv4 address, or the /64 of an IPv6 address,
// which one customer typically has.
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

// widerNetwork returns the network for maxShare: the /24 of an IPv4 address, or network itself for IPv6. Wrong
// passwords are not counted by it, because a user would then be refused for the wrong passwords of a neighbour.
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
	// MaxMisses is how many wrong passwords for a name from one network within missWindow are checked; further ones are
	// refused until the window ends.
	MaxMisses  = 10
	missWindow = int64(time.Minute / time.Millisecond)
	// MaxNameMisses is how many wrong passwords for a name from all networks within nameWindow are checked; then
	// attempts from networks from which the name never logged in are refused until the window ends. A person who
	// mistypes stays far below it; an attacker has 2,400 guesses a day.
	MaxNameMisses = 100
	nameWindow    = int64(time.Hour / time.Millisecond)
	// maxRemembers is the maximum number of keys for which each throttle counts misses.
	maxRemembers = 10_000
	// evictSample is how many entries evict compares.
	evictSample = 16
)

// attempt is the key by which wrong passwords from one network are counted.
type attempt struct {
	user    cloud.UserID
	network string
}

type count struct {
	since cloud.Time
	n     int
}

// throttle counts misses (wrong passwords) per key and time window, for a bounded number of keys.
type throttle[K comparable] struct {
	most   int
	window int64

	mu     sync.Mutex
	counts map[K]*count
}

func newThrottle[K comparable](most int, window int64) *throttle[K] {
	return &throttle[K]{most: most, window: window, counts: map[K]*count{}}
}

// allow reports whether a key has had fewer than t.most wrong passwords in its current window.
func (t *throttle[K]) allow(k K, now cloud.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.counts[k]
	return c == nil || now-c.since >= t.window || c.n < t.most || mutant.On(mutant.UnlimitedGuesses)
}

// miss counts one wrong password for a key. If there is no room for a new key, it evicts another.
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

// evict removes one of evictSample randomly chosen keys: one whose window is over, or else the one with the fewest
// misses, or else the oldest. An attacker cannot evict the key of a name by guessing for many other names, since each
// of these needs as many misses.
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
