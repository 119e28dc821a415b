// Package password hashes passwords and limits password guessing. It does not depend on users or the store.
//
// Decisions:
//   - Hashes are argon2id (RFC 9106). Each hash is stored with its parameters, so that new hashes can use stronger
//     ones.
//   - Hashing uses at most a quarter of the cores, because unauthenticated callers can cause it. So only a few
//     passwords are verified at once, and on a host with less than four cores each attempt is followed by a pause.
//   - Waiting attempts are in three queues: one for users who logged in from the same network before, one for users who
//     logged in before from other networks, and one for all others. The queues are served round-robin, so a flood of
//     wrong passwords does not lock out users. The number of attempts in a queue is limited per network and per name.
//   - After MaxMisses wrong passwords for a name from one network within a minute, further attempts for that name from
//     that network are refused until the minute is over.
//   - After MaxNameMisses wrong passwords for a name from all networks within an hour, attempts for that name are
//     accepted only from networks from which the name logged in before, until the hour is over: guessing from many
//     networks stops, and the owner is not locked out. Each member counts wrong passwords for itself, in memory, so
//     three members allow three times as many.
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

// Hash is a stored password hash with its parameters.
type Hash struct {
	Salt, Sum []byte
	Time      uint32
	MemoryKiB uint32
}

// Parameters of new hashes. They are the second of the parameter sets that OWASP recommends for argon2id.
const (
	hashTime      = 2
	hashMemoryKiB = 19 * 1024
)

// Min and Max are the limits of a password's length, in bytes.
const Min, Max = 8, 256

// Check returns InvalidArgument if text is shorter than Min or longer than Max.
func Check(text string) error {
	if len(text) < Min || len(text) > Max {
		return fault.Invalid("password", "must be %d to %d bytes", Min, Max)
	}
	return nil
}

// sum returns the hash of a password, computed on one core.
func (h *Hash) sum(password string) []byte {
	return argon2.IDKey([]byte(password), h.Salt, h.Time, h.MemoryKiB, 1, 32)
}

// nobody is the hash that is computed if the user does not exist or has no password, so that the response takes as long
// as for a user with a password.
var nobody = Hash{Salt: make([]byte, 16), Sum: make([]byte, 32), Time: hashTime, MemoryKiB: hashMemoryKiB}

// Account contains the fields of a user's record that Try uses.
type Account struct {
	// Hash is nil if the user has no password or does not exist.
	Hash *Hash
	// Networks are the networks from which the user logged in with the password before. Each is a result of the
	// function Network.
	Networks []string
}

// Hasher hashes and verifies passwords, within the limits of the package.
type Hasher struct {
	// misses counts the wrong passwords per user name and network, and names counts them per user name. secrets counts
	// the wrong secrets per service account ID and network. secrets is separate from misses because checking a secret
	// is fast: with a common counter an attacker could quickly evict the counts of wrong passwords.
	misses, secrets *throttle[attempt]
	names           *throttle[cloud.UserID]
	semaphore       *rankedSemaphore
	// sum returns the hash of a password; tests replace it.
	sum func(h *Hash, password string) []byte
}

// NewHasher returns a Hasher for a member with the given number of CPU cores.
func NewHasher(cores int) *Hasher {
	return &Hasher{
		misses: newThrottle[attempt](MaxMisses, missWindow), secrets: newThrottle[attempt](MaxMisses, missWindow),
		names: newThrottle[cloud.UserID](MaxNameMisses, nameWindow), semaphore: newRankedSemaphore(cores), sum: (*Hash).sum,
	}
}

// Hash waits for a hashing slot and returns the hash of a user's new password.
func (d *Hasher) Hash(ctx context.Context, id cloud.UserID, password string) (Hash, error) {
	h := Hash{Salt: make([]byte, 16), Time: hashTime, MemoryKiB: hashMemoryKiB}
	rand.Read(h.Salt)
	// Only a user who is logged in can set a password, so the request gets the highest priority.
	err := d.semaphore.do(ctx, request{rank: familiar, name: id}, func() { h.Sum = d.sum(&h, password) })
	return h, err
}

// Try reports whether the password is that of the user id. It calls the function look to get the user's account. Try
// returns false without an error if the password is wrong, if the user has no password, or after too many wrong
// passwords. It returns Unavailable if too many passwords are being verified at the same time.
func (d *Hasher) Try(ctx context.Context, id cloud.UserID, address, password string, now func() cloud.Time, look func() (Account, error)) (bool, error) {
	if password == "" {
		return false, nil // an empty password is wrong without being hashed
	}
	a := attempt{id, Network(address)}
	if !d.misses.allow(a, now()) {
		return false, nil
	}
	account, err := look()
	if err != nil {
		return false, err
	}
	r := request{rank: unfamiliar, name: id, network: widerNetwork(a.network)}
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
	err = d.semaphore.do(ctx, r, func() {
		// Check the limits again, because other attempts may have failed while this one waited for a slot.
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

// TrySecret reports whether secret is the generated secret want of a service account. A generated secret is too long to
// be guessed. So it needs no slow hash and no limit over all networks; only the limit MaxMisses per network applies.
func (d *Hasher) TrySecret(id cloud.UserID, address, secret string, want []byte, now cloud.Time) bool {
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
