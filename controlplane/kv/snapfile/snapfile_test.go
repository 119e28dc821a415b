package snapfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

func keys(all ...*mvccpb.KeyValue) iter.Seq2[*mvccpb.KeyValue, error] {
	return func(yield func(*mvccpb.KeyValue, error) bool) {
		for _, kv := range all {
			if !yield(kv, nil) {
				return
			}
		}
	}
}

func kv(key string, create, mod, version, lease int64) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{Key: []byte(key), Value: []byte("value of " + key), CreateRevision: create, ModRevision: mod, Version: version, Lease: lease}
}

// sample returns contents in which two keys have the same revision, and whose last revision only deleted a key.
func sample() Contents {
	return Contents{
		Revision: 9,
		Keys:     keys(kv("\x00", 6, 6, 1, 0), kv("a", 2, 8, 3, 0), kv("b", 3, 5, 2, 77), kv("c", 5, 5, 1, 77), kv("d", 4, 4, 1, 0)),
		Leases:   []Lease{{ID: 77, TTL: 60, Remaining: 30}, {ID: 1 << 62, TTL: 5}},
		Auth: Auth{Enabled: true, Revision: 12,
			Users: []*authpb.User{{Name: []byte("root"), Password: []byte("hash"), Roles: []string{"root"}, Options: &authpb.UserAddOptions{}}},
			Roles: []*authpb.Role{{Name: []byte("r"), KeyPermission: []*authpb.Permission{{Key: []byte("a"), RangeEnd: []byte{0}}}}}},
		Index: 100, Term: 7,
		Members: []Member{{ID: 0xabc, Name: "m1", PeerURLs: []string{"http://127.0.0.1:2380"}}, {ID: 2, Learner: true}},
	}
}

func writeFile(t *testing.T, c Contents) string {
	t.Helper()
	dir, path := t.TempDir(), filepath.Join(t.TempDir(), "snapshot")
	var b bytes.Buffer
	require.NoError(t, Stream(t.Context(), &b, dir, c))
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	require.Empty(t, listDir(t, dir))
	return path
}

func listDir(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	all, err := os.ReadDir(dir)
	require.NoError(t, err)
	return all
}

func readKeys(t *testing.T, f *File) (all []string) {
	t.Helper()
	for kv, err := range f.Keys() {
		require.NoError(t, err)
		all = append(all, fmt.Sprintf("%q=%s %d/%d v%d lease %d", kv.Key, kv.Value, kv.CreateRevision, kv.ModRevision, kv.Version, kv.Lease))
	}
	return all
}

