// Package token defines the format of Trivet's tokens: JWTs (RFC 7519) signed with Ed25519. A token names its holder
// and how the holder was authenticated, but no roles.
//
// The functions get keys and the time as arguments. The package does not depend on users or the store. Decisions:
//   - The claim "iss" is the URL at which other programs find the keys by OpenID discovery. A token is bound to this
//     cluster by its key and the claim "cluster", because members of one cluster may be reached at several URLs.
//   - The claim "aud" is the constant Audience, the client ID that other programs expect. The claim "sub" is the
//     principal's ID.
//   - A token with proof "none" is unauthenticated: every caller can get one for any name (part 4.6 of the wire
//     contract). Its "aud" is UnprovenAudience and its "sub" has a prefix that no principal's ID can have, so that
//     programs that check either claim refuse it. Package identity signs these tokens with a key that is not published.
//   - A token is accepted up to Leeway before the start of its validity, because members' clocks differ. The expiry has
//     no leeway (RFC 7519 part 4.1.4).
package token

import (
	"crypto/ed25519"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// DefaultTTL is the lifetime of a token, in seconds, if the request names none. MaxTTL is the maximum lifetime, in
	// seconds.
	DefaultTTL = 3600
	MaxTTL     = 30 * 24 * 3600
	// Leeway is how far in the future the start of a token's validity may be, because the members' clocks differ.
	Leeway   = time.Minute
	Audience = "trivet"
	// UnprovenAudience is the only audience of an unauthenticated token.
	UnprovenAudience = "trivet:unproven"
	// unprovenSubject is the prefix of the subject of an unauthenticated token. No principal's ID contains a colon.
	unprovenSubject = "unproven:"
	// maxText is the maximum length of a token, in bytes.
	maxText = 8 << 10
)

// Kinds of principals, the values of the claim "kind":
const (
	User           = "user"
	ServiceAccount = "service_account"
)

// Claims are the claims of a token. Subject is the principal's ID. For an unauthenticated token, Sign adds a prefix to
// Subject and Verify removes it.
type Claims struct {
	jwt.Claims
	// Cluster is the ID of the cluster that issued the token.
	Cluster string `json:"cluster"`
	Kind    string `json:"kind"`
	// Scope is system, org:<org>, or project:<org>/<project>; the org may be empty.
	Scope string `json:"scope"`
	// Incarnation identifies the incarnation that the project of Scope had when the token was issued. If the project is
	// deleted and created again, the token is not valid for the new project. Package identity computes and checks
	// Incarnation. It is empty in tokens of versions without incarnations.
	Incarnation string `json:"incarnation,omitempty"`

	Proof cloud.Proof `json:"proof"`
	// Epoch is principal.User.Epoch at the time of issue. That number is incremented when all tokens of the principal
	// are invalidated, so a token with another epoch than the principal is refused.
	Epoch uint64 `json:"epoch,omitempty"`
	// At is when the token was issued, in Unix milliseconds. The seconds of the claim "iat" do not suffice to decide
	// whether the token was issued before or after a password change.
	At cloud.Time `json:"at"`
}

// TTL returns the lifetime of a token for the field ttl_seconds of a request; 0 means DefaultTTL. It returns
// InvalidArgument for a value above MaxTTL.
func TTL(seconds uint64) (time.Duration, error) {
	switch {
	case seconds == 0:
		return DefaultTTL * time.Second, nil
	case seconds > MaxTTL:
		return 0, fault.Invalid("ttl_seconds", "at most %d (30 days), got %d", MaxTTL, seconds)
	}
	return time.Duration(seconds) * time.Second, nil
}

// ScopeOf returns the "scope" claim for a tenant.
func ScopeOf(t cloud.Tenant) string {
	switch {
	case t.Project != "":
		return "project:" + string(t.Org) + "/" + string(t.Project)
	case t.Org != "":
		return "org:" + string(t.Org)
	}
	return "system"
}

// Tenant returns the tenant of the "scope" claim; ok is false if the claim is malformed.
func (c *Claims) Tenant() (t cloud.Tenant, ok bool) {
	if c.Scope == "system" {
		return t, true
	}
	if org, is := strings.CutPrefix(c.Scope, "org:"); is {
		return cloud.Tenant{Org: cloud.OrgID(org)}, org != ""
	}
	path, is := strings.CutPrefix(c.Scope, "project:")
	org, project, two := strings.Cut(path, "/")
	return cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)}, is && two && project != ""
}

// Ends returns the expiry of a token that is issued at the time now, in whole seconds.
func Ends(now time.Time, ttl time.Duration) time.Time { return now.Add(ttl).Truncate(time.Second) }

