// Package invite brings the cluster key to a process that is to become a member and holds a token only.
//
// The token is id.secret.pin, as a host's: the newcomer pins the authority by it before it says anything, proves that it
// holds a key, and gets the cluster key over that connection. From then on it is like one that was started with
// --cluster-key: package membership lets it in, by an entry that somebody has made. The token names no entry. Whoever holds
// the cluster key can be any member and read every secret at rest, so a token is worth as much: it lives an hour, a day at
// most, works once, and its use stands in the audit and in every log.
//
// A token is used up by the key that it first came with. That key may ask again until the token ends, since an answer can
// be lost; it is on the newcomer's disk before it asks, and goes when the cluster key is there.
//
// It knows no members and no hosts. Tokens of hosts are another table: none of them ever brings the cluster key.
package jointoken

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"log/slog"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Protocol is the version of member.v1 that this program speaks.
	Protocol = 1
	tokenTTL = time.Hour
	maxTTL   = 24 * time.Hour
	// maxTokens is how many may live at a time.
	maxTokens = 100
	maxText   = 512
)

// invitation is a token at rest: member-token/<id>.
type invitation struct {
	Secret  [32]byte // SHA-256 of it
	Expires cloud.Time
	// Key is the hash of the public key that used the token; empty before.
	Key []byte
}

var invitations = store.NewTable[invitation]("member-token")

// Options of the service; all are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Key      *clusterkey.Key
	Log      *slog.Logger
}

// Service gives the cluster key away.
type Service struct {
	opts Options
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	s := &Service{opts: opts}
	leader.Register(opts.Commands, s, newTokenCommand, admitCommand)
	return s
}

// made is a token, without the pin.
type made struct {
	ID, Secret string
	Expires    cloud.Time
}

// NewToken makes a token, for whoever was admitted to ask. ttl 0 is an hour, more than a day is too much.
func (s *Service) NewToken(ctx context.Context, ttl time.Duration) (token string, expires cloud.Time, err error) {
	switch {
	case ttl == 0:
		ttl = tokenTTL
	case ttl < 0 || ttl > maxTTL:
		return "", 0, fault.Invalid("ttl_seconds", "at most %d", int(maxTTL.Seconds()))
	}
	authority, err := s.opts.Key.Authority()
	if err != nil {
		return "", 0, err
	}
	m, err := newTokenCommand.Call(ctx, s.opts.Commands, ttl)
	return strings.Join([]string{m.ID, m.Secret, mtls.Pin(authority.Certificate())}, "."), m.Expires, err
}

var newTokenCommand = leader.NewCommand("invite.new-token", leader.Repeatable, (*Service).newTokenOnLeader)

// newTokenOnLeader is NewToken on the leader: it draws the token and stores the hash of its secret.
func (s *Service) newTokenOnLeader(ctx context.Context, ttl time.Duration) (m made, err error) {
	secret := make([]byte, 24)
	rand.Read(secret)
	m.ID, m.Secret = hex.EncodeToString(secret[:8]), base64.RawURLEncoding.EncodeToString(secret[8:])
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := invitations.List(tx, 0)
		if err != nil {
			return err
		}
		if len(all) >= maxTokens {
			return fault.New(fault.ResourceExhausted, "%d tokens for members live already: wait until they end", len(all))
		}
		m.Expires = tx.Now() + ttl.Milliseconds()
		invitations.Put(tx, &invitation{Secret: sha256.Sum256([]byte(m.Secret)), Expires: m.Expires}, m.ID)
		return nil
	})
	return m, err
}

type admitAsk struct {
	ID, Secret string
	// Key is the hash of the newcomer's public key, Address where it is.
	Key                []byte
	Address, RequestID string
}

func errBad() error {
	return fault.New(fault.Unauthenticated, "the join token is unknown, expired or used by another: make a new one with `trivet cluster token`")
}

var admitCommand = leader.NewCommand("invite.admit", leader.Repeatable, (*Service).admitOnLeader)

// admitOnLeader uses a token for the key of a newcomer, and writes an audit record. The same key may use the token again
// until it expires. It returns Unauthenticated if the token is unknown, expired or used by another key.
func (s *Service) admitOnLeader(ctx context.Context, q admitAsk) (none struct{}, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		t, err := invitations.Get(tx, q.ID)
		if err != nil {
			return err
		}
		given := sha256.Sum256([]byte(q.Secret))
		if t == nil || subtle.ConstantTimeCompare(given[:], t.Secret[:]) != 1 || tx.Now() >= t.Expires {
			return errBad()
		}
		if len(t.Key) > 0 && subtle.ConstantTimeCompare(t.Key, q.Key) != 1 && !mutant.On(mutant.ReuseInvitation) {
			return errBad()
		}
		t.Key = q.Key
		invitations.Put(tx, t, q.ID)
		audit.Add(tx, &cloud.Caller{
			User: cloud.UserID("member-token/" + q.ID), Proof: cloud.ProofInvitation, Method: method, Target: "key/" + hex.EncodeToString(q.Key), Address: q.Address, RequestID: q.RequestID,
		})
		return nil
	})
	return none, err
}

// Expire removes tokens that are over. It is a leader's task.
func (s *Service) Expire(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		all, _, err := invitations.List(tx.Unguarded(), 0)
		if err != nil {
			return err
		}
		for _, r := range all {
			if tx.Now() >= r.Value.Expires {
				invitations.Delete(tx, r.Path...)
			}
		}
		return nil
	})
	return err
}
