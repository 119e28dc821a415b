package backup

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func newKey() []byte {
	key := make([]byte, 32)
	rand.Read(key)
	return key
}

// archive returns an archive of two groups, one of which takes several pieces, and the content of its files.
func archive(t *testing.T, key []byte) (text, large []byte) {
	dir := t.TempDir()
	large = make([]byte, 3*pieceLen+17)
	rand.Read(large)
	for name, body := range map[string][]byte{"system/a/b": []byte("hello"), "system/empty": nil, "kv/large": large} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, body, 0o600))
	}
	var out bytes.Buffer
	m := Manifest{Cluster: 7, Groups: []Group{{ID: 1, Name: "system", Index: 12, Term: 3, Revision: 5}, {ID: 2, Name: "kv"}}}
	require.NoError(t, Write(&out, key, m, map[string]string{"system": filepath.Join(dir, "system"), "kv": filepath.Join(dir, "kv")}))
	return out.Bytes(), large
}

func TestRoundTrip(t *testing.T) {
	key := newKey()
	text, large := archive(t, key)
	require.NotContains(t, string(text), "hello")
	require.NotContains(t, string(text), "manifest")
	dir := t.TempDir()
	m, err := Extract(bytes.NewReader(text), key, dir)
	require.NoError(t, err)
	require.Equal(t, uint64(7), m.Cluster)
	require.Equal(t, Group{ID: 1, Name: "system", Index: 12, Term: 3, Revision: 5}, m.Groups[0])
	got, err := os.ReadFile(filepath.Join(dir, "kv", "large"))
	require.NoError(t, err)
	require.Equal(t, large, got)
	got, err = os.ReadFile(filepath.Join(dir, "system", "a", "b"))
	require.NoError(t, err)
	require.Equal(t, "hello", string(got))
	_, err = os.Stat(filepath.Join(dir, "system", "empty"))
	require.NoError(t, err)
}

// Extract returns an error for an archive that is truncated, changed or extended at any place.
func TestDamagedArchiveIsRefused(t *testing.T) {
	key := newKey()
	text, _ := archive(t, key)
	extract := func(text []byte, key []byte) error {
		_, err := Extract(bytes.NewReader(text), key, t.TempDir())
		return err
	}
	require.EqualError(t, extract(text, newKey()), "the archive was made with another cluster key")
	require.EqualError(t, extract([]byte("PK\x03\x04"), key), "this is not an archive that `trivet cluster backup` wrote")
	require.EqualError(t, extract(nil, key), "this is not an archive that `trivet cluster backup` wrote")
	require.ErrorContains(t, extract(append(slices.Clone(text), 0), key), "something follows its end")

	head := len(magic) + idLen + saltLen
	for at := head; at < len(text); at += 1 + len(text)/31 {
		require.ErrorContains(t, extract(text[:at], key), "is cut short", "at %d", at)
		changed := slices.Clone(text)
		changed[at] ^= 1
		require.Error(t, extract(changed, key), "at %d", at)
	}
	changed := slices.Clone(text)
	changed[head-1] ^= 1 // of the salt
	require.ErrorContains(t, extract(changed, key), "is damaged, or was changed")

	// Two pieces are swapped, one is left out, the last one is repeated.
	size := 4 + pieceLen + 16
	first, second, rest := text[head:head+size], text[head+size:head+2*size], text[head+2*size:]
	require.ErrorContains(t, extract(slices.Concat(text[:head], second, first, rest), key), "is damaged, or was changed")
	require.ErrorContains(t, extract(slices.Concat(text[:head], first, rest), key), "is damaged, or was changed")
	require.ErrorContains(t, extract(slices.Concat(text[:head], first), key), "is cut short")
}

// Extract refuses an archive with a file name that would lead outside the target directory or outside a group.
func TestFileNamesOutsideTheGroupAreRefused(t *testing.T) {
	key := newKey()
	for _, name := range []string{"../x", "kv/../../x", "/x", "other/x", "kv"} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600))
		var out bytes.Buffer
		sealed, err := newSealer(&out, key)
		require.NoError(t, err)
		require.NoError(t, forge(sealed, name))
		require.NoError(t, sealed.Close())
		_, err = Extract(&out, key, t.TempDir())
		require.ErrorContains(t, err, "cannot be called", name)
	}
}

// forge writes a tar whose second file has a name of its own.
func forge(w io.Writer, name string) error {
	out := newTar(w)
	if err := out.file(manifestName, []byte(`{"version":1,"groups":[{"id":2,"name":"kv"}]}`)); err != nil {
		return err
	}
	if err := out.file(name, []byte("x")); err != nil {
		return err
	}
	return out.close()
}
