package identity

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// DefaultTTL and MaxTTL are lifetimes of tokens in seconds.
	DefaultTTL = 3600
	MaxTTL     = 30 * 24 * 3600
	// staleness is how old the records may be that a token is judged by.
	staleness = time.Second
	// leeway is how far the clocks of members may be apart.
	leeway = time.Minute
	// hostKeyID names the key that follows from the cluster key.
	hostKeyID = "host"
	audience  = "trivet"
)

// claims are what a token says: who, how proven, since when; never what they may.
type claims struct {
	jwt.Claims
	Kind    string          `json:"kind"`
	Org     cloud.OrgID     `json:"org,omitempty"`
	Project cloud.ProjectID `json:"project,omitempty"`
	Proof   cloud.Proof     `json:"proof"`
	// Epoch is the user's when a password proved the holder.
	Epoch uint64 `json:"epoch,omitempty"`
	// At is when it was made, in Unix milliseconds: "iat" is too coarse to order it with a change of password.
	At cloud.Time `json:"at"`
}

// checkTTL gives the lifetime for ttl_seconds; 0 is the default. Nothing is clamped.
func checkTTL(seconds uint64) (time.Duration, error) {
	switch {
	case seconds == 0:
		return DefaultTTL * time.Second, nil
	case seconds > MaxTTL:
		return 0, fault.Invalid("ttl_seconds", "at most %d (30 days), got %d", MaxTTL, seconds)
	}
	return time.Duration(seconds) * time.Second, nil
}

// sign makes a token of claims that name the issuer, the holder, how proven, and the scope; the rest is filled in.
func sign(key ed25519.PrivateKey, id string, say claims, now time.Time, ttl time.Duration) (string, error) {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	if err != nil {
		return "", fmt.Errorf("make signer: %w", err)
	}
	say.Audience, say.ID, say.Kind, say.At = jwt.Audience{audience}, uuid.NewString(), "user", now.UnixMilli()
	say.IssuedAt, say.Expiry = jwt.NewNumericDate(now), jwt.NewNumericDate(expiry(now, ttl))
	return jwt.Signed(signer).Claims(say).Serialize()
}

// expiry is when a token of now ends. Tokens know whole seconds.
func expiry(now time.Time, ttl time.Duration) time.Time { return now.Add(ttl).Truncate(time.Second) }

// HostToken makes a token of the administrator, for whoever holds the cluster key.
func HostToken(key *clusterkey.Key, scope cloud.Tenant, now time.Time, ttl time.Duration) (string, error) {
	say := claims{
		Claims: jwt.Claims{Issuer: key.Cluster(), Subject: string(Admin)}, Org: scope.Org, Project: scope.Project, Proof: cloud.ProofHostKey,
	}
	return sign(ed25519.NewKeyFromSeed(key.Derive("host-token")), hostKeyID, say, now, ttl)
}

// issue signs claims with the cluster's key.
func (s *Service) issue(ctx context.Context, say claims, ttl time.Duration) (issued, error) {
	k, err := s.signer(ctx)
	if err != nil {
		return issued{}, err
	}
	now := time.UnixMilli(s.opts.Store.Now())
	say.Issuer = s.opts.Key.Cluster()
	token, err := sign(k.private, k.record.ID, say, now, ttl)
	return issued{token, expiry(now, ttl)}, err
}

func errNotValid() error { return fault.New(fault.Unauthenticated, "the token is not valid") }

// Verify says who holds a token: Unauthenticated for one that is forged, expired or cut off. The roles are those of now.
func (s *Service) Verify(ctx context.Context, token string) (*cloud.Caller, error) {
	c, err := s.read(ctx, token)
	if err != nil {
		return nil, err
	}
	caller := &cloud.Caller{User: cloud.UserID(c.Subject), Proof: c.Proof, Scope: cloud.Tenant{Org: c.Org, Project: c.Project}}
	if c.Proof == cloud.ProofNone {
		if s.opts.Dev {
			caller.Proof = cloud.ProofDev
			caller.Bindings = []cloud.Binding{{Role: cloud.ProjectAdmin, Org: DefaultTenant.Org, Project: DefaultTenant.Project}}
		}
		return caller, nil
	}
	var user *User
	look := func(v *store.View) (err error) {
		user, caller.Scope, err = c.look(v)
		return err
	}
	err = s.opts.Store.Recent(ctx, staleness, look)
	if err == nil && (user == nil || user.Epoch < c.Epoch || len(user.Bindings) == 0 || caller.Scope.Project != "" && caller.Scope.Org == "") {
		// This member may be behind the one that made the token, or bound the role.
		err = s.opts.Store.View(ctx, look)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the holder of a token: %w", err)
	case user == nil, c.Proof == cloud.ProofHostKey && c.At < user.Since, c.Proof != cloud.ProofHostKey && c.Epoch != user.Epoch:
		return nil, fault.New(fault.Unauthenticated, "the token is no longer valid: ask for a new one")
	}
	caller.Bindings = user.Bindings
	return caller, nil
}

// look reads the holder and the scope: a project that is not in the org that the token names comes without an org, and
// auth refuses that. A project alone names its org.
func (c *claims) look(v *store.View) (user *User, scope cloud.Tenant, err error) {
	if user, err = users.Get(v, c.Subject); err != nil {
		return nil, scope, err
	}
	if c.Project == "" {
		return user, cloud.Tenant{Org: c.Org}, nil
	}
	p, err := projects.Get(v, string(c.Project))
	scope.Project = c.Project
	if p != nil && (c.Org == "" || c.Org == p.Org) {
		scope.Org = p.Org
	}
	return user, scope, err
}

// read checks a token's form, signature and dates.
func (s *Service) read(ctx context.Context, token string) (*claims, error) {
	if len(token) > 8<<10 {
		return nil, errNotValid()
	}
	parsed, err := jwt.ParseSigned(token, []jose.SignatureAlgorithm{jose.EdDSA})
	if err != nil || len(parsed.Headers) != 1 {
		return nil, errNotValid()
	}
	var public ed25519.PublicKey
	if id := parsed.Headers[0].KeyID; id == hostKeyID {
		public = s.hostKey.Public().(ed25519.PublicKey)
	} else if k, err := s.key(ctx, id); err != nil {
		return nil, err
	} else if k != nil {
		public = k.record.Public
	}
	if public == nil {
		return nil, errNotValid()
	}
	var c claims
	if err := parsed.Claims(public, &c); err != nil {
		return nil, errNotValid()
	}
	now := time.UnixMilli(s.opts.Store.Now())
	if c.Expiry == nil || c.Subject == "" || c.Kind != "user" || c.Proof == cloud.ProofHostKey && parsed.Headers[0].KeyID != hostKeyID {
		return nil, errNotValid()
	}
	// The leeway is for when a token begins. It ends when it says (RFC 7519 part 4.1.4).
	if !now.Before(c.Expiry.Time()) {
		return nil, fault.New(fault.Unauthenticated, "the token has expired: ask for a new one")
	}
	if c.ValidateWithLeeway(jwt.Expected{Issuer: s.opts.Key.Cluster(), AnyAudience: jwt.Audience{audience}, Time: now}, leeway) != nil {
		return nil, errNotValid()
	}
	return &c, nil
}
