package raftlog

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestDamagedLog checks that a flipped bit in the first half of a log file is ErrDamaged, because the entries after it
// were acknowledged. A torn last record must be dropped. The second half is not tested: Pebble (v2.1.7) treats damage
// in the last blocks as a torn end.
func TestDamagedLog(t *testing.T) {
	const writes = 200
	fs := vfs.NewMem()
	e, err := OpenEngine(fs, "log", true, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for i := range writes {
		b := e.db.NewBatch()
		require.NoError(t, b.Set(entryKey(1, uint64(i)), bytes.Repeat([]byte{byte(i)}, 500), nil))
		require.NoError(t, e.Commit(b))
		require.NoError(t, b.Close())
	}
	last := newest(t, fs, ".log")
	torn := contents(t, fs, last)
	clear(torn[len(bytes.TrimRight(torn, "\x00"))-200:])
	entries, err := reopened(t, fs, last, torn, writes)
	require.NoError(t, err)
	require.Equal(t, writes-1, entries)

	require.NoError(t, e.Close())
	whole := contents(t, fs, last)
	for at := 3; at < len(bytes.TrimRight(whole, "\x00"))/2; at += 499 {
		text := bytes.Clone(whole)
		text[at] ^= 1
		_, err := reopened(t, fs, last, text, writes)
		require.ErrorIs(t, err, ErrDamaged, "byte %d", at)
	}
}

// reopened copies the store, replaces the content of the file name by text, and returns the number of entries that can
// be read from the copy.
func reopened(t *testing.T, fs vfs.FS, name string, text []byte, writes int) (entries int, err error) {
	copied := vfs.NewMem()
	_, err = vfs.Clone(fs, copied, "log", "log")
	require.NoError(t, err)
	f, err := copied.Create(name, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write(text)
	require.NoError(t, errors.Join(err, f.Close()))
	e, err := OpenEngine(copied, "log", true, slog.New(slog.DiscardHandler))
	if err != nil {
		return 0, err
	}
	defer e.Close()
	for i := range writes {
		v, err := e.get(entryKey(1, uint64(i)))
		if err != nil {
			return entries, wrapDamage(err)
		}
		if v != nil {
			entries++
		}
	}
	return entries, nil
}

// newest returns the path of the file with the highest name of those that end in kind.
func newest(t *testing.T, fs vfs.FS, kind string) string {
	names, err := fs.List("log")
	require.NoError(t, err)
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, kind) })
	require.NotEmpty(t, names)
	return "log/" + slices.Max(names)
}

func contents(t *testing.T, fs vfs.FS, name string) []byte {
	f, err := fs.Open(name)
	require.NoError(t, err)
	text, err := io.ReadAll(f)
	require.NoError(t, errors.Join(err, f.Close()))
	return text
}
