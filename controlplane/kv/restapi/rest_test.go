package restapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// namedErrors maps the names in the scripts of TestREST to errors.
var namedErrors = map[string]error{
	"nospace":   rpctypes.ErrGRPCNoSpace,
	"noleader":  rpctypes.ErrGRPCNoLeader,
	"changed":   rpctypes.ErrGRPCLeaderChanged,
	"uncertain": rpctypes.ErrGRPCTimeoutDueToLeaderFail,
	"deadline":  fmt.Errorf("wait: %w", context.DeadlineExceeded),
	"internal":  errors.New("secret of the disk"),
	"rejected":  fault.New(fault.FailedPrecondition, "member 9 was removed").WithReason("MEMBER_ID_REMOVED"),
	"timeout":   fault.New(fault.DeadlineExceeded, "the change was not carried out in time; it may still be carried out"),
}

// TestREST runs the scripts in testdata/rest. The responses and stored keys must be as expected. The commands are:
//
//	members [count=] [open]    start a new cluster of count members (default 3), led by member 1; open sets Options.Open
//	leader is= [member=]       set the leader's ID, 0 for none; with member, only the leader that this member knows
//	lag member=                the member applies no more proposals
//	stop member=               stop the member's REST server
//	public, loopback           the next requests arrive on an address other than loopback, or on loopback
//	fail member= with=         the member's next read or write of keys fails with the named error
//	fail member= with= torn    the member's lists fail with the named error after the first message
//	fail members with=         the next change of members fails with the named error
//	raft member= addr=         set the member's raft address
//	put                        write KEY=VALUE lines, in which KEY and VALUE are Go strings without quotes
//	keys                       show all keys and values
//	users [root]               enable Auth with the users root and rest; with root, without the user rest
//	http [member=] [long=]     send METHOD PATH, headers, an empty line, a body; LONG is replaced by long times x
func TestREST(t *testing.T) {
	datadriven.Walk(t, "testdata/rest", func(t *testing.T, path string) {
		var s *testCluster
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "members" {
				count := 3
				d.MaybeScanArgs(t, "count", &count)
				s = newTestCluster(t, count, d.HasArg("open"), true)
				return ""
			}
			s.t = t
			return s.step(d)
		})
	})
}

func (s *testCluster) step(d *datadriven.TestData) string {
	t := s.t
	id, name := uint64(1), ""
	d.MaybeScanArgs(t, "member", &id)
	d.MaybeScanArgs(t, "with", &name)
	switch d.Cmd {
	case "leader":
		s.consensus.mu.Lock()
		if d.HasArg("member") {
			var leader uint64
			d.ScanArgs(t, "is", &leader)
			s.consensus.views[id] = leader
		} else {
			clear(s.consensus.views)
			d.ScanArgs(t, "is", &s.consensus.leader)
		}
		s.consensus.mu.Unlock()
	case "lag":
		s.consensus.mu.Lock()
		s.consensus.lagging[id] = true
		s.consensus.mu.Unlock()
	case "stop":
		for _, r := range s.rest {
			r.Close() // so that the next request needs a new connection
		}
		require.NoError(t, s.servers[id].Close())
	case "public":
		s.public = true
	case "loopback":
		s.public = false
	case "fail":
		require.Contains(t, namedErrors, name)
		switch {
		case d.HasArg("members"):
			s.members.err = namedErrors[name]
		case d.HasArg("torn"):
			s.keys[id].streamErr = namedErrors[name]
		default:
			s.keys[id].err = namedErrors[name]
		}
	case "raft":
		s.members.list[id-1].RaftAddr = ""
		d.MaybeScanArgs(t, "addr", &s.members.list[id-1].RaftAddr)
	case "put":
		for line := range strings.SplitSeq(d.Input, "\n") {
			var key, value string
			k, v, _ := strings.Cut(line, "=")
			_, err := fmt.Sscanf(`"`+k+`" "`+v+`"`, "%q %q", &key, &value)
			require.NoError(t, err)
			_, err = s.services[1].Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
			require.NoError(t, err)
		}
	case "keys":
		var out strings.Builder
		for _, kv := range allKeys(t, s.consensus.engines[1]) {
			value := fmt.Sprintf("%q", kv.Value)
			if len(kv.Value) > 100 {
				value = fmt.Sprintf("%d bytes", len(kv.Value))
			}
			fmt.Fprintf(&out, "%q %s\n", kv.Key, value)
		}
		return out.String()
	case "users":
		users := []string{"root", User}
		if d.HasArg("root") {
			users = users[:1]
		}
		s.enableAuth(users)
	case "http":
		return s.http(d, id)
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	return ""
}

func allKeys(t *testing.T, e *mvcc.Engine) []mvcc.KV {
	snap := e.Snapshot()
	defer snap.Close()
	got, err := snap.Range(mvcc.RangeOptions{Key: []byte{0}, End: []byte{0}})
	require.NoError(t, err)
	return got.KVs
}

// enableAuth adds the users and enables Auth. The last user may read and write keys with the prefix "open".
func (s *testCluster) enableAuth(users []string) {
	t, k := s.t, s.services[1]
	ctx := kv.As(t.Context(), "root")
	for _, user := range users {
		_, err := k.UserAdd(ctx, &pb.AuthUserAddRequest{Name: user, Password: "x"})
		require.NoError(t, err)
		_, err = k.RoleAdd(ctx, &pb.AuthRoleAddRequest{Name: user})
		require.NoError(t, err)
		_, err = k.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: user, Role: user})
		require.NoError(t, err)
	}
	_, err := k.RoleGrantPermission(ctx, &pb.AuthRoleGrantPermissionRequest{Name: users[len(users)-1], Perm: &authpb.Permission{
		Key: []byte("open"), RangeEnd: []byte("opeo"), PermType: authpb.Permission_READWRITE,
	}})
	require.NoError(t, err)
	_, err = k.AuthEnable(ctx, &pb.AuthEnableRequest{})
	require.NoError(t, err)
}

