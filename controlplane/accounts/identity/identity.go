// Package identity issues and verifies tokens, and manages users, service accounts, roles, orgs, projects and quotas.
//
// The token endpoint of the wire contract checks no password. This is safe because a token states how its holder was
// authenticated (its proof), and package auth refuses an unauthenticated token in every call. A token contains no
// roles: they are read from the bindings when the token is used, so removing a role takes effect within a second on
// every member.
//
// It is built on packages that import no service: token (the format of tokens), keyring (the signing keys), password,
// principal (users, service accounts, roles), oidc (external OpenID providers), and tenant (orgs, projects, quotas).
//
// Decisions:
//   - A token is verified against this member's own copy of the records, which every commit updates. If the copy was
//     not confirmed as current within staleness, the member first contacts the other members, and refuses the token if
//     it cannot reach them. So a revoked token is refused everywhere within a second, even behind a network partition.
//   - All tokens of a principal become invalid when its password is set, when it is disabled or deleted, or when all
//     its tokens are revoked. Each of these events increments a number, the principal's epoch. A token contains the
//     epoch at the time of its issue, and is refused if the principal's epoch has changed. A token that is revoked
//     alone is on a list of denied tokens until it would have expired. The list has a maximum length per principal;
//     beyond it, all tokens of the principal are revoked instead. Issuing and revoking tokens is rate-limited per
//     principal.
//   - If the scope of a token names a project that is not in the org of the scope, or in which the holder has no role,
//     every call with the token is refused. The refusal does not reveal the project's org. IssueToken refuses to issue
//     a token with such a scope; the token endpoint of the wire contract issues it.
//   - A member whose clock differs by more than MaxSkew from the other members' clocks issues and accepts no tokens,
//     because it cannot check their dates.
//   - An unauthenticated token is signed by a separate key that discovery does not publish, and has a separate audience
//     and subject prefix, so that programs that trust this service as OpenID provider reject it.
//   - The administrator's tokens can also be signed by the host key, which is derived from the cluster key. So a holder
//     of the cluster key can create one without a running member: `trivet-controlplane admin-token`.
//   - Any caller may register a name over REST (part 4.6 of the wire contract); the name gives no access. The number of
//     names without a credential is limited, and so is the rate of registration.
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

// staleness is the maximum age of the records that a token is verified against.
const staleness = 900 * time.Millisecond

// bootstrapMarker is the record that Bootstrap writes once, so that later runs do not create the initial records again.
type bootstrapMarker struct{ At cloud.Time }

var bootstrapMarkers = store.NewTable[bootstrapMarker]("born")

// Options configures New. Store, Commands, Key, Log, Audit and Issuer are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Key      *clusterkey.Key
	Log      *slog.Logger
	Audit    *audit.Service
	// Issuer is the URL at which clients find this service. It is the "iss" claim of the tokens that this service
	// issues.
	Issuer string
	// Providers are the trusted external OpenID providers.
	Providers []oidc.Provider
	// Holds are called in the transaction that deletes a project or an org; for an org, Tenant.Project is empty. If one
	// returns an error, because records of other packages still need the project or the org, nothing is deleted.
	Holds []func(store.Reader, cloud.Tenant) error
	// Forget are called in the transaction that deletes a project, after Holds. They delete those records of other
	// packages that only the deletion of the project deletes.
	Forget []func(*store.Tx, cloud.Tenant) error
	// Vacant are called in the transaction that creates a project. If one returns an error, because records of other
	// packages (such as an open wallet) exist under the project's ID, the project is not created.
	Vacant []func(store.Reader, cloud.ProjectID) error
	// Skew returns how far this member's clock is ahead of the other members' clocks. The second result is false if
	// that is not known. Skew may be nil.
	Skew func() (time.Duration, bool)
	// Dev, if true, gives every unauthenticated token the role project:admin in the default project and the role
	// billing:admin for the cloud.
	Dev bool
}

