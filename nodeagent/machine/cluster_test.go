package machine

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestAnotherCluster moves the host to a cluster that was restored from a backup with fewer starts of a VM. The VM's
// guest must continue and be reported as running, also by the next agent, and it must be possible to stop and start it.
// A guest whose VM the new cluster does not have must keep running.
func TestAnotherCluster(t *testing.T) {
	l := newLab(t)
	known, young := l.blank(1), on(l.blank(2))
	for range 3 {
		known = on(known)
		l.assign(known, young)
		l.sees(known, cloud.ObservedRunning)
		known = off(known, 0)
		l.assign(known, young)
		l.sees(known, cloud.ObservedBuilt)
	}
	known = on(known)
	l.assign(known, young)
	pids := []uint32{l.sees(known, cloud.ObservedRunning).PID, l.sees(young, cloud.ObservedRunning).PID}
	launched := l.Counts().Launches

	l.stop()
	l.cluster = "12"
	l.start()
	known = with(l.blank(1), func(w *agentv1.AssignedVm) { w.Power, w.Starts = agentv1.Power_POWER_ON, 2 })
	orphan := &agentv1.AssignedVm{VmId: young.VmId, Power: agentv1.Power_POWER_ORPHANED}
	l.assign(known, orphan)
	o := l.until(cloud.VMID(known.VmId), "taken over", func(o cloud.Observation) bool { return o.StartsDone == 2 })
	require.Equal(t, cloud.ObservedRunning, o.Observed)
	require.Equal(t, pids[0], o.PID)
	o = l.until(cloud.VMID(young.VmId), "said", func(o cloud.Observation) bool { return o.LastError != "" })
	require.Equal(t, pids[1], o.PID)
	require.Contains(t, o.LastError, "no record of this VM")
	l.stop()
	l.start()
	l.assign(known, orphan)
	require.Equal(t, pids[0], l.sees(known, cloud.ObservedRunning).PID)
	require.EqualValues(t, 5, launched)
	require.Zero(t, l.Counts().Launches)

	known = off(known, 0)
	l.assign(known, orphan)
	l.sees(known, cloud.ObservedBuilt)
	known = on(known)
	l.assign(known, orphan)
	require.NotEqual(t, pids[0], l.sees(known, cloud.ObservedRunning).PID)
	require.NoError(t, syscall.Kill(int(pids[1]), 0), "the guest must keep running")

	// After AdoptCounters, a guest that ends while no agent runs is still reported with the cause.
	l.stop()
	l.cluster = "13"
	l.start()
	back := with(l.blank(1), func(w *agentv1.AssignedVm) { w.Power, w.Starts = agentv1.Power_POWER_ON, 1 })
	l.assign(back, orphan)
	o = l.until(cloud.VMID(back.VmId), "taken over", func(o cloud.Observation) bool { return o.StartsDone == 1 })
	l.stop()
	kill9(t, o.PID)
	l.start()
	l.assign(back, orphan)
	require.Contains(t, l.sees(back, cloud.ObservedEnded).LastError, "ended while the agent was away")
}
