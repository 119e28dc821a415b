// Package keyring is the set of keys that tokens are signed with, and what may become of them.
//
// A key is staged (published, not used yet), then primary (new tokens are signed with it), then secondary (tokens that it
// signed are still good), then forgotten. All keys are one record, so that a rotation is one write and no member sees
// half of one. Private keys are at rest only under the cluster key. It knows no tokens. Decisions:
//   - A staged key becomes the primary only when everybody who keeps the published keys for MaxAge has seen it, so nobody
//     refuses a token for a key it does not know.
//   - A secondary stays until the last token that it can have signed has ended.
//   - The keys rotate by themselves when the primary is RotateAfter old.
//   - A key that is revoked is gone at once, with every token that it signed.
package keyring

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// MaxAge is how long others may keep the published keys.
	MaxAge = 5 * time.Minute
	// RotateAfter is the age at which a primary is followed by the staged key.
	RotateAfter = 90 * 24 * time.Hour
	// maxSecondaries bounds the keys: each rotation leaves one.
	maxSecondaries = 64
)

// Use is what a key is for.
type Use string

const (
	Staged    Use = "staged"
	Primary   Use = "primary"
	Secondary Use = "secondary"
)

// Key is a signing key at rest.
type Key struct {
	ID     string
	Use    Use
	Public []byte
	// Sealed is the private key's seed under the cluster key.
	Sealed    []byte
	CreatedAt cloud.Time
	// Since is when it got its use; Ends, of a secondary, when the last token that it signed has ended.
	Since cloud.Time
	Ends  cloud.Time `cbor:",omitempty"`
}

// Ring is all keys.
type Ring struct{ Keys []Key }

var rings = store.NewTable[Ring]("keyring")

// Load reads the ring; nil before there is one.
func Load(r store.Reader) (*Ring, error) { return rings.Get(r, "tokens") }

// Save writes it.
func (r *Ring) Save(tx *store.Tx) { rings.Put(tx, r, "tokens") }

func sealedName(id string) string { return "signing-key/" + id }

// generate makes a key that is staged.
func generate(key *clusterkey.Key, now cloud.Time) (Key, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return Key{}, fmt.Errorf("make signing key: %w", err)
	}
	id := hex.EncodeToString(public[:8])
	return Key{ID: id, Use: Staged, Public: public, Sealed: key.Seal(sealedName(id), private.Seed()), CreatedAt: now, Since: now}, nil
}

// New is a ring of a primary and a staged key.
func New(key *clusterkey.Key, now cloud.Time) (*Ring, error) {
	first, err := generate(key, now)
	if err != nil {
		return nil, err
	}
	next, err := generate(key, now)
	if err != nil {
		return nil, err
	}
	first.Use = Primary
	return &Ring{Keys: []Key{first, next}}, nil
}

// Find is a key by its id, nil when there is none.
func (r *Ring) Find(id string) *Key {
	if i := slices.IndexFunc(r.Keys, func(k Key) bool { return k.ID == id }); i >= 0 {
		return &r.Keys[i]
	}
	return nil
}

// Of is the key of a use, of which there is one; nil when there is none. Not for Secondary.
func (r *Ring) Of(use Use) *Key {
	if i := slices.IndexFunc(r.Keys, func(k Key) bool { return k.Use == use }); i >= 0 {
		return &r.Keys[i]
	}
	return nil
}

// Private opens a key.
func (k *Key) Private(key *clusterkey.Key) (ed25519.PrivateKey, error) {
	seed, err := key.Open(sealedName(k.ID), k.Sealed)
	if err != nil {
		return nil, err
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// Rotate makes the staged key the primary, and stages another. life is that of the longest token.
func (r *Ring) Rotate(key *clusterkey.Key, now cloud.Time, life time.Duration, force bool) error {
	staged := r.Of(Staged)
	if staged == nil {
		return fault.New(fault.FailedPrecondition, "no key is staged")
	}
	if wait := staged.CreatedAt + MaxAge.Milliseconds() - now; wait > 0 && !force {
		return fault.New(fault.FailedPrecondition,
			"the staged key is too new: others may know it only in %s; force it to refuse their users until then",
			(time.Duration(wait) * time.Millisecond).Round(time.Second))
	}
	if len(r.Keys) >= maxSecondaries+2 {
		return fault.New(fault.ResourceExhausted, "there are %d keys: wait until the oldest ends, or revoke it", len(r.Keys))
	}
	next, err := generate(key, now)
	if err != nil {
		return err
	}
	if old := r.Of(Primary); old != nil {
		old.Use, old.Since, old.Ends = Secondary, now, now+life.Milliseconds()
	}
	staged.Use, staged.Since = Primary, now
	r.Keys = append(r.Keys, next)
	return nil
}

// Revoke forgets a key. A primary is followed by the staged one at once, and what is missing then is made.
func (r *Ring) Revoke(key *clusterkey.Key, id string, now cloud.Time) error {
	k := r.Find(id)
	if k == nil {
		return fault.New(fault.NotFound, "no key %s", id)
	}
	use := k.Use
	r.Keys = slices.DeleteFunc(slices.Clone(r.Keys), func(k Key) bool { return k.ID == id })
	if use == Secondary {
		return nil
	}
	if staged := r.Of(Staged); use == Primary && staged != nil {
		staged.Use, staged.Since = Primary, now
	}
	next, err := generate(key, now)
	if err != nil {
		return err
	}
	r.Keys = append(r.Keys, next)
	return nil
}

// Tend does what time asks for, and says whether there was anything.
func (r *Ring) Tend(key *clusterkey.Key, now cloud.Time, life time.Duration) (changed bool, err error) {
	before := len(r.Keys)
	r.Keys = slices.DeleteFunc(slices.Clone(r.Keys), func(k Key) bool { return k.Use == Secondary && now >= k.Ends })
	changed = len(r.Keys) != before
	if p := r.Of(Primary); p != nil && now-p.Since >= RotateAfter.Milliseconds() {
		if err := r.Rotate(key, now, life, false); err != nil {
			return changed, err
		}
		changed = true
	}
	return changed, nil
}

// Published is the ring as others may see it (RFC 7517).
func (r *Ring) Published() jose.JSONWebKeySet {
	var set jose.JSONWebKeySet
	for _, k := range r.Keys {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: ed25519.PublicKey(k.Public), KeyID: k.ID, Algorithm: string(jose.EdDSA), Use: "sig"})
	}
	return set
}

// Possible reports whether text could be the id of a key.
func Possible(id string) bool {
	raw, err := hex.DecodeString(id)
	return err == nil && len(raw) == 8
}
