package identity

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/crypto/argon2"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// hash is a password at rest: argon2id (RFC 9106) with its parameters, so that they can be raised later.
type hash struct {
	Salt, Sum []byte
	Time      uint32
	MemoryKiB uint32
}

// Parameters of new hashes; OWASP's second choice for argon2id.
const (
	hashTime      = 2
	hashMemoryKiB = 19 * 1024
)

const minPassword, maxPassword = 8, 256

func checkPassword(password string) error {
	if len(password) < minPassword || len(password) > maxPassword {
		return fault.Invalid("password", "must be %d to %d bytes", minPassword, maxPassword)
	}
	return nil
}

func (h *hash) sum(password string) []byte {
	return argon2.IDKey([]byte(password), h.Salt, h.Time, h.MemoryKiB, 1, 32)
}

// hashed makes a hash, waiting for its turn.
func (s *Service) hashed(ctx context.Context, password string) (hash, error) {
	h := hash{Salt: make([]byte, 16), Time: hashTime, MemoryKiB: hashMemoryKiB}
	rand.Read(h.Salt)
	err := s.turn(ctx, func() { h.Sum = h.sum(password) })
	return h, err
}

// Bounds of what whoever asks can make a member do: maxHashing passwords at once (19 MiB each), maxQueue more that wait,
// hashWait long.
const (
	maxHashing = 4
	maxQueue   = 256
	hashWait   = 10 * time.Second
)

func errTooMany() error {
	return fault.New(fault.Unavailable, "too many passwords are being tried; try again in a moment").MayRetry()
}

// turn runs f when there is room for another password.
func (s *Service) turn(ctx context.Context, f func()) error {
	select {
	case s.queue <- struct{}{}:
		defer func() { <-s.queue }()
	default:
		return errTooMany()
	}
	patience := time.NewTimer(hashWait)
	defer patience.Stop()
	select {
	case s.hashing <- struct{}{}:
		defer func() { <-s.hashing }()
		f()
		return nil
	case <-patience.C:
		return errTooMany()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// nobody is hashed against when there is no such user, so that the answer takes as long.
var nobody = hash{Salt: make([]byte, 16), Sum: make([]byte, 32), Time: hashTime, MemoryKiB: hashMemoryKiB}

// proven tries a password. Nil for a wrong one, an unknown name, and a name that was missed too often from address.
func (s *Service) proven(ctx context.Context, id cloud.UserID, password, address string) (*User, error) {
	a := attempt{id, network(address)}
	if !s.misses.allow(a, s.opts.Store.Now()) {
		return nil, nil
	}
	// As it is now: whoever has just set a password logs in on another member next.
	var user *User
	err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		user, err = users.Get(v, string(id))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read user: %w", err)
	}
	h, known := &nobody, user != nil && user.Password != nil
	if known {
		h = user.Password
	}
	if len(password) > maxPassword {
		password, known = "", false
	}
	var proven bool
	err = s.turn(ctx, func() {
		// Asked again: those who waited here together are not all tried after the last of the misses.
		now := s.opts.Store.Now()
		if !s.misses.allow(a, now) {
			return
		}
		if proven = subtle.ConstantTimeCompare(h.sum(password), h.Sum) == 1 && known; !proven {
			s.misses.miss(a, now)
		}
	})
	if err != nil || !proven {
		return nil, err
	}
	return user, nil
}

// network is where an address misses from: the address, or of IPv6 the /64 that one customer has.
func network(address string) string {
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

// After maxMisses in a window a name is not tried from an address until the window ends.
const (
	maxMisses    = 10
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
	return c == nil || now-c.since >= missWindow || c.n < maxMisses
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
