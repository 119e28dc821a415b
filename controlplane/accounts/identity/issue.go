package identity

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4/jwt"
	"google.golang.org/genproto/googleapis/rpc/code"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// tokenRequest holds the parameters of a request for a token, by gRPC or REST.
type tokenRequest struct {
	User     cloud.UserID
	Password string
	// Kind is token.User or token.ServiceAccount if the principal must be of that kind; empty allows both.
	Kind         string
	TTL          uint64
	Org, Project string
	// Strict means that the request is refused if the holder has no role in the scope. Otherwise such a token is
	// issued, and every call with the token is refused.
	Strict bool
	// Address is the address of the client, RequestID the ID of the request.
	Address, RequestID string
}

// exchangesPerSecond is the maximum average number of ID tokens of external providers that one member verifies per
// second.
const exchangesPerSecond = 20

type issuedToken struct {
	text    string
	expires time.Time
	scope   cloud.Tenant
}

// HostToken returns a token of the administrator that is signed with the host key. That key is derived from the cluster
// key, so no running member is needed.
func HostToken(key *clusterkey.Key, scope cloud.Tenant, now time.Time, ttl time.Duration) (string, error) {
	say := token.Claims{
		Claims: jwt.Claims{Issuer: "urn:trivet:" + key.Cluster(), Subject: string(principal.Admin)}, Cluster: key.Cluster(),
		Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofHostKey,
	}
	return token.Sign(ed25519.NewKeyFromSeed(key.Derive("host-token")), hostKeyID, say, now, ttl)
}

// scoped returns the scope of a token that the user u requests for the tenant t. If t names a project in which u has a
// role, scoped adds the project's org. If u has no role in t, scoped returns PermissionDenied if q.Strict is true, and
// t unchanged otherwise. The result does not reveal whether a project exists in which u has no role.
func (s *Service) scoped(ctx context.Context, q tokenRequest, t cloud.Tenant, u *principal.User) (cloud.Tenant, error) {
	if t == (cloud.Tenant{}) || u.Account != nil {
		return t, nil
	}
	found, reaches := t, false
	err := s.opts.Store.Recent(ctx, staleness, func(v *store.View) error {
		roles, err := u.Roles(v)
		if err != nil {
			return err
		}
		if found, err = located(v, t, roles, func(*tenant.Project) bool { return true }); err != nil {
			return err
		}
		holder := cloud.Caller{Proof: cloud.ProofPassword, Bindings: roles}
		reaches = found.Org != "" && holder.HasRoleIn(found)
		if reaches && t.Project == "" {
			// The user may have a role for the whole cloud, which applies to any org ID. So check that the org exists.
			o, err := tenant.FindOrg(v, t.Org)
			reaches = o != nil
			return err
		}
		return nil
	})
	switch {
	case err != nil:
		return t, err
	case reaches:
		return found, nil
	case !q.Strict:
		return t, nil
	}
	what, id := "project", string(t.Project)
	if id == "" {
		what, id = "org", string(t.Org)
	}
	return t, fault.New(fault.PermissionDenied, "%s has no role in %s %s", u.ID, what, id).WithReason("NO_ROLE_IN_SCOPE")
}

// refuse queues an audit record for an authenticated user whose request for a token was refused.
func (s *Service) refuse(q tokenRequest, method string, proof cloud.Proof, err error) {
	if f, ok := fault.From(err); ok {
		s.opts.Audit.Note(audit.Record{
			Method: service + method, Target: "username=" + string(q.User), RequestID: q.RequestID, Address: password.Network(q.Address),
			Outcome: code.Code(f.Kind.RPC()).String(), Message: f.Message, Proof: proof, Principal: string(q.User),
		})
	}
}

// token issues the requested token. The second result reports whether the token's holder is authenticated. If the
// holder is not, the response may be delayed: see unprovenLimits.
func (s *Service) token(ctx context.Context, q tokenRequest) (issuedToken, bool, error) {
	out, proven, err := s.tokenNow(ctx, q)
	if !proven {
		s.unproven.Wait(ctx, password.Network(q.Address))
	}
	return out, proven, err
}

func (s *Service) tokenNow(ctx context.Context, q tokenRequest) (issuedToken, bool, error) {
	if err := s.skewed(); err != nil {
		return issuedToken{}, false, err
	}
	ttl, err := token.TTL(q.TTL)
	if err != nil {
		return issuedToken{}, false, err
	}
	scope, err := cloud.ParseTenant(q.Org, q.Project)
	if err != nil {
		return issuedToken{}, false, err
	}
	u, err := s.authenticate(ctx, q)
	if err != nil {
		return issuedToken{}, false, err
	}
	if u != nil {
		q.User = u.ID // the request may name a service account by its name
		if !s.issues.allow(u.ID, s.now()) {
			return issuedToken{}, false, errTooManyTokens(u.ID)
		}
		if scope, err = s.scoped(ctx, q, scope, u); err != nil {
			s.refuse(q, "IssueToken", cloud.ProofPassword, err)
			return issuedToken{}, false, err
		}
	}
	say := token.Claims{Claims: jwt.Claims{Subject: string(q.User)}, Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofNone}
	if u != nil {
		say.Proof, say.Epoch = cloud.ProofPassword, u.Epoch
		if u.Account != nil {
			scope = u.Account.Tenant
			say.Kind, say.Proof, say.Scope = token.ServiceAccount, cloud.ProofAppCred, token.ScopeOf(scope)
		}
	}
	s.note(q, scope, "IssueToken", say.Proof, u != nil)
	out, err := s.issue(ctx, say, ttl)
	out.scope = scope
	return out, u != nil, err
}

