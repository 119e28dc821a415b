package restapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// MaxValue is the maximum size of a value in bytes.
const MaxValue = 1536 << 10

// listEnd is appended to a prefix to get the end of the listed range (docs/api.md, "REST: keys and members"). A list
// therefore excludes keys in which the prefix is followed by ~ or a higher byte. Every non-ASCII character starts with
// a higher byte.
const listEnd = "~"

// decodeKey returns the stored key for a path. The parameter is the rest of the path after /api/v1/kv/, percent-encoded
// (docs/api.md, "REST: keys and members"). A key that contains a slash is stored with an additional leading slash. The
// path is decoded once; dots, slashes and NULs are not normalized.
func decodeKey(remainder string) (string, error) {
	key, err := url.PathUnescape(remainder)
	if err != nil {
		return "", fault.Invalid("key", "the path has an invalid percent-encoding: %v", err)
	}
	if key == "" {
		return "", fault.Invalid("key", "is empty: want /api/v1/kv/{key}")
	}
	if strings.Contains(key, "/") {
		key = "/" + key
	}
	if len(key) > command.MaxKeyBytes {
		return "", fault.Invalid("key", "is longer than %d bytes", command.MaxKeyBytes)
	}
	return key, nil
}

// listBounds returns the bounds of a list: the first key is the prefix, and the list ends before prefix + listEnd. For
// an empty prefix, the first key is a single NUL byte, which is the lowest key because keys are not empty.
func listBounds(prefix string) (key, end []byte) {
	end = []byte(prefix + listEnd)
	if prefix == "" {
		return []byte{0}, end
	}
	return []byte(prefix), end
}

// listQuery holds the query parameters of a list or read. parseQuery returns an error if the query cannot be parsed or
// a parameter is repeated, so that the response never differs from what the client meant.
type listQuery struct {
	prefix string
	local  bool
}

func parseQuery(r *http.Request) (q listQuery, err error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, fault.New(fault.InvalidArgument, "the query cannot be read: %v", err)
	}
	for _, name := range []string{"prefix", "consistency"} {
		if len(values[name]) > 1 {
			return q, fault.Invalid(name, "is given %d times", len(values[name]))
		}
	}
	q.prefix = values.Get("prefix")
	switch strings.ToLower(values.Get("consistency")) {
	case "local", "serializable":
		q.local = true
	}
	return q, nil
}

// item is a key with its value in a JSON response. Invalid UTF-8 is replaced by U+FFFD (docs/api.md). In that case
// KeyBase64 and ValueBase64 have the exact bytes, which is an extension of the wire contract.
type item struct {
	// The key. Bytes that are not UTF-8 are replaced.
	Key string `json:"key"`
	// The value, at most 1.5 MiB. Bytes that are not UTF-8 are replaced.
	Value string `json:"value"`
	// The exact bytes of a key that is not UTF-8; else absent.
	KeyBase64 []byte `json:"key_base64,omitempty"`
	// The exact bytes of a value that is not UTF-8; else absent.
	ValueBase64 []byte `json:"value_base64,omitempty"`
}

func newItem(key, value []byte) item {
	it := item{Key: string(key), Value: string(value)} // encoding/json replaces each invalid byte by U+FFFD
	if !utf8.Valid(key) {
		it.KeyBase64 = key
	}
	if !utf8.Valid(value) {
		it.ValueBase64 = value
	}
	return it
}

// writeResponse is the JSON response to a write.
type writeResponse struct {
	// The key. Bytes that are not UTF-8 are replaced.
	Key string `json:"key"`
	// The exact bytes of a key that is not UTF-8; else absent.
	KeyBase64 []byte `json:"key_base64,omitempty"`
	// Always true.
	Success bool `json:"success"`
}

func newWriteResponse(key string) writeResponse {
	done := writeResponse{Key: key, Success: true}
	if !utf8.ValidString(key) {
		done.KeyBase64 = []byte(key)
	}
	return done
}

// jsonString is a JSON string from a request, decoded to exactly the bytes to store.
type jsonString struct {
	present bool
	value   string
}

// UnmarshalJSON implements json.Unmarshaler. It accepts only strings, and refuses half of a surrogate pair, which
// encoding/json would replace.
func (t *jsonString) UnmarshalJSON(raw []byte) error {
	if len(raw) == 0 || raw[0] != '"' {
		return fault.Invalid("value", "want a string, got %s", jsonKind(raw))
	}
	if unpaired := unpairedSurrogate(raw); unpaired != "" {
		return fault.Invalid("value", `\u%s is an unpaired surrogate`, unpaired)
	}
	t.present = true
	return json.Unmarshal(raw, &t.value)
}

func jsonKind(raw []byte) string {
	switch raw = bytes.TrimSpace(raw); {
	case len(raw) == 0:
		return "nothing"
	case raw[0] == '{':
		return "an object"
	case raw[0] == '[':
		return "an array"
	case raw[0] == 't', raw[0] == 'f':
		return "a bool"
	case raw[0] == 'n':
		return "null"
	}
	return "a number"
}

// unpairedSurrogate returns the hexadecimal digits of the first escape that is half of a surrogate pair; "" if there is
// none.
func unpairedSurrogate(raw []byte) string {
	for {
		at := bytes.IndexByte(raw, '\\')
		if at < 0 || at+1 >= len(raw) {
			return ""
		}
		if raw[at+1] != 'u' {
			raw = raw[at+2:]
			continue
		}
		first, ok := parseEscape(raw[at:])
		if !ok {
			return ""
		}
		raw = raw[at+6:]
		if !utf16.IsSurrogate(first) {
			continue
		}
		second, ok := parseEscape(raw)
		if !ok || utf16.DecodeRune(first, second) == utf8.RuneError {
			return strconv.FormatInt(int64(first), 16)
		}
		raw = raw[6:]
	}
}

// parseEscape parses an escape \uXXXX at the start of raw. It returns false if there is none.
func parseEscape(raw []byte) (rune, bool) {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(raw[2:6]), 16, 16)
	return rune(n), err == nil
}
