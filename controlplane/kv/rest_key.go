package kv

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

// MaxRESTValue is the limit of a value that REST takes, in bytes of its own.
const MaxRESTValue = 1536 << 10

// listEnd, put after a prefix, is the first key that the list of that prefix leaves out (the spec's part 4.4): keys that
// go on with ~ or a byte above it, as most that are not ASCII do, are not of the list.
const listEnd = "~"

// keyOf is the stored key for the percent-encoded remainder of a path after /api/v1/kv/ (the spec's part 4.4, "Key
// rule"). It is decoded once and taken as it is: no dots, slashes or NULs are cleaned away.
func keyOf(remainder string) (string, error) {
	key, err := url.PathUnescape(remainder)
	if err != nil {
		return "", fault.Invalid("key", "the path is not percent-encoded as it should be: %v", err)
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

// listBounds is the range [prefix, prefix~) of a list. No key is empty, so that the least one is a NUL.
func listBounds(prefix string) (key, end []byte) {
	end = []byte(prefix + listEnd)
	if prefix == "" {
		return []byte{0}, end
	}
	return []byte(prefix), end
}

// listQuery reads the query of a list or read. A query that cannot be read, or says a thing twice, is refused: to list
// something else than was asked for is worse.
type listQuery struct {
	prefix string
	local  bool
}

func queryOf(r *http.Request) (q listQuery, err error) {
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

// item is a KV item. Bytes that are not UTF-8 are replaced in both fields, as the spec's part 2.5 has it; what was there
// is then said in base64 beside it, beyond the spec, so that nothing is lost on the way.
type item struct {
	Key         string `json:"key"`
	Value       string `json:"value"`
	KeyBase64   []byte `json:"key_base64,omitempty"`
	ValueBase64 []byte `json:"value_base64,omitempty"`
}

func itemOf(key, value []byte) item {
	it := item{Key: string(key), Value: string(value)} // encoding/json replaces each invalid byte by U+FFFD
	if !utf8.Valid(key) {
		it.KeyBase64 = key
	}
	if !utf8.Valid(value) {
		it.ValueBase64 = value
	}
	return it
}

// keyDone is the answer to a write.
type keyDone struct {
	Key       string `json:"key"`
	KeyBase64 []byte `json:"key_base64,omitempty"`
	Success   bool   `json:"success"`
}

func doneWith(key string) keyDone {
	done := keyDone{Key: key, Success: true}
	if !utf8.ValidString(key) {
		done.KeyBase64 = []byte(key)
	}
	return done
}

// text is a JSON string that stands for exactly the bytes that will be stored.
type text struct {
	given bool
	bytes string
}

// UnmarshalJSON takes a string only, and none with half of a surrogate pair, which encoding/json would replace.
func (t *text) UnmarshalJSON(raw []byte) error {
	if len(raw) == 0 || raw[0] != '"' {
		return fault.Invalid("value", "want a string, got %s", jsonKind(raw))
	}
	if half := lonelySurrogate(raw); half != "" {
		return fault.Invalid("value", `\u%s is half of a character`, half)
	}
	t.given = true
	return json.Unmarshal(raw, &t.bytes)
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

// lonelySurrogate is the hexadecimal form of the first escape in a JSON string that stands for no character.
func lonelySurrogate(raw []byte) string {
	for {
		at := bytes.IndexByte(raw, '\\')
		if at < 0 || at+1 >= len(raw) {
			return ""
		}
		if raw[at+1] != 'u' {
			raw = raw[at+2:]
			continue
		}
		first, ok := escaped(raw[at:])
		if !ok {
			return ""
		}
		raw = raw[at+6:]
		if !utf16.IsSurrogate(first) {
			continue
		}
		second, ok := escaped(raw)
		if !ok || utf16.DecodeRune(first, second) == utf8.RuneError {
			return strconv.FormatInt(int64(first), 16)
		}
		raw = raw[6:]
	}
}

// escaped reads \uXXXX.
func escaped(raw []byte) (rune, bool) {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(raw[2:6]), 16, 16)
	return rune(n), err == nil
}
