package identity

import (
	"context"
	"crypto/ed25519"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// opened caches the private keys that this member has decrypted, by key ID. Entries never change, because a key ID
// always identifies the same private key.
type opened struct{ keys sync.Map }

// signer returns the ID and the private key of the primary signing key, which signs new tokens. It returns Unavailable
// if Bootstrap has not created the keys yet.
func (s *Service) signer(ctx context.Context) (id string, private ed25519.PrivateKey, err error) {
	ring, err := s.recentRing(ctx)
	if err != nil {
		return "", nil, err
	}
	var primary *keyring.Key
	if ring != nil {
		primary = ring.Of(keyring.Primary)
	}
	if primary == nil {
		return "", nil, errSettingUp()
	}
	if k, ok := s.opened.keys.Load(primary.ID); ok {
		return primary.ID, k.(ed25519.PrivateKey), nil
	}
	if private, err = primary.Private(s.opts.Key); err != nil {
		return "", nil, err
	}
	s.opened.keys.Store(primary.ID, private)
	return primary.ID, private, nil
}

func (s *Service) recentRing(ctx context.Context) (ring *keyring.Ring, err error) {
	err = s.opts.Store.Recent(ctx, staleness, func(v *store.View) (err error) {
		ring, err = keyring.Load(v)
		return err
	})
	return ring, err
}

// Keys returns the keyring with the public keys that verify tokens, including every change acknowledged before the
// call.
func (s *Service) Keys(ctx context.Context) (ring *keyring.Ring, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
		ring, err = keyring.Load(v)
		return err
	})
	if err == nil && ring == nil {
		err = errSettingUp()
	}
	return ring, err
}

var rotateKeysCommand = newCommand("rotate-keys", leader.Once, (*Service).rotateKeysOnLeader)

// rotateKeysOnLeader makes the staged signing key the primary one, and generates a new staged key.
func (s *Service) rotateKeysOnLeader(tx *store.Tx, q rotation) (keyring.Ring, error) {
	return s.changeRing(tx, func(r *keyring.Ring) error { return r.Rotate(s.opts.Key, tx.Now(), longest, q.Force) })
}

var revokeKeyCommand = newCommand("revoke-key", leader.Once, (*Service).revokeKeyOnLeader)

// revokeKeyOnLeader removes a signing key. From then on, all tokens that the key signed are refused.
func (s *Service) revokeKeyOnLeader(tx *store.Tx, q oldKey) (keyring.Ring, error) {
	return s.changeRing(tx, func(r *keyring.Ring) error { return r.Revoke(s.opts.Key, q.ID, tx.Now()) })
}

func (s *Service) changeRing(tx *store.Tx, f func(*keyring.Ring) error) (keyring.Ring, error) {
	ring, err := keyring.Load(tx)
	if err != nil {
		return keyring.Ring{}, err
	}
	if ring == nil {
		return keyring.Ring{}, errSettingUp()
	}
	if err := f(ring); err != nil {
		return keyring.Ring{}, err
	}
	ring.Save(tx)
	return *ring, nil
}
