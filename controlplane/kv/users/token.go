package users

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Time is the type of the current time, which callers pass because the package reads no clock.
type Time = time.Time

// DefaultTokenTTL is the lifetime of a token, as in etcd.
const DefaultTokenTTL = 5 * time.Minute

// tokenPrefix distinguishes the tokens of etcd's Auth from Trivet's own tokens, which clients may send in the same
// header.
const tokenPrefix = "kv1."

const maxTokenBytes = len(tokenPrefix) + 2*(MaxNameBytes+2*binary.MaxVarintLen64+sha256.Size)

// Tokens issues and verifies tokens of etcd's Auth. It is safe for concurrent use. Every member with the same key
// accepts the tokens.
type Tokens struct {
	key []byte
	ttl time.Duration
}

// NewTokens returns a Tokens with a key of 32 secret bytes that has no other use. A ttl of 0 means DefaultTokenTTL.
func NewTokens(key []byte, ttl time.Duration) *Tokens {
	if ttl <= 0 {
		ttl = DefaultTokenTTL
	}
	return &Tokens{key: key, ttl: ttl}
}

// Claim holds the content of a token that Open has verified. The token had not expired when it was verified.
type Claim struct {
	User     string
	Revision uint64 // the auth revision at which the password was checked
}

// Issue returns a token for a user whose password was checked at the given auth revision. The token expires one TTL
// after now.
func (t *Tokens) Issue(user string, revision uint64, now Time) string {
	b := binary.AppendUvarint(nil, revision)
	b = binary.AppendUvarint(b, uint64(now.Add(t.ttl).UnixMilli()))
	b = append(b, user...)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, t.mac(b)...))
}

func (t *Tokens) mac(b []byte) []byte {
	h := hmac.New(sha256.New, t.key)
	h.Write(b)
	return h.Sum(nil)
}

// IsToken reports whether text has the prefix of tokens of etcd's Auth. It does not verify the token.
func IsToken(text string) bool { return strings.HasPrefix(text, tokenPrefix) }

// Open verifies a token and returns its content. It returns ErrGRPCInvalidAuthToken for every defect, also for an
// expired token.
func (t *Tokens) Open(token string, now Time) (Claim, error) {
	encoded, hasPrefix := strings.CutPrefix(token, tokenPrefix)
	// The base64 decoder ignores line breaks, so they are rejected here.
	if !hasPrefix || len(token) > maxTokenBytes || strings.ContainsAny(token, "\r\n") {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if err != nil || len(b) < sha256.Size {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	b, mac := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if !hmac.Equal(mac, t.mac(b)) {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	revision, b, err := readUvarint(b)
	if err != nil {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	expiry, b, err := readUvarint(b)
	if err != nil || now.UnixMilli() >= int64(expiry) {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	return Claim{User: string(b), Revision: revision}, nil
}

// Behind reports whether the claim has a later auth revision than the state s. Accept refuses such a claim. The caller
// should then load the newest state (after a ReadIndex) and try again.
func (s *State) Behind(c Claim) bool { return c.Revision > s.revision }

// Accept returns the user of a claim. While auth is not enabled, it returns "" for every claim. It returns
// ErrGRPCInvalidAuthToken if, after the token was issued, the user was deleted or got another password, or auth was
// disabled. It also returns that error if the claim has a later auth revision than s: after a restore from a backup,
// that revision may belong to another history.
func (s *State) Accept(c Claim) (user string, err error) {
	if !s.enabled {
		return "", nil
	}
	u := s.users[c.User]
	if u == nil || (c.Revision < u.tokensSince || c.Revision < s.disabledAt) && !mutant.On(mutant.KeepOldTokens) || s.Behind(c) {
		return "", rpctypes.ErrGRPCInvalidAuthToken
	}
	return c.User, nil
}
