package identity

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4/jwt"
	"google.golang.org/genproto/googleapis/rpc/code"

	"github.com/trivet-cloud/trivet/controlplane/audit"
	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/controlplane/tenant"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ask is a request for a token.
type ask struct {
	User     cloud.UserID
	Password string
	// Kind is a kind of package token, or empty for either.
	Kind         string
	TTL          uint64
	Org, Project string
	// Address is where the request came from, RequestID its id.
	Address, RequestID string
}

// exchangesPerSecond bounds how often tokens of other providers are looked at.
const exchangesPerSecond = 20

type issued struct {
	text    string
	expires time.Time
}

// HostToken makes a token of the administrator, for whoever holds the cluster key.
func HostToken(key *clusterkey.Key, scope cloud.Tenant, now time.Time, ttl time.Duration) (string, error) {
	say := token.Claims{
		Claims: jwt.Claims{Issuer: "urn:trivet:" + key.Cluster(), Subject: string(principal.Admin)}, Cluster: key.Cluster(),
		Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofHostKey,
	}
	return token.Sign(ed25519.NewKeyFromSeed(key.Derive("host-token")), hostKeyID, say, now, ttl)
}

// scopeOf checks the scope that is asked for.
func scopeOf(q ask) (cloud.Tenant, error) {
	t := cloud.Tenant{Org: cloud.OrgID(q.Org), Project: cloud.ProjectID(q.Project)}
	for _, id := range []struct{ field, value string }{{"org_id", q.Org}, {"project_id", q.Project}} {
		if id.value != "" {
			if err := cloud.CheckCallerID(id.field, id.value); err != nil {
				return t, err
			}
		}
	}
	return t, nil
}

// orgOf completes the scope of whoever proved who they are: a project alone names its org.
func (s *Service) orgOf(ctx context.Context, t cloud.Tenant) (cloud.Tenant, error) {
	if t.Project == "" || t.Org != "" {
		return t, nil
	}
	err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) (err error) {
		t.Org, err = tenant.OrgOf(v, t.Project)
		return err
	})
	return t, err
}

// token makes the token that was asked for, and says whether its holder is proven.
func (s *Service) token(ctx context.Context, q ask) (issued, bool, error) {
	if err := s.skewed(); err != nil {
		return issued{}, false, err
	}
	ttl, err := token.TTL(q.TTL)
	if err != nil {
		return issued{}, false, err
	}
	scope, err := scopeOf(q)
	if err != nil {
		return issued{}, false, err
	}
	u, err := s.proven(ctx, q)
	if err != nil {
		return issued{}, false, err
	}
	if u != nil {
		if !s.issues.allow(u.ID, s.now()) {
			return issued{}, false, errTooManyTokens(u.ID)
		}
		if scope, err = s.orgOf(ctx, scope); err != nil {
			return issued{}, false, err
		}
	}
	say := token.Claims{Claims: jwt.Claims{Subject: string(q.User)}, Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofNone}
	if u != nil {
		say.Proof, say.Epoch = cloud.ProofPassword, u.Epoch
		if u.Account != nil {
			say.Kind, say.Proof, say.Scope = token.ServiceAccount, cloud.ProofAppCred, token.ScopeOf(u.Account.Tenant)
		}
	}
	s.note(q, scope, "IssueToken", say.Proof, u != nil)
	out, err := s.issue(ctx, say, ttl)
	return out, u != nil, err
}

// note has the audit write who was given a token, and who tried to be somebody and was not.
func (s *Service) note(q ask, scope cloud.Tenant, method string, proof cloud.Proof, proven bool) {
	r := audit.Record{
		Method: service + method, Target: "username=" + string(q.User), RequestID: q.RequestID, Address: password.Network(q.Address),
		Outcome: audit.OK, Proof: proof, Principal: string(q.User), Tenant: scope,
	}
	if !proven {
		if q.Password == "" {
			return // who claims nothing is given a token that is worth nothing
		}
		r.Outcome, r.Message, r.Principal, r.Tenant = "UNAUTHENTICATED", "wrong user or password", "", cloud.Tenant{}
	}
	s.opts.Audit.Note(r)
}

// issue signs claims with the primary signing key, or with the unproven key when the holder is unauthenticated. Either way
// it is Unavailable when the records cannot be read (the spec's part 4.6).
func (s *Service) issue(ctx context.Context, say token.Claims, ttl time.Duration) (issued, error) {
	if err := s.setIncarnation(ctx, &say); err != nil {
		return issued{}, err
	}
	id, private, err := s.signer(ctx)
	if err != nil {
		return issued{}, err
	}
	if say.Proof == cloud.ProofNone {
		id, private = unprovenKeyID, s.unprovenKey
	}
	now := s.now()
	say.Issuer, say.Cluster = s.opts.Issuer, s.opts.Key.Cluster()
	text, err := token.Sign(private, id, say, now, ttl)
	return issued{text, token.Ends(now, ttl)}, err
}

