package metadata

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Headers of IMDSv2, and the maximum lifetime of a token. The names and the limit are those of EC2.
const (
	tokenHeader    = "X-Aws-Ec2-Metadata-Token"
	tokenTTLHeader = "X-Aws-Ec2-Metadata-Token-Ttl-Seconds"
	tokenPath      = "/latest/api/token"
	maxTokenTTL    = 6 * time.Hour
)

// expiryLength is the length in bytes of the expiry time at the beginning of a token. The HMAC follows it.
const expiryLength = 8

// issueToken returns a token that the port of c may use until the time expiry. A token consists of characters that are
// permitted in HTTP headers.
func issueToken(key []byte, c caller, expiry time.Time) string {
	token := binary.BigEndian.AppendUint64(nil, uint64(expiry.UnixMilli()))
	return base64.RawURLEncoding.EncodeToString(append(token, tokenMAC(key, c, token)...))
}

// verifyToken reports whether the token was issued with the key for the port of c and has not expired.
func verifyToken(key []byte, c caller, token string, now time.Time) bool {
	const length = expiryLength + sha256.Size
	if len(token) != base64.RawURLEncoding.EncodedLen(length) {
		return false
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || len(raw) != length { // the decoder skips line ends
		return false
	}
	expiry, mac := raw[:expiryLength], raw[expiryLength:]
	return hmac.Equal(mac, tokenMAC(key, c, expiry)) && now.UnixMilli() < int64(binary.BigEndian.Uint64(expiry))
}

// tokenMAC authenticates an expiry time and a port. The lengths of the IDs make the encoding unambiguous.
func tokenMAC(key []byte, c caller, expiry []byte) []byte {
	mac := hmac.New(sha256.New, key)
	if mutant.On(mutant.ForeignPortToken) {
		c = caller{}
	}
	for _, part := range [][]byte{[]byte("trivet metadata token"), expiry, []byte(c.vpc), []byte(c.port)} {
		mac.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		mac.Write(part)
	}
	return mac.Sum(nil)
}