// note queues an audit record for an issued token, or for a failed attempt to authenticate.
func (s *Service) note(q tokenRequest, scope cloud.Tenant, method string, proof cloud.Proof, proven bool) {
	r := audit.Record{
		Method: service + method, Target: "username=" + string(q.User), RequestID: q.RequestID, Address: password.Network(q.Address),
		Outcome: audit.OK, Proof: proof, Principal: string(q.User), Tenant: scope,
	}
	if !proven {
		if q.Password == "" {
			return // without a password, the caller did not try to authenticate
		}
		s.logins.failed.Add(1)
		r.Outcome, r.Message, r.Principal, r.Tenant = "UNAUTHENTICATED", "wrong user or password", "", cloud.Tenant{}
	}
	if proven {
		s.logins.succeeded.Add(1)
	}
	s.opts.Audit.Note(r)
}

// logins counts the attempts to authenticate with a password, a client secret or an ID token of an OIDC provider since
// the member started.
type logins struct{ succeeded, failed atomic.Int64 }

// Logins returns how many attempts to authenticate with a password, a client secret or an ID token of an OIDC provider
// have succeeded and failed on this member since the member started. It does not count calls that were refused before
// the credential was checked, for example by the rate limit.
func (s *Service) Logins() (succeeded, failed int64) {
	return s.logins.succeeded.Load(), s.logins.failed.Load()
}

// issue signs claims with the primary signing key or, if the holder is unauthenticated, with Service.unprovenKey. In
// both cases it returns Unavailable if the records cannot be read (part 4.6 of the wire contract).
func (s *Service) issue(ctx context.Context, say token.Claims, ttl time.Duration) (issuedToken, error) {
	if err := s.setIncarnation(ctx, &say); err != nil {
		return issuedToken{}, err
	}
	id, private, err := s.signer(ctx)
	if err != nil {
		return issuedToken{}, err
	}
	if say.Proof == cloud.ProofNone {
		id, private = unprovenKeyID, s.unprovenKey
	}
	now := s.now()
	say.Issuer, say.Cluster = s.opts.Issuer, s.opts.Key.Cluster()
	text, err := token.Sign(private, id, say, now, ttl)
	return issuedToken{text: text, expires: token.Ends(now, ttl)}, err
}

