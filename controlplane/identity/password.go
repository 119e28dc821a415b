package identity

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"sync"
	"time"

	"golang.org/x/crypto/argon2"

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

func (s *Service) turn(ctx context.Context, f func()) error {
	select {
	case s.hashing <- struct{}{}:
		defer func() { <-s.hashing }()
		f()
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// nobody is hashed against when there is no such user, so that the answer takes as long.
var nobody = hash{Salt: make([]byte, 16), Sum: make([]byte, 32), Time: hashTime, MemoryKiB: hashMemoryKiB}

// proven tries a password. False for a wrong one, an unknown name, and a name that was missed too often from address.
func (s *Service) proven(ctx context.Context, id cloud.UserID, password, address string) (bool, error) {
	a := attempt{id, address}
	now := s.opts.Store.Now()
	if !s.misses.allow(a, now) {
		return false, nil
	}
	user, err := s.user(ctx, id)
	if err != nil {
		return false, err
	}
	h, known := &nobody, user != nil && user.Password != nil
	if known {
		h = user.Password
	}
	if len(password) > maxPassword {
		password, known = "", false
	}
	var same bool
	if err := s.turn(ctx, func() { same = subtle.ConstantTimeCompare(h.sum(password), h.Sum) == 1 }); err != nil {
		return false, err
	}
	if !known || !same {
		s.misses.miss(a, now)
		return false, nil
	}
	return true, nil
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
