package machine

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestOneConsoleWriter checks that only one session may write to the serial port of a VM, until it ends or another one
// takes over, and that sessions of other VMs do not matter.
func TestOneConsoleWriter(t *testing.T) {
	s := &MachineSet{writers: map[cloud.VMID]*consoleWriter{}}
	first, release, err := s.claimWriter(t.Context(), "a", false)
	require.NoError(t, err)
	_, releaseOther, err := s.claimWriter(t.Context(), "b", false)
	require.NoError(t, err)
	_, _, err = s.claimWriter(t.Context(), "a", false)
	require.ErrorIs(t, err, errConsoleInUse)
	require.NoError(t, first.Err())

	// A session that takes over waits until the first one has ended.
	waited := make(chan struct{})
	go func() {
		<-first.Done()
		close(waited)
		release()
	}()
	second, releaseSecond, err := s.claimWriter(t.Context(), "a", true)
	require.NoError(t, err)
	<-waited
	require.ErrorIs(t, context.Cause(first), errConsoleTakenOver)
	_, _, err = s.claimWriter(t.Context(), "a", false)
	require.ErrorIs(t, err, errConsoleInUse)
	require.NoError(t, second.Err())
	releaseSecond()
	releaseOther()
	require.Empty(t, s.writers)

	_, release, err = s.claimWriter(t.Context(), "a", false)
	require.NoError(t, err)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = s.claimWriter(canceled, "a", true)
	require.ErrorIs(t, err, context.Canceled)
	release()
}
