package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// kvPort is the port of the key-value REST API.
const kvPort = 8081

// keys calls a member's key-value REST API and returns the data of the response, which must have the given status.
func (w *world) keys(ctx context.Context, member, status int, method, path string, body any) map[string]any {
	w.t.Helper()
	a, err := w.rest(member, "").Do(ctx, kvPort, method, path, body)
	require.NoError(w.t, err)
	require.Equal(w.t, status, a.Status, "%s %s at member %d: %s", method, path, member, a.Raw)
	var data map[string]any
	if a.Data != nil {
		require.NoError(w.t, json.Unmarshal(a.Data, &data))
	}
	return data
}

// kvLeader waits until all members in running report the same term of the key-value raft group and one of them is its
// leader, and returns the leader's id.
func (w *world) kvLeader(ctx context.Context, running ...int) (leader int) {
	w.t.Helper()
	require.NoError(w.t, lab.Until(ctx, "one member leads the key-value group", func(ctx context.Context) error {
		leader = 0
		var terms []float64
		for _, member := range running {
			a, err := w.rest(member, "").Do(ctx, kvPort, http.MethodGet, "/api/v1/cluster/status", nil)
			if err != nil {
				return err
			}
			var s struct {
				Term     float64
				IsLeader bool `json:"is_leader"`
			}
			if err := json.Unmarshal(a.Data, &s); err != nil {
				return err
			}
			if s.IsLeader {
				leader = member
			}
			if terms = append(terms, s.Term); s.Term != terms[0] {
				return fmt.Errorf("terms %v", terms)
			}
		}
		if leader == 0 {
			return errors.New("no member leads yet")
		}
		return nil
	}))
	return leader
}

// TestKeys checks reads, writes and watches of the key-value store, over REST, with etcd's client and with the program
// trivet, at followers and after the leader was killed. It also checks the transfer of leadership.
func TestKeys(t *testing.T) {
	w := newWorld(t)
	w.check = documented(t)
	ctx := w.context(3 * time.Minute)
	leader := w.kvLeader(ctx, 1, 2, 3)
	follower, third := leader%3+1, (leader+1)%3+1

	endpoint := func(member int) string { return w.trio.Members[member] + ":50051" }
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{endpoint(follower), endpoint(third)}, DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
	})
	require.NoError(t, err)
	defer client.Close()
	events := client.Watch(ctx, "/app/", clientv3.WithPrefix())
	next := func() *clientv3.Event {
		t.Helper()
		for {
			r, ok := <-events
			require.True(t, ok, "the watch ended")
			require.NoError(t, r.Err())
			if len(r.Events) > 0 {
				require.Len(t, r.Events, 1)
				return r.Events[0]
			}
		}
	}
	// Put a key repeatedly until the watch returns its event, which shows that the watch exists.
	require.NoError(t, lab.Until(ctx, "the watch sees a change", func(ctx context.Context) error {
		if _, err := client.Put(ctx, "/app/begin", "now"); err != nil {
			return err
		}
		select {
		case r := <-events:
			if len(r.Events) == 1 && string(r.Events[0].Kv.Value) == "now" {
				return r.Err()
			}
		case <-time.After(time.Second):
		}
		return errors.New("the watch has returned no event")
	}))

	// A write at a follower must be readable at all members.
	w.keys(ctx, follower, 200, http.MethodPut, "/api/v1/kv/app/config", map[string]string{"value": "größe"})
	for member := range w.trio.Members {
		require.Equal(t, "größe", w.keys(ctx, member, 200, http.MethodGet, "/api/v1/kv/app/config", nil)["value"])
	}
	e := next()
	require.Equal(t, "/app/config größe", string(e.Kv.Key)+" "+string(e.Kv.Value))
	list := w.keys(ctx, third, 200, http.MethodGet, "/api/v1/kv?prefix=/app/c", nil)
	require.Len(t, list["items"], 1)
	w.keys(ctx, third, 200, http.MethodDelete, "/api/v1/kv/app/config", nil)
	e = next()
	require.Equal(t, clientv3.EventTypeDelete, e.Type)
	w.keys(ctx, follower, 404, http.MethodGet, "/api/v1/kv/app/config", nil)

	// After the leader was killed, serializable reads must succeed at once, and writes when there is another leader.
	require.NoError(t, w.dir.Kill(w.trio.Name(leader)))
	w.keys(ctx, follower, 200, http.MethodGet, "/api/v1/kv/app/begin?consistency=local", nil)
	require.NoError(t, lab.Until(ctx, "a key can be written again", func(ctx context.Context) error {
		a, err := w.rest(follower, "").Do(ctx, kvPort, http.MethodPut, "/api/v1/kv/app/again", map[string]string{"value": "1"})
		if err == nil && a.Status != 200 {
			// There is no leader yet, or the member still forwards to the killed one.
			require.Contains(t, []int{500, 502, 503}, a.Status, a.Raw)
			err = errors.New(a.Raw)
		}
		return err
	}))
	for {
		if e = next(); string(e.Kv.Key) == "/app/again" {
			break
		}
	}
	newLeader := w.kvLeader(ctx, follower, third)
	require.NotEqual(t, leader, newLeader)

	// A transfer of leadership must succeed to a member, and fail to one that does not exist.
	other := follower + third - newLeader
	w.keys(ctx, other, 412, http.MethodPost, "/api/v1/cluster/leader/transfer", map[string]int{"target_id": 99})
	w.keys(ctx, other, 400, http.MethodPost, "/api/v1/cluster/leader/transfer", map[string]int{"target_id": 0})
	w.keys(ctx, other, 200, http.MethodPost, "/api/v1/cluster/leader/transfer", map[string]int{"target_id": other})
	require.Equal(t, other, w.kvLeader(ctx, follower, third))

	w.commandLineKeys(ctx, endpoint(follower)+","+endpoint(third))
}

