// Package jointoken gives the cluster key to a process that is to become a member and has only a join token.
//
// The token is id.secret.pin, like the join token of a host. The joining process checks the pin of the certificate
// authority before it sends anything, proves that it holds a key, and receives the cluster key over that connection.
// From then on it acts like a process that was started with --cluster-key: package membership admits it if a record for
// the new member has been added. The token does not contain the ID of a member. A holder of the cluster key can act as
// any member and decrypt every stored secret, so a token must be kept as secret as the key. It is valid for an hour by
// default and for a day at most, and only one process can use it. Each use adds an audit record, and a message to the
// log of the member that serves the call.
//
// A token is bound to the first key with which it is used. The process with that key may repeat the request until the
// token expires, because a response can be lost. The joining process stores the key on disk before the first request,
// and deletes it when it has the cluster key.
//
// The package does not depend on the records of members or hosts. Tokens for hosts are in another table, and none of
// them gives access to the cluster key.
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
	// Protocol is the version of the gRPC API member.v1 that this program implements.
	Protocol = 1
	// tokenTTL is the default lifetime of a join token. maxTTL is the maximum lifetime.
	tokenTTL = time.Hour
	maxTTL   = 24 * time.Hour
	// maxTokens is the maximum number of join tokens that are stored at the same time.
	maxTokens = 100
	// maxText is the maximum length of a token, in bytes.
	maxText = 512
)

// invitation is the record of a join token: member-token/<id>.
type invitation struct {
	Secret  [32]byte // SHA-256 of the secret
	Expires cloud.Time
	// Key is the hash of the public key of the process that has used the token. It is nil if the token has not been
	// used.
	Key []byte
}

var invitations = store.NewTable[invitation]("member-token")

// Options configures New. All fields are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Key      *clusterkey.Key
	Log      *slog.Logger
}

// Service creates join tokens and exchanges them for the cluster key.
type Service struct {
	opts Options
}

// New creates the service and registers its commands with opts.Commands.
func New(opts Options) *Service {
	s := &Service{opts: opts}
	leader.Register(opts.Commands, s, newTokenCommand, admitCommand)
	return s
}

// made is the response of newTokenCommand: a new token without its pin.
type made struct {
	ID, Secret string
	Expires    cloud.Time
}

// NewToken creates a join token that is valid for ttl. The maximum of ttl is one day, and 0 means one hour. NewToken
// does not check the caller's access; its caller must do that.
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

// newTokenOnLeader implements NewToken on the leader: it generates the token and stores the hash of its secret.
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
			return fault.New(fault.ResourceExhausted, "%d join tokens for members are valid already: wait until one expires", len(all))
		}
		m.Expires = tx.Now() + ttl.Milliseconds()
		invitations.Put(tx, &invitation{Secret: sha256.Sum256([]byte(m.Secret)), Expires: m.Expires}, m.ID)
		return nil
	})
	return m, err
}

// admitAsk holds the arguments of admitCommand.
type admitAsk struct {
	ID, Secret string
	// Key is the hash of the joining process's public key. Address is the IP address of the process.
	Key                []byte
	Address, RequestID string
}

func errBad() error {
	return fault.New(fault.Unauthenticated, "the join token is unknown, expired or used by another: make a new one with `trivet cluster token`")
}

var admitCommand = leader.NewCommand("invite.admit", leader.Repeatable, (*Service).admitOnLeader)

// admitOnLeader binds a token to the key of the joining process that uses it, and writes an audit record. A process
// with the same key may use the token again until the token expires. admitOnLeader returns Unauthenticated if the token
// is unknown, expired or bound to another key.
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

// Expire removes expired tokens. Only the leader runs it.
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
