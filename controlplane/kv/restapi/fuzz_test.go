package restapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// percentDecode decodes percent-encoding by RFC 3986, independently of net/url. ok is false if a percent sign is not
// followed by two hexadecimal digits.
func percentDecode(s string) (out string, ok bool) {
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			out += s[i : i+1]
			continue
		}
		if len(s) < i+3 {
			return "", false
		}
		b, err := hex.DecodeString(s[i+1 : i+3])
		if err != nil {
			return "", false
		}
		out += string(b)
		i += 2
	}
	return out, true
}

// expectedKey returns the stored key for the rest of a path after /api/v1/kv/ (docs/api.md, "REST: keys and members").
// If ok is false, the request must be refused.
func expectedKey(remainder string) (key string, ok bool) {
	key, ok = percentDecode(remainder)
	if strings.Contains(key, "/") {
		key = "/" + key
	}
	return key, ok && key != "" && len(key) <= command.MaxKeyBytes
}

// storedData returns all keys with their values, and all records of the engine.
func storedData(t *testing.T, e *mvcc.Engine) (keys, records map[string]string) {
	keys, records = map[string]string{}, map[string]string{}
	for _, kv := range allKeys(t, e) {
		keys[string(kv.Key)] = string(kv.Value)
	}
	snap := e.Snapshot()
	defer snap.Close()
	for _, r := range snap.Records(nil) {
		records[string(r.Name)] = string(r.Value)
	}
	return keys, records
}

// otherKeys lists keys that a wrongly decoded path could refer to.
var otherKeys = []string{
	"\x00", "a", "a/", "/a", "/a/b", "//a", "/api/v1/kv/a", "..", "/..", "~", "a~", "a~b", "put", "/a/put", "user/root", "role/root", "auth/enabled",
	"alarm/1/1", "lessor", "member/1", "vm/1", "\xff", "\xff\xff", "é", "a%2fb", "a b", "a+b", "?", "/api/v1/cluster/members",
}

// FuzzKeyForms checks that a request reads or writes only the key that expectedKey returns, whatever the form of its
// key, prefix or path. The engine also has otherKeys and records of users, which must not change.
func FuzzKeyForms(f *testing.F) {
	for _, target := range []string{
		"a", "a/b", "%2fa", "/a", "//", "..", "../x", "a/../b", "%2e%2e%2f", "~", "", "%00", "%ff", "%zz", "%", "a%", "%2", "a%252fb", "put", "a/put", "a%2fput",
		"x\"%2fput", "é", "a b", "a+b", "a?prefix=b", "?prefix=", "?prefix=%00", "?prefix=~", "?prefix=a&consistency=local", "?prefix=%2f", "?prefix=a;b", "?prefix=%",
		"a#b", "a;b", "user/root", strings.Repeat("k", 4096), strings.Repeat("/", 4095), strings.Repeat("%2f", 4096), "[::1]", "a:b@c",
	} {
		for method := range uint8(6) {
			f.Add(method, target, "v")
		}
	}
	f.Fuzz(func(t *testing.T, method uint8, target, value string) {
		fuzzOne(t, method%6, target, strings.ToValidUTF8(value, ""))
	})
}

// fuzzOne makes a request with a new engine and compares its effect and response with the expected ones.
func fuzzOne(t *testing.T, method uint8, target, value string) {
	s := newTestCluster(t, 1, false, false)
	e := s.consensus.engines[1]
	for _, k := range otherKeys {
		_, err := s.services[1].Put(t.Context(), &pb.PutRequest{Key: []byte(k), Value: []byte("of " + k)})
		require.NoError(t, err)
	}
	for _, user := range []string{"root", User} {
		_, err := s.services[1].UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: user, Password: "x"})
		require.NoError(t, err)
	}
	keys, records := storedData(t, e)
	require.NotEmpty(t, records)

	verb := []string{"GET", "PUT", "DELETE", "POST", "HEAD", "LIST"}[method]
	path, query, _ := strings.Cut(target, "?")
	line := keyPath + target
	if verb == "LIST" {
		verb, line, path = "GET", "/api/v1/kv"+target, ""
		if !strings.HasPrefix(target, "?") {
			line = "/api/v1/kv?" + target
			query = target
		}
	}
	body, err := json.Marshal(map[string]string{"value": value})
	require.NoError(t, err)
	if verb == "GET" || verb == "HEAD" {
		body = nil
	}
	text := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", verb, line, len(body), body)
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
	if err != nil {
		return // net/http refuses the request itself
	}
	r.RemoteAddr = "127.0.0.1:1"
	r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
	w := httptest.NewRecorder()
	s.rest[1].ServeHTTP(w, r)
	after, recordsAfter := storedData(t, e)
	require.Equal(t, records, recordsAfter, "a REST request changed a record")

	want := maps.Clone(keys)
	done := w.Code == http.StatusOK
	switch {
	case method == 5:
		require.Equal(t, want, after)
		if done {
			checkList(t, query, keys, w.Body.Bytes())
		}
		return
	case verb == "POST":
		at := strings.LastIndexByte(path, '/')
		if at < 0 {
			require.False(t, done)
			break
		}
		key, ok := expectedKey(path[:at])
		verb = map[string]string{"put": "PUT", "delete": "DELETE"}[path[at+1:]]
		require.Equal(t, ok && verb != "", done, "%s", w.Body)
		checkWrite(t, want, verb, key, value, done)
	case verb == "PUT", verb == "DELETE":
		key, ok := expectedKey(path)
		require.Equal(t, ok, done, "%d %s", w.Code, w.Body)
		checkWrite(t, want, verb, key, value, done)
	default:
		key, ok := expectedKey(path)
		value, there := keys[key]
		if strings.ContainsAny(query, "%;") { // such a query may be refused
			ok = ok && done
		}
		require.Equal(t, ok && there, done, "%d %s", w.Code, w.Body)
		if done && verb == "GET" {
			var got struct{ Data item }
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got))
			require.Equal(t, jsonRoundTrip(key, value), got.Data)
		}
	}
	require.Equal(t, want, after)
}

