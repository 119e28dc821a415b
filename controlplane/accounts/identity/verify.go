package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/elastic/go-freelru"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// hostKeyID is the ID of the host key, which is derived from the cluster key.
	hostKeyID = "host"
	// unprovenKeyID is the ID of the key that signs unauthenticated tokens. That key is derived from the cluster key
	// too. It is not published, so programs that use the published keys refuse these tokens.
	unprovenKeyID = "unproven"
	// verifyTime is the timeout of the verification of a token. The verification may have to wait for responses of
	// other members.
	verifyTime = 3 * time.Second
	// justIssued is an age of a token in milliseconds. If the holder of a younger token has no roles in this member's
	// records, the records may be outdated, so the token is checked again with the newest records.
	justIssued = 10_000
	// unknownKeys is the maximum rate, per second, of reads of the newest records that tokens with an unknown key ID
	// cause.
	unknownKeys = 10
	// MaxSkew is the maximum difference between this member's clock and the other members' clocks. If the difference is
	// larger, this member neither issues nor accepts tokens.
	MaxSkew = 5 * time.Minute
)

// skewed returns Unavailable if this member's clock is known to differ by more than MaxSkew from the other members'
// clocks.
func (s *Service) skewed() error {
	if s.opts.Skew == nil {
		return nil
	}
	ahead, known := s.opts.Skew()
	if !known || ahead.Abs() <= MaxSkew || mutant.On(mutant.IgnoreSkew) {
		return nil
	}
	where := "ahead of"
	if ahead < 0 {
		where = "behind"
	}
	return fault.New(fault.Unavailable, "this member's clock is %s %s the others': it must be set before this member can issue or verify tokens",
		ahead.Abs().Round(time.Second), where).WithReason("CLOCK_SKEW")
}

