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

func sign(key ed25519.PrivateKey, id, issuer string, user cloud.UserID, scope cloud.Tenant, proof cloud.Proof, now time.Time, ttl time.Duration) (string, error) {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	if err != nil {
		return "", fmt.Errorf("make signer: %w", err)
	}
	return jwt.Signed(signer).Claims(claims{
		Claims: jwt.Claims{
			Issuer: issuer, Subject: string(user), Audience: jwt.Audience{audience}, ID: uuid.NewString(),
			IssuedAt: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(ttl)),
		},
		Kind: "user", Org: scope.Org, Project: scope.Project, Proof: proof, At: now.UnixMilli(),
	}).Serialize()
}

// HostToken makes a token of the administrator, for whoever holds the cluster key.
func HostToken(key *clusterkey.Key, scope cloud.Tenant, now time.Time, ttl time.Duration) (string, error) {
	return sign(ed25519.NewKeyFromSeed(key.Derive("host-token")), hostKeyID, key.Cluster(), Admin, scope, cloud.ProofHostKey, now, ttl)
}

// issue makes a token for a user.
func (s *Service) issue(ctx context.Context, user cloud.UserID, scope cloud.Tenant, proof cloud.Proof, ttl time.Duration) (string, time.Time, error) {
	k, err := s.signer(ctx)
	if err != nil {
		return "", time.Time{}, err
	}
	// The token is not older than the credential it was proven by, whatever the clocks say.
	now := time.UnixMilli(s.opts.Store.Now())
	token, err := sign(k.private, k.record.ID, s.opts.Key.Cluster(), user, scope, proof, now, ttl)
	return token, now.Add(ttl), err
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
	user, err := s.user(ctx, caller.User)
	if err != nil {
		return nil, err
	}
	if user == nil || c.At < user.Since {
		return nil, fault.New(fault.Unauthenticated, "the token is no longer valid: ask for a new one")
	}
	caller.Bindings = user.Bindings
	return caller, nil
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
	err = c.ValidateWithLeeway(jwt.Expected{Issuer: s.opts.Key.Cluster(), AnyAudience: jwt.Audience{audience}, Time: now}, leeway)
	switch {
	case err != nil, c.Expiry == nil, c.Subject == "", c.Kind != "user":
		return nil, errNotValid()
	case now.After(c.Expiry.Time()):
		return nil, fault.New(fault.Unauthenticated, "the token has expired: ask for a new one")
	case c.Proof == cloud.ProofHostKey && parsed.Headers[0].KeyID != hostKeyID:
		return nil, errNotValid()
	}
	return &c, nil
}
