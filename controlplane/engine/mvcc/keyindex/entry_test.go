package keyindex

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// TestEntry checks that NewEntry keeps all metadata of a version without a lease, and that the entry is partial, with
// only the mod revision, if the version has a lease or a number does not fit.
func TestEntry(t *testing.T) {
	const far = 1 << 40
	for name, c := range map[string]struct {
		v       command.Meta
		partial bool
	}{
		"new key":                              {command.Meta{CreateRevision: 7, ModRevision: 7, Version: 1}, false},
		"high revisions":                       {command.Meta{CreateRevision: far, ModRevision: far + 9, Version: 3, Size: 8 << 20}, false},
		"highest values that fit":              {command.Meta{CreateRevision: 1, ModRevision: 1 + math.MaxUint32, Version: math.MaxUint32, Size: math.MaxUint32 - 1}, false},
		"created more than 2^32 revisions ago": {command.Meta{CreateRevision: 1, ModRevision: 2 + math.MaxUint32, Version: 1}, true},
		"version above 2^32":                   {command.Meta{CreateRevision: 1, ModRevision: far, Version: 1 + math.MaxUint32}, true},
		"version above 2^32, created recently": {command.Meta{CreateRevision: far, ModRevision: far, Version: 1 + math.MaxUint32}, true},
		"size of 2^32 - 1":                     {command.Meta{CreateRevision: 1, ModRevision: 1, Version: 1, Size: math.MaxUint32}, true},
		"key with a lease":                     {command.Meta{CreateRevision: 1, ModRevision: 1, Version: 1, Lease: 5}, true},
	} {
		m := NewEntry(c.v)
		require.True(t, m.Live(), name)
		require.Equal(t, c.v.ModRevision, m.ModRevision(), name)
		require.Equal(t, c.partial, m.Partial(), name)
		if !c.partial {
			require.Equal(t, c.v, m.Meta(), name)
		}
	}
	require.Equal(t, Entry{}, NewEntry(command.Meta{}))
	require.False(t, Entry{}.Live())
}
