// Package password hashes passwords and bounds the guessing of them. It knows no users and no store.
//
// Decisions: argon2id (RFC 9106) with its parameters beside each hash, so that they can be raised later; a Desk bounds how
// many passwords a member tries at once, since each takes memory, and how many wait; after MaxMisses in a minute from one
// address a name is not tried from there until the minute is over.
package password

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"time"

	"golang.org/x/crypto/argon2"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Hash is a password at rest.
type Hash struct {
	Salt, Sum []byte
	Time      uint32
	MemoryKiB uint32
}

// Parameters of new hashes; OWASP's second choice for argon2id.
const (
	hashTime      = 2
	hashMemoryKiB = 19 * 1024
)

// Limits of a password in bytes.
const Min, Max = 8, 256

// Check says whether text can be a password.
func Check(text string) error {
	if len(text) < Min || len(text) > Max {
		return fault.Invalid("password", "must be %d to %d bytes", Min, Max)
	}
	return nil
}

func (h *Hash) sum(password string) []byte {
	return argon2.IDKey([]byte(password), h.Salt, h.Time, h.MemoryKiB, 1, 32)
}

// nobody is hashed against when there is no such user, so that the answer takes as long.
var nobody = Hash{Salt: make([]byte, 16), Sum: make([]byte, 32), Time: hashTime, MemoryKiB: hashMemoryKiB}

// Bounds of what whoever asks can make a member do: maxHashing passwords at once (19 MiB each), maxQueue more that wait,
// hashWait long.
const (
	maxHashing = 4
	maxQueue   = 256
	hashWait   = 10 * time.Second
	// maxShare of the queue are one network's.
	maxShare = 64
)

// Desk is where passwords are hashed and tried.
type Desk struct {
	misses         throttle
	share          share
	hashing, queue chan struct{}
}

// NewDesk opens a desk.
func NewDesk() *Desk {
	return &Desk{
		misses: throttle{names: map[attempt]*count{}}, hashing: make(chan struct{}, maxHashing), queue: make(chan struct{}, maxQueue),
	}
}

// Hash makes a hash, waiting for its turn.
func (d *Desk) Hash(ctx context.Context, password string) (Hash, error) {
	h := Hash{Salt: make([]byte, 16), Time: hashTime, MemoryKiB: hashMemoryKiB}
	rand.Read(h.Salt)
	err := d.turn(ctx, "", func() { h.Sum = h.sum(password) })
	return h, err
}

// Try tries a password against what look finds for a name; nil is a name without a password. It is false, without an
// error, for a wrong one, a name without one, and a name that was missed too often from address.
func (d *Desk) Try(ctx context.Context, id cloud.UserID, address, password string, now func() cloud.Time, look func() (*Hash, error)) (bool, error) {
	if password == "" {
		return false, nil // who claims nothing costs nothing, and takes nobody's turn
	}
	a := attempt{id, Network(address)}
	if !d.misses.allow(a, now()) {
		return false, nil
	}
	h, err := look()
	if err != nil {
		return false, err
	}
	known := h != nil
	if !known {
		h = &nobody
	}
	if len(password) > Max {
		password, known = "", false
	}
	var right bool
	err = d.turn(ctx, a.address, func() {
		// Asked again: those who waited here together are not all tried after the last of the misses.
		at := now()
		if !d.misses.allow(a, at) {
			return
		}
		if right = subtle.ConstantTimeCompare(h.sum(password), h.Sum) == 1 && known; !right {
			d.misses.miss(a, at)
		}
	})
	return right && err == nil, err
}

// TrySecret is Try for a secret that we made, too long to be guessed: it needs no slow hash, but misses count alike.
func (d *Desk) TrySecret(id cloud.UserID, address, secret string, want []byte, now cloud.Time) bool {
	a := attempt{id, Network(address)}
	if !d.misses.allow(a, now) {
		return false
	}
	right := subtle.ConstantTimeCompare([]byte(secret), want) == 1 && len(want) > 0
	if !right {
		d.misses.miss(a, now)
	}
	return right
}

func errTooMany() error {
	return fault.New(fault.Unavailable, "too many passwords are being tried; try again in a moment").MayRetry()
}

// turn runs f when there is room for another password.
func (d *Desk) turn(ctx context.Context, from string, f func()) error {
	if !d.share.enter(from) {
		return errTooMany()
	}
	defer d.share.leave(from)
	select {
	case d.queue <- struct{}{}:
		defer func() { <-d.queue }()
	default:
		return errTooMany()
	}
	patience := time.NewTimer(hashWait)
	defer patience.Stop()
	select {
	case d.hashing <- struct{}{}:
		defer func() { <-d.hashing }()
		f()
		return nil
	case <-patience.C:
		return errTooMany()
	case <-ctx.Done():
		return ctx.Err()
	}
}
