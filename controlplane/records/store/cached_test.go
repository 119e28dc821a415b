package store_test

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// TestChangingARecordLeavesTheCacheAlone changes a record that Get returned, including its slices and maps. Later reads
// of the same record from the cache must not show the changes.
func TestChangingARecordLeavesTheCacheAlone(t *testing.T) {
	type item struct {
		Name  string
		Raw   []byte
		List  []string
		Pairs map[string]string
		Sub   *int
	}
	made := func() *item {
		return &item{Name: "a", Raw: []byte("raw"), List: []string{"x", "y"}, Pairs: map[string]string{"k": "v"}, Sub: new(7)}
	}
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: true, ValueCacheBytes: 1 << 20})
	require.NoError(t, err)
	defer engine.Close()
	require.NoError(t, engine.AwaitKeyIndex(t.Context()))
	s := store.New(store.Options{Engine: engine, Proposer: store.NewDirect(engine), PageKey: make([]byte, 32)})
	items := store.NewTable[item]("item")
	_, err = s.Update(t.Context(), func(tx *store.Tx) error { items.Put(tx, made(), "i"); return nil })
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, s.View(t.Context(), func(v *store.View) error {
			got, err := items.Get(v, "i")
			require.NoError(t, err)
			require.Equal(t, made(), got)
			got.Name, got.Raw[0], got.List[0], got.Pairs["k"], *got.Sub = "b", 'R', "z", "w", 8
			return nil
		}))
	}
	require.Equal(t, int64(1), engine.Stats().Gets, "the reads were not from the cache")
}