// commandLineKeys checks the commands of `trivet kv` against the cloud: keys, leases, snapshot, import and compaction.
func (w *world) commandLineKeys(ctx context.Context, endpoints string) {
	t := w.t
	home := t.TempDir()
	must := func(args ...string) string {
		t.Helper()
		out, errs, code := w.trivet(ctx, home, append([]string{"kv", "--endpoint", endpoints}, args...)...)
		require.Zero(t, code, "trivet kv %s: %s%s", strings.Join(args, " "), out, errs)
		return out
	}
	must("put", "/cli/a", "1")
	require.Equal(t, "1\n", must("get", "/cli/a", "--print-value-only"))
	require.Equal(t, "/cli/a\n", must("get", "/cli/", "--prefix", "--keys-only"))
	_, errs, code := w.trivet(ctx, home, "kv", "get", "/cli/b", "--endpoint", endpoints)
	require.Equal(t, 3, code)
	require.Contains(t, errs, `NOT_FOUND: no key "/cli/b"`)
	lease := strings.TrimSpace(must("lease", "grant", "600", "-o", "name"))
	must("put", "/cli/held", "2", "--lease", lease)
	require.Contains(t, must("lease", "timetolive", lease, "--keys"), "/cli/held")
	file := filepath.Join(home, "all.db")
	_, errs, code = w.trivet(ctx, home, "kv", "snapshot", "save", file, "--endpoint", endpoints)
	require.Equal(t, 5, code, "a snapshot without a credential must be refused, because it contains password hashes")
	require.Contains(t, errs, "permission denied")
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	require.Contains(t, must("snapshot", "save", file, "--token-file", token), "Keys:")
	must("lease", "revoke", lease)
	_, _, code = w.trivet(ctx, home, "kv", "get", "/cli/held", "--endpoint", endpoints)
	require.Equal(t, 3, code, "the key must be deleted with its lease")
	must("del", "/cli/", "--prefix")
	must("import", file)
	require.Equal(t, "1\n", must("get", "/cli/a", "--print-value-only"))
	require.Equal(t, "2\n", must("get", "/cli/held", "--print-value-only"))
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())
	require.Contains(t, must("status"), "Leader")
	must("compact")
	_, errs, code = w.trivet(ctx, home, "kv", "get", "/cli/a", "--rev", "2", "--endpoint", endpoints)
	require.Equal(t, 1, code)
	require.Contains(t, errs, "compacted")
	require.NotContains(t, must("alarm", "list"), "NOSPACE")
}
