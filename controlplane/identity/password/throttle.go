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

// After MaxMisses in a window a name is not tried from an address until the window ends.
const (
	MaxMisses    = 10
	missWindow   = int64(time.Minute / time.Millisecond)
	maxRemembers = 10_000
)

type attempt struct {
	user    cloud.UserID
	address string
}

type count struct {
	since cloud.Time
	n     int
}

// throttle counts misses, of a bounded number of attempts: when it is full, the windows that are over go, and if none
// is, all.
type throttle struct {
	mu    sync.Mutex
	names map[attempt]*count
}

func (t *throttle) allow(a attempt, now cloud.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.names[a]
	return c == nil || now-c.since >= missWindow || c.n < MaxMisses
}

func (t *throttle) miss(a attempt, now cloud.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.names[a]; c != nil && now-c.since < missWindow {
		c.n++
		return
	}
	if len(t.names) >= maxRemembers {
		for k, c := range t.names {
			if now-c.since >= missWindow {
				delete(t.names, k)
			}
		}
		if len(t.names) >= maxRemembers {
			clear(t.names)
		}
	}
	t.names[a] = &count{since: now, n: 1}
}

// share bounds how many of one network are at the desk at once, so that the others find room.
type share struct {
	mu sync.Mutex
	at map[string]int
}

func (s *share) enter(from string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string]int{}
	}
	if from != "" && s.at[from] >= maxShare {
		return false
	}
	s.at[from]++
	return true
}

func (s *share) leave(from string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at[from]--; s.at[from] <= 0 {
		delete(s.at, from)
	}
}
