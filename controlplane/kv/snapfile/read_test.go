package snapfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

// historyDB writes a database like that of a server, with overwritten and deleted keys, and returns its path.
func historyDB(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{NoSync: true, PageSize: 4096})
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket(bucketKey)
		require.NoError(t, err)
		meta, err := tx.CreateBucket(bucketMeta)
		require.NoError(t, err)
		require.NoError(t, meta.Put(metaFinishedCompact, appendRevision(nil, 9, 0)))
		add := func(main, sub int64, mark string, kv *mvccpb.KeyValue) {
			value, err := proto.Marshal(kv)
			require.NoError(t, err)
			require.NoError(t, b.Put(append(appendRevision(nil, main, sub), mark...), value))
		}
		add(2, 0, "", kv("a", 2, 2, 1, 0))
		add(2, 1, "", kv("b", 2, 2, 1, 0))
		add(3, 0, "", kv("a", 2, 3, 2, 0))
		add(4, 0, "t", &mvccpb.KeyValue{Key: []byte("b")})
		add(5, 0, "", kv("c", 5, 5, 1, 0))
		add(6, 0, "t", &mvccpb.KeyValue{Key: []byte("c")})
		add(7, 0, "", kv("c", 7, 7, 1, 9))
		add(8, 0, "", &mvccpb.KeyValue{}) // as etcdutl's restore --bump-revision writes it
		return nil
	}))
	require.NoError(t, db.Close())
	return path
}

func TestReadDatabaseWithHistory(t *testing.T) {
	f := mustOpen(t, historyDB(t))
	require.False(t, f.Verified)
	require.Empty(t, f.Version)
	require.EqualValues(t, 9, f.Revision, "the revision of the compaction")
	require.Equal(t, Counts{Keys: 2, Bytes: 22, Revisions: 8}, f.Counts)
	require.Equal(t, []string{`"a"=value of a 2/3 v2 lease 0`, `"c"=value of c 7/7 v1 lease 9`}, readKeys(t, f))
}

func TestOpenRefusesInvalidFiles(t *testing.T) {
	good, err := os.ReadFile(writeFile(t, sample()))
	require.NoError(t, err)
	raw, err := os.ReadFile(historyDB(t))
	require.NoError(t, err)
	changed := func(b []byte, at int) []byte {
		b = slices.Clone(b)
		b[at] ^= 0x10
		return b
	}
	for name, c := range map[string]struct {
		bytes []byte
		want  error
	}{
		"empty":                          {nil, ErrNotSnapshot},
		"short":                          {[]byte("hello"), ErrNotSnapshot},
		"text":                           {bytes.Repeat([]byte("hello world\n"), 4096), ErrNotSnapshot},
		"truncated SHA-256":              {good[:len(good)-1], ErrCorrupt},
		"without last page":              {good[:len(good)-32-4096], ErrCorrupt},
		"half":                           {good[:len(good)/2/4096*4096], ErrCorrupt},
		"changed":                        {changed(good, len(good)/2), ErrCorrupt},
		"changed SHA-256":                {changed(good, len(good)-1), ErrCorrupt},
		"no SHA-256, half of the file":   {raw[:2*4096], ErrCorrupt},
		"no SHA-256, no valid meta page": {changed(changed(raw, 40), 4096+40), ErrCorrupt},
		"zeros":                          {make([]byte, 1<<16), ErrNotSnapshot},
	} {
		path := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(path, c.bytes, 0o600))
		_, err := Open(path)
		require.ErrorIs(t, err, c.want, name)
		require.ErrorContains(t, err, path, name)
	}
	_, err = Open(filepath.Join(t.TempDir(), "missing"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open(t.TempDir())
	require.ErrorIs(t, err, ErrNotSnapshot)
}

func TestOpenRefusesOtherBoltDatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	db, err := bbolt.Open(path, 0o600, nil)
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("widgets"))
		return err
	}))
	_, err = Open(path)
	require.ErrorContains(t, err, "another process has it open")
	require.NoError(t, db.Close())
	_, err = Open(path)
	require.ErrorIs(t, err, ErrNotSnapshot)
	require.ErrorContains(t, err, "no bucket key")
}

func TestOpenRefusesMalformedContents(t *testing.T) {
	for name, change := range map[string]func(tx *bbolt.Tx) error{
		"revision":          func(tx *bbolt.Tx) error { return tx.Bucket(bucketKey).Put([]byte("short"), []byte{}) },
		"negative revision": func(tx *bbolt.Tx) error { return tx.Bucket(bucketKey).Put(appendRevision(nil, -1, 0), []byte{}) },
		"key value":         func(tx *bbolt.Tx) error { return tx.Bucket(bucketKey).Put(appendRevision(nil, 9, 0), []byte("x")) },
		"bucket in bucket key": func(tx *bbolt.Tx) error {
			_, err := tx.Bucket(bucketKey).CreateBucket(appendRevision(nil, 9, 0))
			return err
		},
		"compacted revision": func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put(metaScheduledCompact, []byte("x")) },
		"lease": func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucket(bucketLease)
			return errors.Join(err, b.Put(fixed64(5), Lease{ID: 6}.encode()))
		},
		"user": func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucket(bucketAuthUsers)
			return errors.Join(err, b.Put([]byte("ann"), []byte("x")))
		},
	} {
		path := historyDB(t)
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{NoSync: true})
		require.NoError(t, err)
		require.NoError(t, db.Update(change), name)
		require.NoError(t, db.Close())
		_, err = Open(path)
		require.ErrorIs(t, err, ErrCorrupt, name)
	}
}

// TestOpenWithAnyByteChanged changes one bit of each byte at the beginning of each page, in a file without SHA-256.
// Opening and reading the file must not panic.
func TestOpenWithAnyByteChanged(t *testing.T) {
	raw, err := os.ReadFile(historyDB(t))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "file")
	refused := 0
	for at := range raw {
		if at%4096 > 200 {
			continue // mostly unused bytes of the page
		}
		b := slices.Clone(raw)
		b[at] ^= 1 << (at % 8)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		f, err := Open(path)
		if err != nil {
			refused++
			continue
		}
		for range f.Keys() {
		}
		require.NoError(t, f.Close())
	}
	require.Greater(t, refused, 100)
}

// smallDatabase returns the content of a database with pages of 1 KiB.
func smallDatabase(f testing.TB) []byte {
	path := filepath.Join(f.TempDir(), "db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{NoSync: true, PageSize: minPageSize})
	require.NoError(f, err)
	require.NoError(f, db.Update(func(tx *bbolt.Tx) error {
		meta, err := tx.CreateBucket(bucketMeta)
		require.NoError(f, err)
		require.NoError(f, meta.Put(metaStorageVersion, []byte(StorageVersion)))
		b, err := tx.CreateBucket(bucketKey)
		require.NoError(f, err)
		for i := range int64(30) {
			value, err := proto.Marshal(kv(fmt.Sprint("key ", i%20), i+1, i+1, 1, 0))
			require.NoError(f, err)
			require.NoError(f, b.Put(appendRevision(nil, i+1, 0), value))
		}
		return nil
	}))
	require.NoError(f, db.Close())
	b, err := os.ReadFile(path)
	require.NoError(f, err)
	return b
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte("hello"))
	f.Add(smallDatabase(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "file")
		require.NoError(t, os.WriteFile(path, b, 0o600))
		if s, err := Open(path); err == nil {
			for range s.Keys() {
			}
			require.NoError(t, s.Close())
		}
	})
}
