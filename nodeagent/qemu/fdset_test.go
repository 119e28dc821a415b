package qemu

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// TestFDSetsAreNotReused takes numbers of descriptor sets for a disk and for the copy of another disk before QEMU has
// either set, as PlugDisk and CopyDisks can do at once. Then it takes a number after QEMU has removed all sets.
func TestFDSetsAreNotReused(t *testing.T) {
	ours, theirs := net.Pipe()
	queries := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		serveQMP(theirs, func(command string) { // QEMU has no sets, whenever it is asked
			if command == "query-fdsets" {
				queries++
			}
		})
	}()
	conn, err := qmp.New(t.Context(), ours)
	require.NoError(t, err)
	p := &Process{}
	taken := map[int]bool{}
	for _, count := range []int{2, 1, 2} {
		first, err := p.newFDSets(t.Context(), conn, count)
		require.NoError(t, err)
		for set := first; set < first+count; set++ {
			require.GreaterOrEqual(t, set, firstHotSet)
			require.False(t, taken[set], "two disks have one descriptor set")
			taken[set] = true
		}
	}
	require.NoError(t, conn.Close())
	_ = theirs.Close()
	<-done
	require.Equal(t, 1, queries)
}