// Sign returns a token signed with key, whose ID is id. The caller sets the issuer, the cluster, the holder, the proof
// and the scope in the parameter say. Sign sets the other claims. It generates a token ID if the caller has not set
// one.
func Sign(key ed25519.PrivateKey, id string, say Claims, now time.Time, ttl time.Duration) (string, error) {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	if err != nil {
		return "", fmt.Errorf("make signer: %w", err)
	}
	if say.ID == "" {
		say.ID = uuid.NewString()
	}
	say.Audience, say.At = jwt.Audience{Audience}, now.UnixMilli()
	if say.Proof == cloud.ProofNone {
		say.Audience, say.Subject = jwt.Audience{UnprovenAudience}, unprovenSubject+say.Subject
	}
	say.IssuedAt, say.Expiry = jwt.NewNumericDate(now), jwt.NewNumericDate(Ends(now, ttl))
	return jwt.Signed(signer).Claims(say).Serialize()
}

// NotValid returns the error for a token that this cluster did not issue.
func NotValid() *fault.Fault { return fault.New(fault.Unauthenticated, "the token is not valid") }

// Ended returns the error for a token that this cluster issued but that is no longer valid.
func Ended() *fault.Fault {
	return fault.New(fault.Unauthenticated, "the token is no longer valid: ask for a new one")
}

// Parsed is a token whose signature has not been checked.
type Parsed struct {
	// KeyID is the ID of the signing key that the token names.
	KeyID string
	jwt   *jwt.JSONWebToken
}

// Parse parses a token without verifying the signature.
func Parse(text string) (*Parsed, error) {
	if len(text) > maxText {
		return nil, NotValid()
	}
	algorithms := []jose.SignatureAlgorithm{jose.EdDSA}
	if mutant.On(mutant.AcceptHMAC) {
		algorithms = append(algorithms, jose.HS256)
	}
	parsed, err := jwt.ParseSigned(text, algorithms)
	if err != nil || len(parsed.Headers) != 1 {
		return nil, NotValid()
	}
	return &Parsed{KeyID: parsed.Headers[0].KeyID, jwt: parsed}, nil
}

// Verify checks the signature and all claims that do not depend on the time, and returns the claims. It returns the
// error of NotValid if a check fails.
func (p *Parsed) Verify(key ed25519.PublicKey, cluster string) (*Claims, error) {
	c := &Claims{}
	if err := p.claims(key, c); err != nil {
		return nil, NotValid()
	}
	if c.Expiry == nil || c.IssuedAt == nil || c.ID == "" || c.Issuer == "" || c.Cluster != cluster ||
		!c.forUs() && !mutant.On(mutant.AnyAudience) || c.Kind != User && c.Kind != ServiceAccount {
		return nil, NotValid()
	}
	subject, unproven := strings.CutPrefix(c.Subject, unprovenSubject)
	if subject == "" || unproven != (c.Proof == cloud.ProofNone) {
		return nil, NotValid()
	}
	c.Subject = subject
	if _, ok := c.Tenant(); !ok {
		return nil, NotValid()
	}
	return c, nil
}

// claims decodes the token's claims into c. It returns an error if the signature was not made with key.
func (p *Parsed) claims(key ed25519.PublicKey, c *Claims) error {
	switch {
	case mutant.On(mutant.AcceptAnyKey):
		return p.jwt.UnsafeClaimsWithoutVerification(c)
	case mutant.On(mutant.AcceptHMAC) && p.jwt.Headers[0].Algorithm == string(jose.HS256):
		return p.jwt.Claims([]byte(key), c)
	}
	return p.jwt.Claims(key, c)
}

// forUs reports whether the audience of the token is the right one for its proof: UnprovenAudience for the proof
// "none", Audience for every other proof.
func (c *Claims) forUs() bool {
	if c.Proof == cloud.ProofNone {
		return slices.Equal(c.Audience, jwt.Audience{UnprovenAudience})
	}
	return slices.Contains(c.Audience, Audience)
}

// Current returns Unauthenticated if the token is not yet valid or has expired at the time now.
func (c *Claims) Current(now time.Time) error {
	begins := c.IssuedAt.Time()
	if c.NotBefore != nil && c.NotBefore.Time().After(begins) {
		begins = c.NotBefore.Time()
	}
	if ahead := begins.Sub(now); ahead > Leeway {
		return fault.New(fault.Unauthenticated,
			"the token is not valid yet: it begins %s after this member's time, so the clock of this member or of the one that made it is wrong",
			ahead.Round(time.Second)).WithReason("CLOCK_SKEW")
	}
	if end := c.Expiry.Time(); !now.Before(end) && !mutant.On(mutant.AcceptExpired) {
		return fault.New(fault.Unauthenticated, "the token has expired: ask for a new one").WithReason("TOKEN_EXPIRED")
	}
	return nil
}