// Service issues and verifies tokens on one member, and executes the calls that change users, roles, orgs, projects and
// quotas.
type Service struct {
	opts      Options
	hostKey   ed25519.PrivateKey
	passwords *password.Hasher
	providers *oidc.Providers
	// checked caches the tokens whose signature this member has verified. The key is the SHA-256 of the token's text.
	checked *freelru.SyncedLRU[[32]byte, signed]
	// signatures counts the token signatures that were verified.
	signatures atomic.Int64
	logins     logins
	// revoked counts the successful calls that revoked one token, or all tokens of a principal.
	revoked atomic.Int64
	// holders caches the records about the holders of verified tokens. The key is the SHA-256 of the token's text.
	holders *store.Memo[*holder]
	opened  opened
	names   nameGate
	// unknown limits the rate of the linearizable reads that tokens with an unknown key ID cause. exchanges limits the
	// rate at which ID tokens of external providers are verified.
	unknown, exchanges *rate.Limiter
	misses             *missReads
	// incarnationKey is the key with which incarnationClaim computes MACs.
	incarnationKey []byte
	// unprovenKey signs unauthenticated tokens.
	unprovenKey ed25519.PrivateKey
	// issues limits the rate at which tokens are issued to each principal. revocations limits the rate at which each
	// principal revokes tokens.
	issues, revocations *principalRates
	// unproven delays the responses to token requests that authenticate no principal. The delay depends on the number
	// of such requests from the same client network (see password.Network).
	unproven *delay.Answers
}

// unprovenLimits are the limits, per client network, of responses to token requests that authenticate no principal. 100
// responses are sent without delay, and then one per 20 ms; further responses are delayed by at most 2 s. The limits
// are needed because every client can send such requests.
var unprovenLimits = delay.Limits{Burst: 100, Every: 20 * time.Millisecond, Longest: 2 * time.Second}

// New returns a Service and registers its commands with opts.Commands.
func New(opts Options) *Service {
	s := &Service{
		checked: newChecked(), holders: store.NewMemo[*holder](maxChecked),
		opts: opts, hostKey: ed25519.NewKeyFromSeed(opts.Key.Derive("host-token")), passwords: password.NewHasher(runtime.GOMAXPROCS(0)),
		providers: oidc.New(opts.Providers), names: newNameGate(), unknown: rate.NewLimiter(unknownKeys, unknownKeys), exchanges: rate.NewLimiter(exchangesPerSecond, 2*exchangesPerSecond),
		incarnationKey: opts.Key.Derive("token-incarnation"), unprovenKey: ed25519.NewKeyFromSeed(opts.Key.Derive("unproven-token")), issues: newPrincipalRates(), revocations: newPrincipalRates(),
		unproven: delay.New(unprovenLimits),
		misses:   newMissReads(),
	}
	s.register()
	return s
}

// now returns the timestamp that an update of the store would get at this moment.
func (s *Service) now() time.Time { return time.UnixMilli(s.opts.Store.Now()) }

// Bootstrap creates the initial records: the signing keys, the default org and project, and the administrator. Only the
// leader runs it. If the initial records exist, Bootstrap only calls tenant.Adopt.
func (s *Service) Bootstrap(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if err := s.ring(tx); err != nil {
			return err
		}
		if done, err := bootstrapMarkers.Has(tx, "born"); err != nil {
			return err
		} else if done {
			return tenant.Adopt(tx)
		}
		bootstrapMarkers.Put(tx, &bootstrapMarker{At: tx.Now()}, "born")
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

// ring creates the signing keys and stores them as the keyring, if the store has no keyring.
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

func errSettingUp() *fault.Fault {
	return fault.New(fault.Unavailable, "the cluster is being set up; try again in a moment").MayRetry()
}

// Ready returns Unavailable while this member's store does not contain the records that Bootstrap creates, because no
// caller can authenticate without them.
func (s *Service) Ready() error {
	return s.opts.Store.Local(func(v *store.View) error {
		if done, err := bootstrapMarkers.Has(v, "born"); err != nil || done {
			return err
		}
		return errSettingUp()
	})
}

// Tend rotates the signing keys if the primary key is older than keyring.RotateAfter, and removes expired denials and
// invitations. Only the leader runs it.
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
		return fmt.Errorf("rotate the signing keys: %w", err)
	}
	return nil
}

// longest is the longest time for which a token can be valid on any member.
const longest = token.MaxTTL*time.Second + token.Leeway
