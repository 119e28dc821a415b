package snapfile

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCheckTreeRefusesCorruptPages checks that checkTree refuses structures that would make bbolt read outside of the
// file, or loop forever.
func TestCheckTreeRefusesCorruptPages(t *testing.T) {
	const size = minPageSize
	valid := smallDatabase(t)
	page := func(b []byte, id uint64) []byte { return b[id*size : (id+1)*size] }
	find := func(kind uint16) uint64 {
		m, known, _, err := readMeta(bytes.NewReader(valid))
		require.NoError(t, err)
		require.True(t, known)
		for id := uint64(2); id < m.pages; id++ {
			// Free pages keep their old type, so only pages that the tree references count.
			p := page(valid, id)
			if binary.LittleEndian.Uint16(p[8:]) == kind && reaches(t, valid, id) {
				return id
			}
		}
		t.Fatalf("no page of kind %d", kind)
		return 0
	}
	branch, leaf := find(branchPage), find(leafPage)
	child := func(p []byte) []byte { return p[pageHeader+8:] }
	require.NoError(t, checkTree(bytes.NewReader(valid)))
	for name, c := range map[string]struct {
		id     uint64
		change func(p []byte)
		want   string
	}{
		"child outside of the file":    {branch, func(p []byte) { binary.LittleEndian.PutUint64(child(p), 1<<40) }, "outside of the file"},
		"meta page as child":           {branch, func(p []byte) { binary.LittleEndian.PutUint64(child(p), 1) }, "outside of the file"},
		"page as its own child":        {branch, func(p []byte) { binary.LittleEndian.PutUint64(child(p), branch) }, "used twice"},
		"same child twice":             {branch, func(p []byte) { copy(child(p)[pageElement:], child(p)[:8]) }, "used twice"},
		"no children":                  {branch, func(p []byte) { binary.LittleEndian.PutUint16(p[10:], 0) }, "without elements"},
		"unknown page type":            {branch, func(p []byte) { binary.LittleEndian.PutUint16(p[8:], 0x40) }, "of unknown type"},
		"other page ID":                {leaf, func(p []byte) { binary.LittleEndian.PutUint64(p, leaf+1) }, "header has another ID"},
		"overflow":                     {leaf, func(p []byte) { binary.LittleEndian.PutUint32(p[12:], 1<<20) }, "longer than the file"},
		"too many elements":            {leaf, func(p []byte) { binary.LittleEndian.PutUint16(p[10:], 1000) }, "more elements"},
		"key after the page":           {leaf, func(p []byte) { binary.LittleEndian.PutUint32(p[pageHeader+8:], 5000) }, "outside of the page"},
		"key inside the element table": {leaf, func(p []byte) { binary.LittleEndian.PutUint32(p[pageHeader+4:], 0) }, "outside of the page"},
		"key of a branch":              {branch, func(p []byte) { binary.LittleEndian.PutUint32(p[pageHeader+4:], 5000) }, "outside of the page"},
	} {
		b := slices.Clone(valid)
		c.change(page(b, c.id))
		err := checkTree(bytes.NewReader(b))
		require.ErrorIs(t, err, ErrCorrupt, name)
		require.ErrorContains(t, err, c.want, name)
	}
}

// reaches reports whether the tree references the page with this ID.
func reaches(t *testing.T, b []byte, id uint64) bool {
	t.Helper()
	m, _, _, err := readMeta(bytes.NewReader(b))
	require.NoError(t, err)
	walk := &tree{r: bytes.NewReader(b), meta: m, visited: make([]uint64, m.pages/64+1)}
	require.NoError(t, walk.page(m.root, 0))
	return walk.visited[id/64]&(1<<(id%64)) != 0
}