// proven tries a password or a secret. Nil for a wrong one, an unknown name, one that is shut out, and one that was missed
// too often from the address.
func (s *Service) proven(ctx context.Context, q ask) (*principal.User, error) {
	var u *principal.User
	var networks []string
	// As it is now: whoever has just set a password logs in on another member next.
	read := func() error {
		return s.opts.Store.View(ctx, func(v *store.View) (err error) {
			if u, err = principal.Users.Get(v, string(q.User)); err != nil {
				return err
			}
			networks, err = networksOf(v, q.User)
			return err
		})
	}
	now := func() cloud.Time { return s.opts.Store.Now() }
	if strings.HasPrefix(string(q.User), principal.AccountPrefix) {
		if err := read(); err != nil {
			return nil, fmt.Errorf("read service account: %w", err)
		}
		if u != nil && u.Account != nil {
			secret, err := u.Open(s.opts.Key)
			if err != nil {
				return nil, err
			}
			if s.passwords.TrySecret(q.User, q.Address, q.Password, secret, now()) && q.may(u, now()) {
				return u, nil
			}
			return nil, nil
		}
	}
	var account password.Account
	right, err := s.passwords.Try(ctx, q.User, q.Address, q.Password, now, func() (password.Account, error) {
		if err := read(); err != nil {
			return account, fmt.Errorf("read user: %w", err)
		}
		if u != nil {
			account = password.Account{Hash: u.Password, Networks: networks}
		}
		return account, nil
	})
	if err != nil || !right || !q.may(u, now()) {
		return nil, err
	}
	s.rememberNetwork(ctx, u.ID, password.Network(q.Address), account.Networks)
	return u, nil
}

// may reports whether a principal that proved itself may have a token.
func (q *ask) may(u *principal.User, now cloud.Time) bool {
	kind := token.User
	if u.Account != nil {
		kind = token.ServiceAccount
	}
	return !u.Disabled && !u.Expired(now) && (q.Kind == "" || q.Kind == kind)
}

// exchange makes a token for whoever an outside provider vouches for.
func (s *Service) exchange(ctx context.Context, provider, idToken, nonce string, q ask) (out issued, err error) {
	defer func() {
		if f, ok := fault.From(err); ok {
			s.opts.Audit.Note(audit.Record{
				Method: service + "ExchangeToken", Target: "provider=" + provider, RequestID: q.RequestID, Address: password.Network(q.Address),
				Outcome: code.Code(f.Kind.RPC()).String(), Message: f.Message,
			})
		}
	}()
	if err := s.skewed(); err != nil {
		return issued{}, err
	}
	// A token of a key that is not known has the provider asked again.
	if !s.exchanges.Allow() {
		return issued{}, fault.New(fault.Unavailable, "too many logins by other providers at once; try again in a moment").MayRetry()
	}
	ttl, err := token.TTL(q.TTL)
	if err != nil {
		return issued{}, err
	}
	scope, err := scopeOf(q)
	if err != nil {
		return issued{}, err
	}
	subject, err := s.providers.Subject(ctx, provider, idToken, nonce, s.now)
	if err != nil {
		return issued{}, err
	}
	var u *principal.User
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		id, err := principal.Linked(v, principal.Identity{Provider: provider, Subject: subject, Issuer: s.providers.Issuer(provider)})
		if err != nil || id == "" {
			return err
		}
		u, err = principal.Users.Get(v, string(id))
		return err
	})
	if err != nil {
		return issued{}, err
	}
	if u == nil || u.Disabled {
		return issued{}, fault.New(fault.Unauthenticated, "nobody here is linked with your identity at %s: ask an administrator to", provider).
			WithReason("NOT_LINKED").With("provider", provider).With("subject", subject)
	}
	if !s.issues.allow(u.ID, s.now()) {
		return issued{}, errTooManyTokens(u.ID)
	}
	if scope, err = s.orgOf(ctx, scope); err != nil {
		return issued{}, err
	}
	q.User = u.ID
	s.note(q, scope, "ExchangeToken", cloud.ProofOIDC, true)
	say := token.Claims{
		Claims: jwt.Claims{Subject: string(u.ID)}, Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofOIDC, Epoch: u.Epoch,
	}
	return s.issue(ctx, say, ttl)
}

// revokeToken denies one token. Whoever holds it may, and system:admin names it by its id.
func (s *Service) revokeToken(ctx context.Context, text, id string) error {
	caller := auth.CallerOf(ctx)
	if (text == "") == (id == "") {
		return fault.Invalid("token", "give the token, or its id")
	}
	if !s.revocations.allow(caller.User, s.now()) {
		return errTooManyRevocations(caller.User)
	}
	if text != "" {
		holder, err := s.Verify(ctx, text)
		if fault.Is(err, fault.Unauthenticated) {
			return nil // it is over already
		}
		if err != nil {
			return err
		}
		if !holder.Proven() {
			return nil // it is worth nothing
		}
		return s.deny(ctx, denialOf(holder))
	}
	if err := cloud.CheckUUID("token_id", id); err != nil {
		return err
	}
	if id == caller.TokenID {
		return s.deny(ctx, denialOf(caller))
	}
	if !caller.Governs() {
		return fault.New(fault.PermissionDenied, "%s may revoke only tokens that they hold", caller.Name())
	}
	return s.deny(ctx, denial{Token: id, Until: s.opts.Store.Now() + longest.Milliseconds()})
}

// deny denies a token, and logs when that ended all tokens of the principal.
func (s *Service) deny(ctx context.Context, d denial) error {
	out, err := s.do.deny(ctx, d)
	if out.AllEnded {
		s.opts.Log.Warn("a principal revoked so many single tokens that all its tokens were ended", "principal", d.User, "limit", maxDenials)
	}
	return err
}
