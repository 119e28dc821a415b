// Package password hashes passwords and bounds the guessing of them. It knows no users and no store.
//
// Decisions:
//   - Hashes are argon2id (RFC 9106) with the parameters beside each hash, so that they can be raised later.
//   - Hashing takes at most a quarter of the cores, because anybody can make a member do it. So few passwords are tried at
//     once, and on a host of less than four cores there is a pause after each.
//   - Those who wait are served by rank: users who logged in from the same network before, users who logged in before,
//     everybody else. Each rank with somebody waiting gets its turn, so a flood of wrong passwords does not keep out the
//     users of a cloud; and each network and each name has a share only.
//   - After MaxMisses in a minute from one network a name's password is not tried from there until the minute is over.
//   - After MaxNameMisses in an hour from all networks together a name's password is tried only from networks from which
//     that name logged in before, until the hour is over: guessing from many networks ends, and the owner is not locked
//     out. Misses are counted in memory and by each member for itself, so a trio allows three times as many.
package password

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"slices"

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

// sum hashes a password on one core.
func (h *Hash) sum(password string) []byte {
	return argon2.IDKey([]byte(password), h.Salt, h.Time, h.MemoryKiB, 1, 32)
}

// nobody is hashed against when there is no such user, so that the answer takes as long.
var nobody = Hash{Salt: make([]byte, 16), Sum: make([]byte, 32), Time: hashTime, MemoryKiB: hashMemoryKiB}

// Account is what Try needs to know of a name.
type Account struct {
	// Hash is nil for a name without a password, and for one that does not exist.
	Hash *Hash
	// Networks are those from which the name logged in with its password before, as Network gives them.
	Networks []string
}

// Desk is where passwords are hashed and tried.
type Desk struct {
	// misses and names count wrong passwords, secrets the wrong secrets of service accounts. These are apart because a
	// wrong secret costs no hashing: it must not make the others be forgotten.
	misses, secrets *throttle[attempt]
	names           *throttle[cloud.UserID]
	turns           *turns
	// sum hashes a password; tests replace it.
	sum func(h *Hash, password string) []byte
}

// NewDesk opens a desk for a member that has so many cores.
func NewDesk(cores int) *Desk {
	return &Desk{
		misses: newThrottle[attempt](MaxMisses, missWindow), secrets: newThrottle[attempt](MaxMisses, missWindow),
		names: newThrottle[cloud.UserID](MaxNameMisses, nameWindow), turns: newTurns(cores), sum: (*Hash).sum,
	}
}

// Hash makes a hash of a user's new password, waiting for its turn.
func (d *Desk) Hash(ctx context.Context, id cloud.UserID, password string) (Hash, error) {
	h := Hash{Salt: make([]byte, 16), Time: hashTime, MemoryKiB: hashMemoryKiB}
	rand.Read(h.Salt)
	// Only who is logged in sets a password.
	err := d.turns.do(ctx, request{rank: familiar, name: id}, func() { h.Sum = d.sum(&h, password) })
	return h, err
}

// Try tries a password against what look finds for a name. It is false, without an error, for a wrong one, a name without
// one, and a name that was missed too often. It is Unavailable when too many are being tried.
func (d *Desk) Try(ctx context.Context, id cloud.UserID, address, password string, now func() cloud.Time, look func() (Account, error)) (bool, error) {
	if password == "" {
		return false, nil // who claims nothing costs nothing, and takes nobody's turn
	}
	a := attempt{id, Network(address)}
	if !d.misses.allow(a, now()) {
		return false, nil
	}
	account, err := look()
	if err != nil {
		return false, err
	}
	r := request{rank: stranger, name: id, network: wider(a.network)}
	switch {
	case slices.Contains(account.Networks, a.network):
		r.rank = familiar
	case len(account.Networks) > 0:
		r.rank = known
	}
	h := account.Hash
	exists := h != nil
	if !exists {
		h = &nobody
	}
	if len(password) > Max {
		password, exists = "", false
	}
	allowed := func(at cloud.Time) bool {
		return d.misses.allow(a, at) && (r.rank == familiar || d.names.allow(id, at))
	}
	if !allowed(now()) {
		return false, nil
	}
	var right bool
	err = d.turns.do(ctx, r, func() {
		// Asked again: those who waited here together are not all tried after the last of the misses.
		at := now()
		if !allowed(at) {
			return
		}
		if right = subtle.ConstantTimeCompare(d.sum(h, password), h.Sum) == 1 && exists; !right {
			d.misses.miss(a, at)
			d.names.miss(id, at)
		}
	})
	return right && err == nil, err
}

// TrySecret is Try for a secret that we made, too long to be guessed: it needs no slow hash and no bound over all networks,
// but misses from one network count alike.
func (d *Desk) TrySecret(id cloud.UserID, address, secret string, want []byte, now cloud.Time) bool {
	a := attempt{id, Network(address)}
	if !d.secrets.allow(a, now) {
		return false
	}
	right := subtle.ConstantTimeCompare([]byte(secret), want) == 1 && len(want) > 0
	if !right {
		d.secrets.miss(a, now)
	}
	return right
}

func errTooMany() error {
	return fault.New(fault.Unavailable, "too many passwords are being tried; try again in a moment").MayRetry()
}
