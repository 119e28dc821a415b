package uplink

import (
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestClearDuringWrite discards the assignment of a former identity while it is being written. It must not be on disk
// afterwards: the agent would use it under its new identity.
func TestClearDuringWrite(t *testing.T) {
	k, _, err := openAssignmentStore(t.TempDir(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	a := &Assignment{Term: 1, Revision: 1, VMs: map[cloud.VMID]*agentv1.AssignedVm{"a": {VmId: "a"}}}
	for n := range 100 {
		k.put(a)
		var writing sync.WaitGroup
		writing.Go(func() { require.NoError(t, k.write()) })
		time.Sleep(time.Duration(n%10) * 100 * time.Microsecond) // so that clear begins at different times of the write
		require.NoError(t, k.clear())
		writing.Wait()
		require.NoFileExists(t, filepath.Join(k.dir, assignmentFile))
	}
}
