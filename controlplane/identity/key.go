package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// keyRecord is a signing key at rest.
type keyRecord struct {
	ID     string
	Public []byte
	// Sealed is the private key's seed under the cluster key.
	Sealed    []byte
	CreatedAt cloud.Time
}

var (
	signingKeys = store.NewTable[keyRecord]("signing-key")
	primaryKey  = store.NewTable[string]("signing-key-use")
)

type signingKey struct {
	record  keyRecord
	private ed25519.PrivateKey
}

func sealedName(id string) string { return "signing-key/" + id }

func newSigningKey(key *clusterkey.Key) (*signingKey, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make signing key: %w", err)
	}
	id := hex.EncodeToString(public[:8])
	return &signingKey{
		record:  keyRecord{ID: id, Public: public, Sealed: key.Seal(sealedName(id), private.Seed())},
		private: private,
	}, nil
}

// signer is the key that new tokens are signed with.
func (s *Service) signer(ctx context.Context) (*signingKey, error) {
	var id *string
	err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) (err error) {
		id, err = primaryKey.Get(v, "primary")
		return err
	})
	if err != nil {
		return nil, err
	}
	if id == nil {
		return nil, fault.New(fault.Unavailable, "the cluster is being set up; try again in a moment").MayRetry()
	}
	return s.key(ctx, *id)
}

// key finds a signing key; nil when there is none of that id. Keys never change, so each is read and opened once.
func (s *Service) key(ctx context.Context, id string) (*signingKey, error) {
	if k, ok := s.keys.Load(id); ok {
		return k.(*signingKey), nil
	}
	var record *keyRecord
	err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) (err error) {
		record, err = signingKeys.Get(v, id)
		return err
	})
	if err != nil || record == nil {
		return nil, err
	}
	seed, err := s.opts.Key.Open(sealedName(id), record.Sealed)
	if err != nil {
		return nil, err
	}
	k := &signingKey{record: *record, private: ed25519.NewKeyFromSeed(seed)}
	s.keys.Store(id, k)
	return k, nil
}