// Verify returns the holder of a token, with the holder's current roles. It returns Unauthenticated for a token that is
// forged, expired or revoked, and Unavailable if this member cannot read current records or its clock is wrong by more
// than MaxSkew.
func (s *Service) Verify(ctx context.Context, text string) (*cloud.Caller, error) {
	if err := s.skewed(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	caller, err := s.verify(ctx, text)
	if err != nil && ctx.Err() != nil {
		return nil, fault.New(fault.Unavailable, "the token cannot be verified: this member does not reach the others").MayRetry().Because(err)
	}
	return caller, err
}

func (s *Service) verify(ctx context.Context, text string) (*cloud.Caller, error) {
	j, err := s.newCheck(text)
	if err != nil {
		return nil, err
	}
	caller := &cloud.Caller{}
	look := func(v *store.View) error { return j.look(v, s, caller) }
	err = s.opts.Store.Recent(ctx, staleness, look)
	if err == nil && j.behind(s, caller) {
		// This member's records may lag behind those of the member that issued the token, rotated the keys or gave the
		// role, so read again with the newest records.
		err = s.viewAfterMiss(ctx, look)
	}
	if err != nil {
		if _, ok := fault.From(err); ok {
			return nil, err
		}
		return nil, fmt.Errorf("verify a token: %w", err)
	}
	if err := j.verdict(s, caller, s.now()); err != nil {
		return nil, err
	}
	return caller, nil
}

// tokenCheck is the state of the verification of one token: the token, and the records read so far.
type tokenCheck struct {
	sum    [32]byte
	parsed *token.Parsed
	kid    string
	// claims is nil until the signature is verified.
	claims *token.Claims
	key    *keyring.Key
	user   *principal.User
	denied bool
}

// newCheck starts the verification of a token. If the signature of the same text was verified before, newCheck gets the
// claims from the cache. Otherwise it parses the text.
func (s *Service) newCheck(text string) (*tokenCheck, error) {
	j := &tokenCheck{sum: sha256.Sum256([]byte(text))}
	if known, ok := s.checked.Get(j.sum); ok {
		j.kid, j.claims = known.kid, known.claims
		return j, nil
	}
	parsed, err := token.Parse(text)
	if err != nil {
		return nil, err
	}
	j.parsed, j.kid = parsed, parsed.KeyID
	return j, nil
}

// look reads the records that decide whether the token is valid: the key, the holder, the scope, and whether the token
// is revoked. It reads all of them at one revision, and stores them in j and caller. A field whose record does not
// exist stays unset.
func (j *tokenCheck) look(v *store.View, s *Service, caller *cloud.Caller) error {
	if j.claims == nil {
		known, err := j.checkSignature(v, s)
		if err != nil || !known {
			return err
		}
	}
	found, err := s.holders.Get(v, j.sum, func(v *store.View) (*holder, error) { return readHolder(v, s, j.kid, j.claims) })
	if err != nil {
		return err
	}
	j.key, j.user, j.denied, *caller = found.key, found.user, found.denied, found.caller
	return nil
}

// publicKey returns the public key with the ID kid, or nil if there is none. The second result is the key's entry in
// the keyring. It is nil for the two keys derived from the cluster key, which are not in the keyring.
func publicKey(v *store.View, s *Service, kid string) (ed25519.PublicKey, *keyring.Key, error) {
	switch kid {
	case hostKeyID:
		return s.hostKey.Public().(ed25519.PublicKey), nil, nil
	case unprovenKeyID:
		return s.unprovenKey.Public().(ed25519.PublicKey), nil, nil
	}
	ring, err := keyring.Load(v)
	if err != nil || ring == nil {
		return nil, nil, err
	}
	key := ring.Find(kid)
	if key == nil {
		return nil, nil, nil
	}
	return key.Public, key, nil
}

// checkSignature verifies the signature of the token and sets j.claims. If this member's records contain no key with
// the token's key ID, it returns false and a nil error.
func (j *tokenCheck) checkSignature(v *store.View, s *Service) (known bool, err error) {
	public, key, err := publicKey(v, s, j.kid)
	if err != nil || public == nil {
		return false, err
	}
	s.signatures.Add(1)
	claims, err := j.parsed.Verify(public, s.opts.Key.Cluster())
	if err != nil {
		return true, err
	}
	// The host key signs only tokens with ProofHostKey, and unprovenKey signs only tokens with ProofNone. No other key
	// signs tokens with these proofs.
	if (claims.Proof == cloud.ProofHostKey) != (j.kid == hostKeyID) || (claims.Proof == cloud.ProofNone) != (j.kid == unprovenKeyID) {
		return true, token.NotValid()
	}
	j.key, j.claims = key, claims
	s.checked.Add(j.sum, signed{j.kid, claims})
	return true, nil
}

// SignaturesVerified returns the number of token signatures that this member has verified since it started.
func (s *Service) SignaturesVerified() int64 { return s.signatures.Load() }

// holder contains the records about the holder of a token. Concurrent calls use the same cached holder, so do not
// modify it.
type holder struct {
	key    *keyring.Key
	user   *principal.User
	denied bool
	caller cloud.Caller
}

// readHolder reads the records about the holder of a token that contains the claims c and was signed by the key kid. If
// that key does not exist, it returns an empty holder.
func readHolder(v *store.View, s *Service, kid string, c *token.Claims) (*holder, error) {
	public, key, err := publicKey(v, s, kid)
	if err != nil || public == nil {
		return &holder{}, err
	}
	h := &holder{key: key, caller: cloud.Caller{User: cloud.UserID(c.Subject), Proof: c.Proof, TokenID: c.ID, Expires: c.Expiry.Time().UnixMilli()}}
	h.caller.Scope, _ = c.Tenant()
	if c.Proof == cloud.ProofNone {
		return h, nil
	}
	if h.user, err = principal.Users.Get(v, c.Subject); err != nil {
		return nil, err
	}
	if h.user != nil {
		bindings, err := h.user.Roles(v)
		if err != nil {
			return nil, err
		}
		h.caller.Bindings, h.caller.Defaults = slices.Clip(bindings), h.user.Defaults
	}
	if h.denied, err = denials.Has(v, c.ID); err != nil || h.caller.Scope.Project == "" {
		return h, err
	}
	h.caller.Scope, err = located(v, h.caller.Scope, h.caller.Bindings, func(p *tenant.Project) bool { return s.actsIn(c, p) })
	return h, err
}

// located returns the scope of a token with Org set to the org of the scope's project. The parameter t is the scope
// that the token names. The result has no Org in these cases, so that package auth refuses the token without revealing
// whether the project exists:
//   - the project does not exist, or is in another org than t names
//   - the holder has no role in the project
//   - actsIn returns false for the project
func located(r store.Reader, t cloud.Tenant, roles []cloud.Binding, actsIn func(*tenant.Project) bool) (cloud.Tenant, error) {
	if t.Project == "" {
		return t, nil
	}
	p, err := tenant.Find(r, t.Project)
	if err != nil {
		return t, err
	}
	holder := cloud.Caller{Proof: cloud.ProofPassword, Bindings: roles}
	if p != nil && actsIn(p) && (t.Org == "" || t.Org == p.Org) && holder.HasRoleIn(cloud.Tenant{Org: p.Org, Project: t.Project}) {
		return cloud.Tenant{Org: p.Org, Project: t.Project}, nil
	}
	return cloud.Tenant{Project: t.Project}, nil
}

// OrgOf implements auth.Projects: it returns the org of a project, or "" if the project does not exist.
func (s *Service) OrgOf(ctx context.Context, id cloud.ProjectID) (org cloud.OrgID, err error) {
	ctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	look := func(v *store.View) (err error) {
		org, err = tenant.OrgOf(v, id)
		return err
	}
	// If this member's records do not contain the project, they may be outdated. So read again with the newest records.
	if err = s.opts.Store.Recent(ctx, staleness, look); err == nil && org == "" {
		err = s.viewAfterMiss(ctx, look)
	}
	return org, err
}

// alive returns the bindings (roles of a principal) whose org and project exist. It omits a binding to a deleted
// project, even if a new project has the same ID.
func alive(v store.Reader, all []cloud.Binding) (bindings []cloud.Binding, err error) {
	for _, b := range all {
		if b.Org != "" {
			if o, err := tenant.FindOrg(v, b.Org); err != nil {
				return nil, err
			} else if o == nil {
				continue
			}
		}
		if b.Project != "" {
			if p, err := tenant.Find(v, b.Project); err != nil {
				return nil, err
			} else if p == nil || p.Incarnation != b.Incarnation {
				continue
			}
		}
		bindings = append(bindings, b)
	}
	return bindings, nil
}

// keyKnown reports whether the key that the token names exists: a key of the keyring, or one of the two keys derived
// from the cluster key.
func (j *tokenCheck) keyKnown() bool {
	return j.key != nil || j.kid == hostKeyID || j.kid == unprovenKeyID
}

// behind reports whether this member's records may be outdated, so that the newest records might make the token valid
// or give it more access.
func (j *tokenCheck) behind(s *Service, caller *cloud.Caller) bool {
	if !j.keyKnown() {
		return keyring.Possible(j.kid) && s.unknown.Allow()
	}
	if j.claims.Proof == cloud.ProofNone {
		return false
	}
	fresh := s.opts.Store.Now()-j.claims.At < justIssued
	return j.user == nil || j.user.Epoch < j.claims.Epoch || fresh && len(caller.Bindings) == 0 || caller.Scope.Project != "" && caller.Scope.Org == ""
}

// verdict returns nil if the token is valid at the time now, according to the records that look has read. Otherwise it
// returns an error.
func (j *tokenCheck) verdict(s *Service, caller *cloud.Caller, now time.Time) error {
	if !j.keyKnown() {
		return token.NotValid()
	}
	c := j.claims
	if err := c.Current(now); err != nil {
		return err
	}
	if c.Proof == cloud.ProofNone {
		if s.opts.Dev {
			caller.Proof = cloud.ProofDev
			caller.Bindings = []cloud.Binding{
				{Role: cloud.ProjectAdmin, Org: tenant.Default.Org, Project: tenant.Default.Project}, {Role: cloud.BillingAdmin},
			}
		}
		return nil
	}
	u := j.user
	switch {
	case u == nil && c.Proof == cloud.ProofHostKey:
		return errSettingUp() // the administrator is never deleted, so it has not been created yet
	case u == nil, j.denied && !mutant.On(mutant.IgnoreRevocation), u.Disabled, u.Expired(now.UnixMilli()), (c.Kind == token.ServiceAccount) != (u.Account != nil),
		c.Proof == cloud.ProofHostKey && c.At < u.Since, c.Proof != cloud.ProofHostKey && c.Epoch != u.Epoch && !mutant.On(mutant.IgnoreEpoch):
		return token.Ended()
	}
	return nil
}

// signed is a cached token whose signature this member has verified. The expiry, the holder and the revocation of the
// token are checked again in each call.
type signed struct {
	kid    string
	claims *token.Claims
}

// maxChecked is the maximum number of entries in the cache of verified tokens, and in the cache of their holders.
const maxChecked = 8192

// newChecked returns a cache of tokens with verified signatures. The key is the SHA-256 of the token's text.
func newChecked() *freelru.SyncedLRU[[32]byte, signed] {
	// NewSynced fails only for a capacity of 0.
	c, err := freelru.NewSynced[[32]byte, signed](maxChecked, func(sum [32]byte) uint32 { return binary.LittleEndian.Uint32(sum[:]) })
	if err != nil {
		panic(err)
	}
	return c
}