// jsonRoundTrip returns the item for a key and value after encoding to JSON and decoding.
func jsonRoundTrip(key, value string) item {
	var out item
	text, _ := json.Marshal(newItem([]byte(key), []byte(value)))
	_ = json.Unmarshal(text, &out)
	return out
}

func checkWrite(t *testing.T, want map[string]string, verb, key, value string, done bool) {
	switch {
	case !done:
	case verb == "PUT":
		want[key] = value
	default:
		require.Equal(t, "DELETE", verb)
		delete(want, key)
	}
}

func checkList(t *testing.T, query string, keys map[string]string, body []byte) {
	prefix := ""
	for part := range strings.SplitSeq(query, "&") {
		if name, v, _ := strings.Cut(part, "="); name == "prefix" {
			var ok bool
			prefix, ok = percentDecode(strings.ReplaceAll(v, "+", " "))
			require.True(t, ok)
		} else if strings.ContainsAny(name, "%+") {
			return // may be another encoding of the name "prefix"
		}
	}
	var want []item
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		if k >= prefix && bytes.Compare([]byte(k), []byte(prefix+"~")) < 0 {
			want = append(want, jsonRoundTrip(k, keys[k]))
		}
	}
	var got struct{ Data struct{ Items []item } }
	require.NoError(t, json.Unmarshal(body, &got))
	require.Equal(t, len(want), len(got.Data.Items))
	for i := range want {
		require.Equal(t, want[i], got.Data.Items[i])
	}
}

// FuzzBodies checks that a value is stored exactly as it was sent or not at all, and that no forged forwardHeader is
// accepted.
func FuzzBodies(f *testing.F) {
	for _, body := range []string{
		`{"value":"v"}`, `{"value":"\ud83d\ude00"}`, `{"value":"\ud83d"}`, `{"value":"\\ud83d"}`, `{"value":null}`, `{"value":"a","value":5}`, `[]`, `{`, "", `{"VALUE":"x"}`,
		`{"value":"` + "\xff" + `"}`, `{"value":"\u0000"}`, strings.Repeat(`{"a":`, 1000),
	} {
		f.Add(body, "")
	}
	f.Add(`{"value":"v"}`, forwardMAC{[]byte("another key"), time.Now}.header(1, "PUT", "/api/v1/kv/k", nil, "127.0.0.1"))
	f.Add(`{"value":"v"}`, "v1 0 0 0 0")
	f.Fuzz(func(t *testing.T, body, header string) {
		s := newTestCluster(t, 1, false, false)
		r := httptest.NewRequest("PUT", "http://127.0.0.1/api/v1/kv/k", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		if header != "" {
			r.Header.Set(forwardHeader, header)
		}
		r.RemoteAddr = "127.0.0.1:1"
		r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
		w := httptest.NewRecorder()
		s.rest[1].ServeHTTP(w, r)
		keys, _ := storedData(t, s.consensus.engines[1])
		if w.Code != http.StatusOK {
			require.Contains(t, []int{400, 403, 413}, w.Code, "%s", w.Body)
			require.Empty(t, keys)
			return
		}
		require.Empty(t, header)
		require.Len(t, keys, 1)
		require.True(t, utf8.ValidString(keys["k"]))
		// Invalid encodings are refused, so the client sent each U+FFFD in the stored value.
		sent := strings.Count(body, "\ufffd") + strings.Count(strings.ToLower(body), `\ufffd`)
		require.LessOrEqual(t, strings.Count(keys["k"], "\ufffd"), sent)
	})
}
