package users

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// Time is a moment that the caller read from its clock.
type Time = time.Time

// DefaultTokenLife is etcd's.
const DefaultTokenLife = 5 * time.Minute

// tokenPrefix tells our tokens from the cloud's, which may come in the same header.
const tokenPrefix = "kv1."

const maxToken = len(tokenPrefix) + 2*(MaxNameBytes+2*binary.MaxVarintLen64+sha256.Size)

// Tokens issues and opens tokens. It may be used from several goroutines, and on every member that has the key.
type Tokens struct {
	key  []byte
	life time.Duration
}

// NewTokens makes tokens under key, 32 secret bytes that serve nothing else. A life of 0 is DefaultTokenLife.
func NewTokens(key []byte, life time.Duration) *Tokens {
	if life <= 0 {
		life = DefaultTokenLife
	}
	return &Tokens{key: key, life: life}
}

// Claim is what a token says; that it was issued, and had not expired when it was opened, is proved.
type Claim struct {
	User     string
	Revision uint64 // the auth revision when the password was checked
}

// Issue makes the token of a user who has proved to be that at an auth revision.
func (t *Tokens) Issue(user string, revision uint64, now Time) string {
	b := binary.AppendUvarint(nil, revision)
	b = binary.AppendUvarint(b, uint64(now.Add(t.life).UnixMilli()))
	b = append(b, user...)
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, t.mac(b)...))
}

func (t *Tokens) mac(b []byte) []byte {
	h := hmac.New(sha256.New, t.key)
	h.Write(b)
	return h.Sum(nil)
}

// IsToken says whether text looks like one of ours.
func IsToken(text string) bool { return strings.HasPrefix(text, tokenPrefix) }

// Open proves a token; all that is wrong with one is ErrGRPCInvalidAuthToken.
func (t *Tokens) Open(token string, now Time) (Claim, error) {
	encoded, ours := strings.CutPrefix(token, tokenPrefix)
	// The decoder would skip line ends.
	if !ours || len(token) > maxToken || strings.ContainsAny(token, "\r\n") {
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
	revision, b, err := number(b)
	if err != nil {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	expiry, b, err := number(b)
	if err != nil || now.UnixMilli() >= int64(expiry) {
		return Claim{}, rpctypes.ErrGRPCInvalidAuthToken
	}
	return Claim{User: string(b), Revision: revision}, nil
}

// Behind says whether the claim is of a later state than s, for which Accept would refuse it: whoever can should first
// get the newest state (after a read index).
func (s *State) Behind(c Claim) bool { return c.Revision > s.revision }

// Accept answers who the claim's user is in s: ErrGRPCInvalidAuthToken when the user is gone or has another password
// since, when auth was disabled, and when s is behind (its history is another: a backup was restored). While auth is not
// enabled everybody is "".
func (s *State) Accept(c Claim) (user string, err error) {
	if !s.enabled {
		return "", nil
	}
	u := s.users[c.User]
	if u == nil || c.Revision < u.since || c.Revision < s.voided || s.Behind(c) {
		return "", rpctypes.ErrGRPCInvalidAuthToken
	}
	return c.User, nil
}