// http sends the request in a script's input to the member id. It returns the status, some headers, and the content of
// the JSON envelope.
func (s *testCluster) http(d *datadriven.TestData, id uint64) string {
	long := 0
	d.MaybeScanArgs(s.t, "long", &long)
	head, body, _ := strings.Cut(d.Input, "\n\n")
	lines := strings.Split(head, "\n")
	fill := strings.NewReplacer("LONG", strings.Repeat("x", long))
	body = fill.Replace(body)
	text := fill.Replace(lines[0]) + " HTTP/1.1\r\n"
	given := map[string]bool{}
	for _, line := range lines[1:] {
		name, value, _ := strings.Cut(line, ":")
		given[strings.ToLower(name)] = true
		if strings.TrimSpace(value) != "none" {
			text += line + "\r\n"
		}
	}
	if !given["host"] {
		text += "Host: 127.0.0.1:8081\r\n"
	}
	if body != "" && !given["content-type"] {
		text += "Content-Type: application/json\r\n"
	}
	if body != "" {
		text += fmt.Sprintf("Content-Length: %d\r\n", len(body))
	}
	a := s.send(id, text+"Connection: close\r\n\r\n"+body)
	out := fmt.Sprintln(a.status)
	for _, name := range []string{staleHeader, "Retry-After", "Allow"} {
		if v := a.header.Get(name); v != "" {
			out += name + ": " + v + "\n"
		}
	}
	switch {
	case a.err != nil:
		return out + "cut off\n"
	case len(a.body) == 0:
		return out
	case a.header.Get("Content-Type") != "application/json":
		return out + "of net/http: " + string(a.body) + "\n" // net/http refuses invalid HTTP itself
	}
	text = a.payload(s.t)
	require.NotContains(s.t, text, "secret")
	if i := strings.Index(text, ", request "); i >= 0 {
		text = text[:i] + ", request …" + text[i+len(", request ")+36:]
	}
	if len(text) > 400 {
		text = fmt.Sprintf("%s … %d bytes", text[:60], len(text))
	}
	out += strings.ReplaceAll(text, strings.Repeat("x", max(long, 50)), "LONG") + "\n"
	s.members.mu.Lock()
	defer s.members.mu.Unlock()
	if s.members.last != "" {
		out += "members: " + s.members.last + "\n"
		s.members.last = ""
	}
	return out
}

