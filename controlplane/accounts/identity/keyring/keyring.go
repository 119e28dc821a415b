// Package keyring manages the keys that sign tokens, and their rotation.
//
// A key is first staged (published, not used yet), then primary (it signs new tokens), then secondary (tokens that it
// signed are still valid), then deleted. All keys are in one record, so that a rotation is one write and no member sees
// only a part of it. Private keys are stored only encrypted with the cluster key. Package keyring does not depend on
// tokens. Decisions:
//   - A staged key becomes the primary only after MaxAge, when every client that caches the published keys for at most
//     MaxAge has it. So no client refuses a token because of an unknown key.
//   - A secondary key is deleted when the last token that it can have signed has expired.
//   - The keys rotate automatically when the primary is RotateAfter old.
//   - A revoked key is deleted at once, which invalidates every token that it signed.
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
	// MaxAge is how long clients may cache the published keys.
	MaxAge = 5 * time.Minute
	// RotateAfter is the age at which the staged key replaces the primary.
	RotateAfter = 90 * 24 * time.Hour
	// maxSecondaries is the maximum number of secondary keys. Each rotation adds one.
	maxSecondaries = 64
)

// Use is the stage of a key in its rotation: staged, primary or secondary.
type Use string

const (
	Staged    Use = "staged"
	Primary   Use = "primary"
	Secondary Use = "secondary"
)

// Key is a stored signing key.
type Key struct {
	ID     string
	Use    Use
	Public []byte
	// Sealed is the seed of the private key, encrypted with the cluster key.
	Sealed    []byte
	CreatedAt cloud.Time
	// Since is when the key got its present Use. Ends is 0 except for a secondary key; it is then the expiry of the
	// last token that the key can have signed.
	Since cloud.Time
	Ends  cloud.Time `cbor:",omitempty"`
}

// Ring is the record that holds all token-signing keys of the cluster.
type Ring struct{ Keys []Key }

var rings = store.NewTable[Ring]("keyring")

// Load returns the stored Ring, or nil if none has been saved.
func Load(r store.Reader) (*Ring, error) { return rings.Get(r, "tokens") }

// Save writes the ring to the store and overwrites the stored ring.
func (r *Ring) Save(tx *store.Tx) { rings.Put(tx, r, "tokens") }

func sealedName(id string) string { return "signing-key/" + id }

// generate returns a random signing key with Use Staged. The private key is encrypted with the cluster key.
func generate(key *clusterkey.Key, now cloud.Time) (Key, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return Key{}, fmt.Errorf("make signing key: %w", err)
	}
	id := hex.EncodeToString(public[:8])
	return Key{ID: id, Use: Staged, Public: public, Sealed: key.Seal(sealedName(id), private.Seed()), CreatedAt: now, Since: now}, nil
}

// New returns a ring with two new keys, one primary and one staged.
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

// Find returns the key with the given ID, or nil if the ring has no such key.
func (r *Ring) Find(id string) *Key {
	if i := slices.IndexFunc(r.Keys, func(k Key) bool { return k.ID == id }); i >= 0 {
		return &r.Keys[i]
	}
	return nil
}

// Of returns the key with Use Staged or Primary, or nil. Do not call it with Secondary, because several keys can be
// secondary.
func (r *Ring) Of(use Use) *Key {
	if i := slices.IndexFunc(r.Keys, func(k Key) bool { return k.Use == use }); i >= 0 {
		return &r.Keys[i]
	}
	return nil
}

// Private returns the private key, decrypted with the cluster key.
func (k *Key) Private(key *clusterkey.Key) (ed25519.PrivateKey, error) {
	seed, err := key.Open(sealedName(k.ID), k.Sealed)
	if err != nil {
		return nil, err
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// Rotate makes the staged key primary and the primary key secondary, and generates a new staged key. The parameter life
// is the maximum lifetime of a token. If force is false and the staged key is younger than MaxAge, Rotate returns
// FailedPrecondition.
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

// Revoke deletes a key. If the key was primary, the staged key becomes primary at once. If no staged key is left,
// Revoke generates one.
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

// Tend deletes the secondary keys whose time Ends has passed, and rotates the keys if the primary key is RotateAfter
// old. It reports whether it changed the ring.
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

// Published returns the public keys as a JWK set (RFC 7517).
func (r *Ring) Published() jose.JSONWebKeySet {
	var set jose.JSONWebKeySet
	for _, k := range r.Keys {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: ed25519.PublicKey(k.Public), KeyID: k.ID, Algorithm: string(jose.EdDSA), Use: "sig"})
	}
	return set
}

// Possible reports whether id has the form of a key ID: 16 hexadecimal digits.
func Possible(id string) bool {
	raw, err := hex.DecodeString(id)
	return err == nil && len(raw) == 8
}
