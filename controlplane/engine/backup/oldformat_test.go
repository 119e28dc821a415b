package backup

import (
	"bytes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOldArchiveIsRead checks that Extract reads testdata/before-age.backup, which the last program with the old
// container wrote.
func TestOldArchiveIsRead(t *testing.T) {
	text, err := os.ReadFile("testdata/before-age.backup")
	require.NoError(t, err)
	key := make([]byte, 32)
	for i := range key {
		key[i] = byte(i)
	}
	dir := t.TempDir()
	m, err := Extract(bytes.NewReader(text), key, dir)
	require.NoError(t, err)
	require.Equal(t, Manifest{Version: 1, Cluster: 7, Made: time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC), By: "before age",
		Groups: []Group{{ID: 1, Name: "system", Index: 12, Term: 3, Revision: 5}, {ID: 2, Name: "kv", Index: 9, Term: 3, Revision: 4}}}, m)
	for name, want := range map[string]string{"system/db/MANIFEST": "hello", "system/empty": "", "kv/db/000001.sst": string(bytes.Repeat([]byte("key value "), 150))} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
}

// TestBrokenOldArchive checks that Extract refuses an archive in the old container that is truncated, reordered,
// changed or extended, or read with another key.
func TestBrokenOldArchive(t *testing.T) {
	key := newKey()
	body := make([]byte, 3*pieceLen+17)
	rand.Read(body)
	var out bytes.Buffer
	sealed, err := newSealer(&out, key)
	require.NoError(t, err)
	tar := newTar(sealed)
	require.NoError(t, tar.file(manifestName, []byte(`{"version":1,"groups":[{"id":2,"name":"kv"}]}`)))
	require.NoError(t, tar.file("kv/x", body))
	require.NoError(t, tar.close())
	require.NoError(t, sealed.Close())
	text := out.Bytes()
	extract := func(text []byte, key []byte) error {
		_, err := Extract(bytes.NewReader(text), key, t.TempDir())
		return err
	}
	require.NoError(t, extract(text, key))
	require.EqualError(t, extract(text, newKey()), "the archive was made with another cluster key")
	require.ErrorContains(t, extract(append(slices.Clone(text), 0), key), "something follows its end")

	head := len(magic) + idLen + saltLen
	for at := head; at < len(text); at += 1 + len(text)/31 {
		require.ErrorContains(t, extract(text[:at], key), "is cut short", "at %d", at)
		changed := slices.Clone(text)
		changed[at] ^= 1
		require.Error(t, extract(changed, key), "at %d", at)
	}
	changed := slices.Clone(text)
	changed[head-1] ^= 1 // a bit of the salt
	require.ErrorContains(t, extract(changed, key), "is damaged, or was changed")

	// Two pieces are swapped; one is left out; all after the first are left out.
	size := 4 + pieceLen + 16
	first, second, rest := text[head:head+size], text[head+size:head+2*size], text[head+2*size:]
	require.ErrorContains(t, extract(slices.Concat(text[:head], second, first, rest), key), "is damaged, or was changed")
	require.ErrorContains(t, extract(slices.Concat(text[:head], first, rest), key), "is damaged, or was changed")
	require.ErrorContains(t, extract(slices.Concat(text[:head], first), key), "is cut short")
}

// sealer is a writer that encrypts in the old container. Close writes the last piece, without which the archive is
// incomplete.
type sealer struct {
	w      io.Writer
	aead   cipher.AEAD
	number uint64
	plain  []byte
	sealed []byte
}

func newSealer(w io.Writer, key []byte) (*sealer, error) {
	salt := make([]byte, saltLen)
	rand.Read(salt)
	id, aead, err := keys(key, salt)
	if err != nil {
		return nil, err
	}
	head := append(append([]byte(magic), id...), salt...)
	if _, err := w.Write(head); err != nil {
		return nil, err
	}
	return &sealer{w: w, aead: aead, plain: make([]byte, 0, pieceLen)}, nil
}

func (s *sealer) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if len(s.plain) == pieceLen {
			if err := s.piece(notLast); err != nil {
				return n, err
			}
		}
		take := min(len(p), pieceLen-len(s.plain))
		s.plain = append(s.plain, p[:take]...)
		p = p[take:]
		n += take
	}
	return n, nil
}

func (s *sealer) piece(last []byte) error {
	s.sealed = s.aead.Seal(append(s.sealed[:0], 0, 0, 0, 0), nonce(s.number), s.plain, last)
	binary.BigEndian.PutUint32(s.sealed, uint32(len(s.sealed)-4))
	s.number++
	s.plain = s.plain[:0]
	_, err := s.w.Write(s.sealed)
	return err
}

// Close encrypts and writes the last piece, marked as the last.
func (s *sealer) Close() error { return s.piece(isLast) }