// authenticate returns the user whose password, or the service account whose secret, the request contains. The request
// names a service account by its ID or as NAME@ORG/PROJECT. authenticate returns nil if the password or secret is wrong, if the principal is unknown, disabled or expired, and after too many wrong
// attempts for the name.
func (s *Service) authenticate(ctx context.Context, q tokenRequest) (*principal.User, error) {
	var u *principal.User
	var networks []string
	// This read is linearizable, because a user may set a password on one member and then log in on another.
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
	id, err := s.accountID(ctx, q.User)
	if err != nil {
		return nil, fmt.Errorf("find service account: %w", err)
	}
	if id != "" {
		q.User = id
	}
	if strings.HasPrefix(string(q.User), principal.AccountPrefix) {
		if err := read(); err != nil {
			return nil, fmt.Errorf("read service account: %w", err)
		}
		if u != nil && u.Account != nil {
			secret, err := u.Open(s.opts.Key)
			if err != nil {
				return nil, err
			}
			if s.passwords.TrySecret(q.User, q.Address, q.Password, secret, now()) && q.allows(u, now()) {
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
	if err != nil || !right || !q.allows(u, now()) {
		return nil, err
	}
	s.rememberNetwork(ctx, u.ID, password.Network(q.Address), account.Networks)
	return u, nil
}

// accountID returns the ID of the service account that is named as NAME@ORG/PROJECT. It returns "" if there is none, or
// name has another form.
func (s *Service) accountID(ctx context.Context, name cloud.UserID) (id cloud.UserID, err error) {
	short, t, ok := principal.ParseAccountName(string(name))
	if !ok {
		return "", nil
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		u, err := principal.FindAccount(v, t, short)
		if u != nil {
			id = u.ID
		}
		return err
	})
	return id, err
}

// principalID returns the ID of the principal that a request names: by its ID or, for a service account, as
// NAME@ORG/PROJECT. It returns NotFound if there is no service account of this name within the tenant at.
func (s *Service) principalID(ctx context.Context, name string, at cloud.Tenant) (cloud.UserID, error) {
	_, t, ok := principal.ParseAccountName(name)
	if !ok {
		return cloud.UserID(name), nil
	}
	var id cloud.UserID
	if at.Contains(t) {
		var err error
		if id, err = s.accountID(ctx, cloud.UserID(name)); err != nil {
			return "", err
		}
	}
	if id == "" {
		return "", fault.New(fault.NotFound, "no service account %s", name)
	}
	return id, nil
}

// allows reports whether the principal u may get the requested token: u must be neither disabled nor expired, and of
// the requested kind.
func (q *tokenRequest) allows(u *principal.User, now cloud.Time) bool {
	kind := token.User
	if u.Account != nil {
		kind = token.ServiceAccount
	}
	return (!u.Disabled || mutant.On(mutant.AcceptDisabled)) && !u.Expired(now) && (q.Kind == "" || q.Kind == kind)
}

// exchange verifies an ID token of an external provider, and issues a token to the user that is linked with the
// identity in the ID token.
func (s *Service) exchange(ctx context.Context, provider, idToken, nonce string, q tokenRequest) (out issuedToken, err error) {
	defer func() {
		if f, ok := fault.From(err); ok {
			if f.Kind == fault.Unauthenticated {
				s.logins.failed.Add(1)
			}
			s.opts.Audit.Note(audit.Record{
				Method: service + "ExchangeToken", Target: "provider=" + provider, RequestID: q.RequestID, Address: password.Network(q.Address),
				Outcome: code.Code(f.Kind.RPC()).String(), Message: f.Message,
			})
		}
		if err != nil {
			s.unproven.Wait(ctx, password.Network(q.Address))
		}
	}()
	if err := s.skewed(); err != nil {
		return issuedToken{}, err
	}
	// The rate is limited because an ID token with an unknown key makes this member fetch the provider's keys again.
	if !s.exchanges.Allow() {
		return issuedToken{}, fault.New(fault.Unavailable, "too many logins by other providers at once; try again in a moment").MayRetry()
	}
	ttl, err := token.TTL(q.TTL)
	if err != nil {
		return issuedToken{}, err
	}
	scope, err := cloud.ParseTenant(q.Org, q.Project)
	if err != nil {
		return issuedToken{}, err
	}
	subject, err := s.providers.Subject(ctx, provider, idToken, nonce, s.now)
	if err != nil {
		return issuedToken{}, err
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
		return issuedToken{}, err
	}
	if u == nil || u.Disabled {
		return issuedToken{}, fault.New(fault.Unauthenticated, "nobody here is linked with your identity at %s: ask an administrator to", provider).
			WithReason("NOT_LINKED").With("provider", provider).With("subject", subject)
	}
	if !s.issues.allow(u.ID, s.now()) {
		return issuedToken{}, errTooManyTokens(u.ID)
	}
	q.User, q.Strict = u.ID, true
	if scope, err = s.scoped(ctx, q, scope, u); err != nil {
		return issuedToken{}, err
	}
	s.note(q, scope, "ExchangeToken", cloud.ProofOIDC, true)
	say := token.Claims{
		Claims: jwt.Claims{Subject: string(u.ID)}, Kind: token.User, Scope: token.ScopeOf(scope), Proof: cloud.ProofOIDC, Epoch: u.Epoch,
	}
	out, err = s.issue(ctx, say, ttl)
	out.scope = scope
	return out, err
}

// revokeToken revokes one token, given by its text or its ID. Any caller may revoke a token whose text the caller has,
// and the caller's own token by its ID. Only system:admin may revoke other tokens by ID.
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
			return nil // the token is already invalid
		}
		if err != nil {
			return err
		}
		return s.denyOwn(ctx, holder)
	}
	if err := cloud.CheckUUID("token_id", id); err != nil {
		return err
	}
	if id == caller.TokenID {
		return s.denyOwn(ctx, caller)
	}
	if !caller.IsCloudAdmin() {
		return fault.New(fault.PermissionDenied, "%s may revoke only tokens that they hold", caller.Name())
	}
	return s.deny(ctx, denial{Token: id, Until: s.opts.Store.Now() + longest.Milliseconds()})
}

// denyOwn revokes the token with which the caller c authenticated. It does nothing for an unauthenticated token, which
// grants no access. It does nothing for a token with ProofDev either: with the option --dev every caller may use any
// name, so the denials would count in maxDenials of somebody else.
func (s *Service) denyOwn(ctx context.Context, c *cloud.Caller) error {
	if !c.Authenticated() || c.Proof == cloud.ProofDev {
		return nil
	}
	return s.deny(ctx, denialOf(c))
}

// deny revokes a token, and logs a warning if that revoked all tokens of the principal.
func (s *Service) deny(ctx context.Context, d denial) error {
	out, err := denyCommand.Call(ctx, s.opts.Commands, d)
	if out.AllEnded {
		s.opts.Log.Warn("a principal revoked so many single tokens that all its tokens were ended", "principal", d.User, "limit", maxDenials)
	}
	if err == nil {
		s.revoked.Add(1)
	}
	return err
}

// Revocations returns how many calls have revoked one token, or all tokens of a principal, on this member since the
// member started. It does not count other changes that end tokens, such as that of a password.
func (s *Service) Revocations() int64 { return s.revoked.Load() }
