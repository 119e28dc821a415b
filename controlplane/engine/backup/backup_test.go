package backup

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/iotest"

	"filippo.io/age"
	"github.com/stretchr/testify/require"
)

func newKey() []byte {
	key := make([]byte, 32)
	rand.Read(key)
	return key
}

// archive returns an archive of two groups, one of which needs several pieces of 64 KiB, and the content of its file
// kv/large.
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

// TestDamagedArchiveIsRefused checks that Extract returns an error for an archive that is truncated, reordered, changed
// or extended at any place, or read with another key.
func TestDamagedArchiveIsRefused(t *testing.T) {
	key := newKey()
	text, _ := archive(t, key)
	extract := func(text []byte, key []byte) error {
		_, err := Extract(bytes.NewReader(text), key, t.TempDir())
		return err
	}
	require.EqualError(t, extract(text, newKey()), "the archive was made with another cluster key, or its header is damaged")
	require.EqualError(t, extract([]byte("PK\x03\x04"), key), "this is not an archive that `trivet cluster backup` wrote")
	require.EqualError(t, extract(nil, key), "this is not an archive that `trivet cluster backup` wrote")
	const damaged = "the archive is cut short, or is damaged, or was changed: "
	require.ErrorContains(t, extract(append(slices.Clone(text), 0), key), damaged)

	head := bytes.Index(text, []byte("\n--- ")) // the header's last line is an authentication code
	head += 1 + bytes.IndexByte(text[head+1:], '\n') + 1
	for at := range head {
		require.Error(t, extract(text[:at], key), "at %d", at)
		changed := slices.Clone(text)
		changed[at] ^= 1
		require.Error(t, extract(changed, key), "at %d", at)
	}
	const nonce, size = 16, pieceLen + 16
	require.Greater(t, len(text), head+nonce+3*size)
	ends := []int{head + nonce + size, head + nonce + 2*size} // between two pieces, where age sees complete pieces only
	for at := head; at < len(text); at += 1 + len(text)/31 {
		ends = append(ends, at)
		changed := slices.Clone(text)
		changed[at] ^= 1
		require.ErrorContains(t, extract(changed, key), damaged, "at %d", at)
	}
	for _, at := range ends {
		require.ErrorContains(t, extract(text[:at], key), damaged, "at %d", at)
	}

	// Two pieces are swapped; one is left out; all after the first are left out; the later pieces are those of another
	// archive.
	start := head + nonce
	first, second, rest := text[start:start+size], text[start+size:start+2*size], text[start+2*size:]
	other, _ := archive(t, key)
	for _, pieces := range [][]byte{slices.Concat(second, first, rest), slices.Concat(first, rest), first, slices.Concat(first, other[start+size:])} {
		require.ErrorContains(t, extract(slices.Concat(text[:start], pieces), key), damaged)
	}
}

// TestReadErrorOfAnArchive checks that Extract reports an I/O error of the file as such, and not as damage.
func TestReadErrorOfAnArchive(t *testing.T) {
	key := newKey()
	text, _ := archive(t, key)
	for _, n := range []int64{0, 50, 1000, int64(len(text))} {
		_, err := Extract(io.MultiReader(io.LimitReader(bytes.NewReader(text), n), iotest.ErrReader(syscall.EIO)), key, t.TempDir())
		require.EqualError(t, err, "read the archive: input/output error", "after %d bytes", n)
	}
}

// TestWorkFactorIsBounded checks that Extract refuses an archive with a higher scrypt work factor, which would cost
// memory before the archive is authenticated.
func TestWorkFactorIsBounded(t *testing.T) {
	key := newKey()
	secret, err := passphrase(key)
	require.NoError(t, err)
	recipient, err := age.NewScryptRecipient(secret)
	require.NoError(t, err)
	recipient.SetWorkFactor(workFactor + 1)
	var out bytes.Buffer
	w, err := age.Encrypt(&out, recipient)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	_, err = Extract(&out, key, t.TempDir())
	require.ErrorContains(t, err, "work factor too large")
}

// TestFileNamesOutsideTheGroupAreRefused checks that Extract refuses an archive with a file name that leads outside the
// target directory or outside a group's directory.
func TestFileNamesOutsideTheGroupAreRefused(t *testing.T) {
	key := newKey()
	for _, name := range []string{"../x", "kv/../../x", "/x", "other/x", "kv"} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600))
		var out bytes.Buffer
		sealed, err := encrypt(&out, key)
		require.NoError(t, err)
		require.NoError(t, forge(sealed, name))
		require.NoError(t, sealed.Close())
		_, err = Extract(&out, key, t.TempDir())
		require.ErrorContains(t, err, "cannot be called", name)
	}
}

// forge writes a tar with a valid manifest and a file called name.
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