// TestForwardedRequestsAreAuthenticated checks that a forwarded request is refused if its MAC, target member, time,
// nonce, method, URI, body or client address was changed. An unchanged request must be executed exactly once, within
// the allowed difference of the clocks.
func TestForwardedRequestsAreAuthenticated(t *testing.T) {
	s := newTestCluster(t, 2, false, true)
	s.public = true
	own := forwardMAC{[]byte("the members' key"), s.rest[1].opts.Now}
	const body = `{"value":"v"}`
	put := func(header, method, path, body string) response {
		return s.send(1, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
			method, path, forwardHeader, header, len(body), body))
	}
	good := own.header(1, "PUT", "/api/v1/kv/a?x=1", []byte(body), "127.0.0.1")
	// field returns the header good with word n replaced.
	field := func(n int, word string) string {
		words := strings.Split(good, " ")
		require.NotEqual(t, words[n], word)
		words[n] = word
		return strings.Join(words, " ")
	}
	for name, a := range map[string]response{
		"other cluster key":    put(forwardMAC{[]byte("another key"), own.now}.header(1, "PUT", "/api/v1/kv/a", []byte(body), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"other target member":  put(own.header(2, "PUT", "/api/v1/kv/a", []byte(body), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"other method":         put(own.header(1, "DELETE", "/api/v1/kv/a", []byte(body), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"other path":           put(own.header(1, "PUT", "/api/v1/kv/b", []byte(body), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"other query":          put(own.header(1, "PUT", "/api/v1/kv/a?x", []byte(body), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"other body":           put(own.header(1, "PUT", "/api/v1/kv/a", []byte(`{"value":"w"}`), "127.0.0.1"), "PUT", "/api/v1/kv/a", body),
		"truncated MAC":        put(good[:len(good)-2], "PUT", "/api/v1/kv/a?x=1", body),
		"other version":        put("v1"+good[2:], "PUT", "/api/v1/kv/a?x=1", body),
		"other client address": put(strings.Replace(good, " 127.0.0.1 ", " 127.0.0.2 ", 1), "PUT", "/api/v1/kv/a?x=1", body),
		"other nonce":          put(field(2, strings.Repeat("0", 32)), "PUT", "/api/v1/kv/a?x=1", body),
		"other time":           put(field(1, strconv.FormatInt(s.clock.UnixMilli()+1, 10)), "PUT", "/api/v1/kv/a?x=1", body),
		"no MAC":               put("v2 0 0 0 0 0", "PUT", "/api/v1/kv/a", body),
	} {
		require.Equal(t, 403, a.status, "a forwarded request (%s) was accepted: %s", name, a.body)
		require.Empty(t, allKeys(t, s.consensus.engines[1]), "a forwarded request (%s) was accepted", name)
	}
	a := put(good, "PUT", "/api/v1/kv/a?x=1", body)
	require.Equal(t, 200, a.status, "%s", a.body)
	require.Len(t, allKeys(t, s.consensus.engines[1]), 1)
	require.Equal(t, 403, put(good, "PUT", "/api/v1/kv/a?x=1", body).status, "a replayed request is refused")
	created := s.clock
	for _, late := range []time.Duration{-forwardSkew - time.Millisecond, forwardSkew + time.Millisecond} {
		s.clock = created
		header := own.header(1, "PUT", "/api/v1/kv/a", []byte(body), "127.0.0.1")
		s.clock = created.Add(late)
		a := put(header, "PUT", "/api/v1/kv/a", body)
		require.Equal(t, 403, a.status)
		require.Contains(t, string(a.body), "clocks")
	}
	// A nonce is refused while its header is valid, and accepted later.
	s.clock = created
	var once nonceCache
	require.NoError(t, once.add("n", created))
	require.Error(t, once.add("n", created.Add(2*forwardSkew)))
	require.Error(t, once.add("n", created.Add(2*forwardSkew+1)))
	require.NoError(t, once.add("m", created.Add(5*forwardSkew)))
	require.NoError(t, once.add("n", created.Add(5*forwardSkew)))
}

// TestListsAreStreamed checks that a list of 24 MiB can be read from the leader, and through a follower that forwards
// it.
func TestListsAreStreamed(t *testing.T) {
	s := newTestCluster(t, 2, false, true)
	value := strings.Repeat("v", 1<<20)
	const n = 24
	for i := range n {
		_, err := s.services[1].Put(t.Context(), &pb.PutRequest{Key: fmt.Appendf(nil, "k%02d", i), Value: []byte(value)})
		require.NoError(t, err)
	}
	for _, id := range []uint64{1, 2} {
		a := s.send(id, "GET /api/v1/kv?prefix=k HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
		require.Equal(t, 200, a.status)
		require.Equal(t, n, strings.Count(a.payload(t), `"value":"v`))
	}
	// If the read fails in the middle of a list, the response ends without a valid end, on both members.
	s.keys[1].streamErr = errors.New("the disk is gone")
	for _, id := range []uint64{1, 2} {
		a := s.send(id, "GET /api/v1/kv?prefix=k HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
		require.Equal(t, 200, a.status)
		require.Error(t, a.err)
	}
	// If the read fails before anything was sent, the response is an error.
	a := s.send(2, "GET /api/v1/kv?prefix=none HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
	require.Equal(t, 500, a.status)
	require.Contains(t, a.payload(t), "INTERNAL_ERROR")
}

func TestAddresses(t *testing.T) {
	for own, want := range map[string][]string{
		"127.0.0.1": {"127.0.0.1"}, "127.0.0.3": {"127.0.0.3"}, "10.1.2.3": {"10.1.2.3", "127.0.0.1"}, "0.0.0.0": {"0.0.0.0"},
		"::1": {"::1"}, "fd00::1": {"fd00::1", "::1"},
	} {
		require.True(t, slices.Equal(want, Addresses(own)), own)
		for _, a := range want {
			require.NotNil(t, net.ParseIP(a))
		}
	}
}

// TestLegacyID checks the numeric ID for an ID of the legacy path: the number of node<number>, or else the last 53 bits
// of the text's SHA-256.
func TestLegacyID(t *testing.T) {
	for text, want := range map[string]uint64{
		"node1": 1, "node007": 7, "node9223372036854775807": 1<<63 - 1, "ada": 1996350132408361,
	} {
		got, err := legacyID(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	seen := map[uint64]string{}
	for _, text := range []string{"node9223372036854775808", "node", "node-1", "node+1", "node1.0", "Node1", "node 1", "node1 ", "größe"} {
		got, err := legacyID(text)
		require.NoError(t, err, text)
		require.Greater(t, got, uint64(1<<33), text)
		require.Less(t, got, uint64(1<<53), text)
		require.Empty(t, seen[got], text)
		seen[got] = text
	}
	for _, text := range []string{"", "  ", "\t", "node0", "node000"} {
		_, err := legacyID(text)
		require.True(t, fault.Is(err, fault.InvalidArgument), text)
	}
}

// TestInvalidResponsesOfLeader checks that a leader's response without a valid JSON envelope becomes an error of the
// forwarding, and is never sent to the client.
func TestInvalidResponsesOfLeader(t *testing.T) {
	ended := make(chan struct{})
	defer close(ended)
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		list   bool
		says   string
	}{
		"not JSON":       {answer: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>") }, says: "the connection to it failed"},
		"no envelope":    {answer: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"data":{}}`) }, says: "the connection to it failed"},
		"data and error": {answer: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"data":{},"error":{},"meta":{}}`) }, says: "the connection to it failed"},
		"redirect": {answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusTemporaryRedirect)
		}, says: "the connection to it failed"},
		"truncated": {answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, `{"data":`)
		}, says: "the connection to it failed"},
		"response too long": {answer: func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, `{"data":"`+strings.Repeat("x", maxForwardResponse)+`","meta":{}}`)
		}, says: "the connection to it failed"},
		"list with an error status": {list: true, answer: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			io.WriteString(w, "oh")
		}, says: "the connection to it failed"},
		"no response": {answer: func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-ended:
			case <-r.Context().Done():
			}
		}, says: "did not respond in time"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(c.answer)
			defer server.Close()
			f := newForwarder(forwardMAC{[]byte("k"), time.Now}, uint16(server.Listener.Addr().(*net.TCPAddr).Port), nil)
			defer f.client.CloseIdleConnections()
			limit := 10 * time.Second
			if name == "no response" {
				limit = 20 * time.Millisecond
			}
			_, err := f.forward(&rest.Response{}, httptest.NewRequest("GET", "/api/v1/kv/a", nil), 2, "127.0.0.1", nil, limit, c.list)
			require.True(t, fault.Is(err, fault.BadGateway), "%v", err)
			require.Contains(t, err.Error(), c.says)
		})
	}
	for peer, want := range map[string]string{
		"http://10.0.0.1:2380": "10.0.0.1", "https://[fd00::1]:2380": "fd00::1", "10.0.0.1:2380": "10.0.0.1", "tcp://host": "host", "": "", "http://": "", "http://:2380": "", ":2380": "",
	} {
		host, ok := leaderHost(peer)
		require.Equal(t, want != "", ok, peer)
		require.Equal(t, want, host, peer)
	}
}
