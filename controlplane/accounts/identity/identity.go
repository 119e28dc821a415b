// Package identity is the service that says who may hold a token, and whose a token is.
//
// What makes the law's token endpoint safe (it checks no password) is that a token says how its holder was proven, and
// one whose holder proved nothing can do nothing: package auth refuses it everywhere. Roles are never in a token; they
// are read from the bindings as they are when the token is used, so taking one away acts within a second on every
// member.
//
// Below it are packages that know no service: token (the form of tokens), keyring (what they are signed with), password,
// principal (users, service accounts, roles), outside (OpenID providers of others), and tenant (orgs, projects, quotas).
//
// Decisions:
//   - A token is judged by this member's own copy of the records, which every commit updates. When the member has not
//     proved for staleness that the copy is the newest it asks the others first, and when it cannot it refuses: a token
//     that was revoked is refused everywhere within a second, behind a partition too.
//   - A principal's tokens die when its password is set, when it is disabled or deleted, or when they are revoked
//     together: a token carries the count of those (its epoch), and one of another count is refused. A single token
//     is on a list of denied tokens until it would have expired. Issuing and revoking tokens is rate-limited per
//     principal. The list is bounded per principal: when it is full, all tokens of the principal are revoked instead.
//   - A token whose scope is a project outside the scope's org, or one in which the holder has no role, is refused in
//     every call, and does not reveal the project's org. IssueToken refuses such a scope. The token endpoint of the
//     wire contract issues the token nevertheless.
//   - A member whose clock is too far from the others' issues no tokens and believes none: dates would mean nothing.
//   - An unauthenticated token is signed by a separate key that discovery does not publish, and has a separate audience
//     and subject prefix, so that programs that trust this service as OpenID provider reject it.
//   - The administrator's tokens are signed by a key that follows from the cluster key, so whoever holds that can make
//     one without a running member: `trivet-controlplane admin-token`.
//   - Anybody may register a name over REST, as the spec says; it is worth nothing. How many names without a credential
//     there may be is bounded, and so is how fast they are made.
package identity

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/elastic/go-freelru"
	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/delay"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// staleness is how old the records may be that a token is judged by.
const staleness = 900 * time.Millisecond

type born struct{ At cloud.Time }

var births = store.NewTable[born]("born")

// Options of the service. Store, Commands, Key, Log, Audit and Issuer are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Key      *clusterkey.Key
	Log      *slog.Logger
	Audit    *audit.Service
	// Issuer is the URL at which others find this service: "iss" of the tokens that are issued here.
	Issuer string
	// Providers are the outside OpenID providers that are believed.
	Providers []oidc.Provider
	// Holds say what a project, or an org alone, still has that it cannot be deleted with.
	Holds []func(store.Reader, cloud.Tenant) error
	// Vacant are checks before a project is created: they return an error if records of other packages, such as an open
	// wallet, exist under its ID.
	Vacant []func(store.Reader, cloud.ProjectID) error
	// Skew is how far this member's clock is ahead of the others', when that is known. Optional.
	Skew func() (time.Duration, bool)
	// Dev lets holders who proved nothing act as project:admin and billing:admin of the default project.
	Dev bool
}

// Service is the identity service of one member.
type Service struct {
	opts      Options
	hostKey   ed25519.PrivateKey
	passwords *password.Desk
	providers *oidc.Providers
	// checked holds tokens whose signature was verified, and holders what the records say about their holders.
	checked *freelru.SyncedLRU[[32]byte, signed]
	// signatures counts the token signatures that were verified.
	signatures atomic.Int64
	holders    *store.Memo[*holder]
	opened     opened
	names      nameGate
	// unknown bounds how often others are asked for a key, exchanges how often a token of another provider is looked at.
	unknown, exchanges *rate.Limiter
	misses             *missReads
	// incarnationKey is the key of the MACs of incarnationClaim.
	incarnationKey []byte
	// unprovenKey signs unauthenticated tokens.
	unprovenKey ed25519.PrivateKey
	// issues and revocations limit the rate of each principal's issued and revoked tokens.
	issues, revocations *principalRates
	// unproven delays answers to requests for a token that are not issued a token of a principal, by password.Network.
	unproven *delay.Answers
}