func mustOpen(t *testing.T, path string) *File {
	t.Helper()
	f, err := Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

func TestWriteAndRead(t *testing.T) {
	c := sample()
	f := mustOpen(t, writeFile(t, c))
	require.True(t, f.Verified)
	require.Equal(t, StorageVersion, f.Version)
	require.EqualValues(t, 9, f.Revision)
	require.Equal(t, Counts{Keys: 5, Bytes: 55, Revisions: 6, Leases: 2, Users: 1, Roles: 1}, f.Counts)
	require.ElementsMatch(t, c.Leases, f.Leases)
	require.True(t, proto.Equal(c.Auth.Users[0], f.Auth.Users[0]))
	require.True(t, proto.Equal(c.Auth.Roles[0], f.Auth.Roles[0]))
	require.True(t, f.Auth.Enabled)
	require.EqualValues(t, 12, f.Auth.Revision)
	want := []string{
		`"a"=value of a 2/8 v3 lease 0`,
		`"b"=value of b 3/5 v2 lease 77`,
		`"d"=value of d 4/4 v1 lease 0`,
		`"c"=value of c 5/5 v1 lease 77`,
		"\"\\x00\"=value of \x00 6/6 v1 lease 0",
	}
	require.Equal(t, want, readKeys(t, f))
	require.Equal(t, want, readKeys(t, f), "the second read")
}

// TestDatabaseFormat checks that the buckets, keys and values in the file are those that etcd's server reads.
func TestDatabaseFormat(t *testing.T) {
	path := writeFile(t, sample())
	db, err := bbolt.Open(path, 0o400, &bbolt.Options{ReadOnly: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	var got []string
	require.NoError(t, db.View(func(tx *bbolt.Tx) error {
		for err := range tx.Check() {
			require.NoError(t, err)
		}
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			got = append(got, string(name))
			return b.ForEach(func(k, v []byte) error {
				if string(name) == "key" {
					var kv mvccpb.KeyValue
					require.NoError(t, proto.Unmarshal(v, &kv))
					v = []byte(fmt.Sprintf("%q", kv.Key))
				}
				if string(name) == "auth" {
					v = []byte(fmt.Sprintf("%x", v))
				}
				got = append(got, fmt.Sprintf("  %q %q", k, v))
				return nil
			})
		})
	}))
	require.Equal(t, []string{"alarm", "auth", `  "authEnabled" "01"`, `  "authRevision" "000000000000000c"`, "authRoles"}, got[:5])
	at := slices.Index(got, "key")
	require.Equal(t, []string{
		`  "\x00\x00\x00\x00\x00\x00\x00\x04_\x00\x00\x00\x00\x00\x00\x00\x00" "\"d\""`,
		`  "\x00\x00\x00\x00\x00\x00\x00\x05_\x00\x00\x00\x00\x00\x00\x00\x00" "\"b\""`,
		`  "\x00\x00\x00\x00\x00\x00\x00\x05_\x00\x00\x00\x00\x00\x00\x00\x01" "\"c\""`,
		`  "\x00\x00\x00\x00\x00\x00\x00\x06_\x00\x00\x00\x00\x00\x00\x00\x00" "\"\\x00\""`,
		`  "\x00\x00\x00\x00\x00\x00\x00\b_\x00\x00\x00\x00\x00\x00\x00\x00" "\"a\""`,
		`  "\x00\x00\x00\x00\x00\x00\x00\t_\x00\x00\x00\x00\x00\x00\x00\x00t" "\"\\x00\\x00\""`,
	}, got[at+1:at+7])
	require.Contains(t, got, `  "confState" "{\"voters\":[2748],\"learners\":[2],\"auto_leave\":false}"`)
	require.Contains(t, got, `  "consistent_index" "\x00\x00\x00\x00\x00\x00\x00d"`)
	require.Contains(t, got, `  "term" "\x00\x00\x00\x00\x00\x00\x00\a"`)
	require.Contains(t, got, `  "storageVersion" "3.7.0"`)
	require.Contains(t, got, `  "finishedCompactRev" "\x00\x00\x00\x00\x00\x00\x00\t_\x00\x00\x00\x00\x00\x00\x00\x00"`)
	require.Contains(t, got, `  "abc" "{\"id\":2748,\"peerURLs\":[\"http://127.0.0.1:2380\"],\"name\":\"m1\"}"`)
	require.Contains(t, got, `  "clusterVersion" "3.7.0"`)
}

func TestEmptyKeyspace(t *testing.T) {
	f := mustOpen(t, writeFile(t, Contents{Revision: 1, Keys: keys()}))
	require.EqualValues(t, 1, f.Revision)
	require.EqualValues(t, 1, f.Auth.Revision)
	require.Equal(t, Counts{}, f.Counts)
	require.Empty(t, readKeys(t, f))
}

// TestKeyOfMissingLease checks that a lease that is missing in Contents but that a key refers to is written with a TTL
// of 1 s.
func TestKeyOfMissingLease(t *testing.T) {
	f := mustOpen(t, writeFile(t, Contents{Revision: 3, Keys: keys(kv("a", 2, 2, 1, 5), kv("b", 3, 3, 1, 6)), Leases: []Lease{{ID: 6, TTL: 60}}}))
	require.Equal(t, []Lease{{ID: 5, TTL: 1}, {ID: 6, TTL: 60}}, f.Leases)
}

func TestLastRevisionDeletedAllKeys(t *testing.T) {
	f := mustOpen(t, writeFile(t, Contents{Revision: 5, Keys: keys()}))
	require.EqualValues(t, 5, f.Revision)
	require.Equal(t, Counts{Revisions: 1}, f.Counts)
	require.Empty(t, readKeys(t, f))
}

// TestManyKeys checks that all keys are written, and read in the order of their creation, if they need more than one
// bbolt transaction.
func TestManyKeys(t *testing.T) {
	const n = 2*batchKeys + 1000
	many := func(yield func(*mvccpb.KeyValue, error) bool) {
		kv := &mvccpb.KeyValue{Value: make([]byte, 100)}
		for i := range int64(n) {
			mod := 2 + (i*7919)%n/2*2 // two keys per revision
			kv.Key = fmt.Appendf(kv.Key[:0], "key-%08d", i)
			kv.CreateRevision, kv.ModRevision, kv.Version = mod, mod, 1
			copy(kv.Value, kv.Key)
			if !yield(kv, nil) {
				return
			}
		}
	}
	f := mustOpen(t, writeFile(t, Contents{Revision: 2*n + 1, Keys: many}))
	require.EqualValues(t, n, f.Counts.Keys)
	seen, last := map[string]bool{}, int64(0)
	for kv, err := range f.Keys() {
		require.NoError(t, err)
		require.Equal(t, kv.Key, kv.Value[:len(kv.Key)])
		require.GreaterOrEqual(t, kv.CreateRevision, last)
		seen[string(kv.Key)], last = true, kv.CreateRevision
	}
	require.Len(t, seen, n)
}

func TestFailedWriteLeavesNoFile(t *testing.T) {
	broken := errors.New("broken")
	failing := func(yield func(*mvccpb.KeyValue, error) bool) { yield(nil, broken) }
	for name, c := range map[string]Contents{
		"unreadable keys":         {Revision: 3, Keys: failing},
		"key of a later revision": {Revision: 3, Keys: keys(kv("a", 2, 4, 1, 0))},
		"key of revision 0":       {Revision: 3, Keys: keys(kv("a", 0, 0, 1, 0))},
		"empty key":               {Revision: 3, Keys: keys(kv("", 2, 2, 1, 0))},
		"user without name":       {Revision: 3, Keys: keys(), Auth: Auth{Users: []*authpb.User{{}}}},
	} {
		dir := t.TempDir()
		var b bytes.Buffer
		require.Error(t, Stream(t.Context(), &b, dir, c), name)
		require.Zero(t, b.Len(), name)
		require.Empty(t, listDir(t, dir), name)
	}
	require.ErrorIs(t, Stream(t.Context(), io.Discard, t.TempDir(), Contents{Revision: 3, Keys: failing}), broken)
	require.Error(t, Stream(t.Context(), io.Discard, filepath.Join(t.TempDir(), "missing"), sample()))

	done, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	require.ErrorIs(t, Stream(done, io.Discard, dir, sample()), context.Canceled)
	require.Empty(t, listDir(t, dir))

	// Stream must return the error of the receiver, or of the canceled context.
	m, err := Create(t.Context(), dir, sample())
	require.NoError(t, err)
	require.Empty(t, listDir(t, dir), "the file is unlinked while it is open")
	require.ErrorIs(t, m.Stream(done, io.Discard), context.Canceled)
	require.ErrorIs(t, m.Stream(t.Context(), failingWriter{broken}), broken)
	var b bytes.Buffer
	require.NoError(t, m.Stream(t.Context(), &b))
	require.EqualValues(t, m.Size()+32, b.Len())
	require.NoError(t, m.Close())
}

type failingWriter struct{ err error }

func (r failingWriter) Write([]byte) (int, error) { return 0, r.err }