// unprovenLimits are the limits of answers to token requests that prove no principal. Anybody can send such requests.
var unprovenLimits = delay.Limits{Burst: 100, Every: 20 * time.Millisecond, Longest: 2 * time.Second}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	s := &Service{
		checked: newChecked(), holders: store.NewMemo[*holder](maxChecked),
		opts: opts, hostKey: ed25519.NewKeyFromSeed(opts.Key.Derive("host-token")), passwords: password.NewDesk(runtime.GOMAXPROCS(0)),
		providers: oidc.New(opts.Providers), names: newNameGate(), unknown: rate.NewLimiter(unknownKeys, unknownKeys), exchanges: rate.NewLimiter(exchangesPerSecond, 2*exchangesPerSecond),
		incarnationKey: opts.Key.Derive("token-incarnation"), unprovenKey: ed25519.NewKeyFromSeed(opts.Key.Derive("unproven-token")), issues: newPrincipalRates(), revocations: newPrincipalRates(),
		unproven: delay.New(unprovenLimits),
		misses:   newMissReads(),
	}
	s.register()
	return s
}

// now is the cluster's time.
func (s *Service) now() time.Time { return time.UnixMilli(s.opts.Store.Now()) }

// Bootstrap makes what must be there from the first boot. It is a leader's task; only the first run does anything.
func (s *Service) Bootstrap(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if err := s.ring(tx); err != nil {
			return err
		}
		if done, err := births.Has(tx, "born"); err != nil {
			return err
		} else if done {
			return tenant.Adopt(tx)
		}
		births.Put(tx, &born{At: tx.Now()}, "born")
		if _, err := tenant.CreateOrg(tx, tenant.Default.Org, "Default"); err != nil {
			return err
		}
		if _, err := tenant.CreateProject(tx, tenant.Default, "Default", tenant.Quota{}); err != nil {
			return err
		}
		_, err := principal.Create(tx, principal.Admin, "Administrator", "", false)
		if err != nil {
			return err
		}
		_, err = principal.Bind(tx, principal.Grant{User: principal.Admin, Binding: cloud.Binding{Role: cloud.SystemAdmin}, Always: true})
		return err
	})
	return err
}

// ring makes the keys that tokens are signed with, when there are none.
func (s *Service) ring(tx *store.Tx) error {
	ring, err := keyring.Load(tx)
	if err != nil || ring != nil {
		return err
	}
	if ring, err = keyring.New(s.opts.Key, tx.Now()); err != nil {
		return err
	}
	ring.Save(tx)
	return nil
}

func settingUp() *fault.Fault {
	return fault.New(fault.Unavailable, "the cluster is being set up; try again in a moment").MayRetry()
}

// Ready says whether this member knows of the first boot: before that nobody can prove who they are.
func (s *Service) Ready() error {
	return s.opts.Store.Local(func(v *store.View) error {
		if done, err := births.Has(v, "born"); err != nil || done {
			return err
		}
		return settingUp()
	})
}

// Tend rotates keys when it is time, and forgets what need not be known any more. It is a leader's task.
func (s *Service) Tend(ctx context.Context) error {
	if err := forgetDenied(ctx, s.opts.Store); err != nil {
		return err
	}
	if err := principal.ForgetInvitations(ctx, s.opts.Store); err != nil {
		return fmt.Errorf("forget invitations that have ended: %w", err)
	}
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		ring, err := keyring.Load(tx)
		if err != nil || ring == nil {
			return err
		}
		if changed, err := ring.Tend(s.opts.Key, tx.Now(), longest); err != nil || !changed {
			return err
		}
		ring.Save(tx)
		return nil
	})
	if err != nil {
		return fmt.Errorf("tend the signing keys: %w", err)
	}
	return nil
}

// longest is how long a token can be good on any member.
const longest = token.MaxTTL*time.Second + token.Leeway
