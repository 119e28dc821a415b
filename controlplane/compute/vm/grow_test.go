package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func growsDisks(n *cloud.Node) { n.Features = map[string]string{cloud.FeatureDiskGrowth: ""} }

// TestGrowDisk makes a disk larger, of VMs in different states. The host must receive the new size, and capacity and
// quota must count it.
func TestGrowDisk(t *testing.T) {
	for _, state := range []cloud.State{cloud.Stopped, cloud.Running} {
		w := newWorld(t)
		w.AddHost("h1", plenty(), growsDisks)
		before := w.createInState(state, "web")
		grown, err := w.vms.Update(w.as(acme, ""), acme, before.ID, Change{DiskSizes: map[string]uint64{"a": 7}})
		require.NoError(t, err)
		require.Greater(t, grown.Generation, before.Generation, "the host must receive the change")
		require.Nil(t, grown.Resize)
		require.Equal(t, state, grown.State)
		require.EqualValues(t, 7, grown.Spec.Disks[0].SizeGiB)
		require.EqualValues(t, 7<<30, convert.Assigned(&grown).GetDisks()[0].GetSizeBytes())
		require.EqualValues(t, 7, w.allocated(before.Node).StorageGiB)
		require.EqualValues(t, 7, w.quotaUsage().StorageGiB)

		disks := visibleDisks(grown.Spec.Disks)
		again, err := w.vms.Update(w.as(acme, ""), acme, before.ID, Change{Disks: disks})
		require.NoError(t, err)
		require.Equal(t, grown, again, "a repeat must change nothing")
		disks[0].SizeGiB = 8
		again, err = w.vms.Update(w.as(acme, ""), acme, before.ID, Change{Disks: disks})
		require.NoError(t, err)
		require.EqualValues(t, 8, w.allocated(before.Node).StorageGiB)
		require.EqualValues(t, 8<<30, convert.Assigned(&again).GetDisks()[0].GetSizeBytes())
	}
}

// TestGrowDiskWhileResizing makes a disk larger while a change of the memory waits for the next start.
func TestGrowDiskWhileResizing(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty(), growsDisks)
	vm := w.createInState(cloud.Running, "web")
	w.report(vm.ID, cloud.ObservedRunning, launched(vm.Generation, 2, 512))
	resized := w.resize(vm.ID, 4, 1024)
	grown, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{DiskSizes: map[string]uint64{"a": 7}})
	require.NoError(t, err)
	require.Equal(t, resized.Resize, grown.Resize)
	require.EqualValues(t, 512, grown.Spec.Memory.SizeMiB)
	assigned := convert.Assigned(&grown)
	require.EqualValues(t, 7<<30, assigned.GetDisks()[0].GetSizeBytes())
	require.EqualValues(t, 1024, assigned.GetMemoryMib())
	ended := w.report(vm.ID, cloud.ObservedEnded, func(o *cloud.Observation) { o.Exit = cloud.ExitGuest })
	require.EqualValues(t, 7, ended.Spec.Disks[0].SizeGiB)
	require.EqualValues(t, 1024, ended.Spec.Memory.SizeMiB)
}

// TestGrowDiskRefused makes changes of disks that must be refused, and checks that they change nothing.
func TestGrowDiskRefused(t *testing.T) {
	old := func(n *cloud.Node) { n.Features = nil }
	for name, tc := range map[string]struct {
		host   func(*cloud.Node)
		change func(disks []cloud.Disk) Change
		code   fault.Kind
		text   string
	}{
		"smaller, by ID": {growsDisks, func([]cloud.Disk) Change { return Change{DiskSizes: map[string]uint64{"a": 4}} },
			fault.InvalidArgument, "cannot be made smaller"},
		"smaller": {growsDisks, func(d []cloud.Disk) Change { d[0].SizeGiB = 4; return Change{Disks: d} },
			fault.InvalidArgument, "cannot be made smaller"},
		"another bus": {growsDisks, func(d []cloud.Disk) Change { d[0].SizeGiB, d[0].Bus = 6, cloud.BusSCSI; return Change{Disks: d} },
			fault.InvalidArgument, "can only make disks larger"},
		"another disk": {growsDisks, func(d []cloud.Disk) Change { d[0].ID = "other"; return Change{Disks: d} },
			fault.InvalidArgument, "can only make disks larger"},
		"no disk": {growsDisks, func(d []cloud.Disk) Change {
			return Change{Disks: append(d, cloud.Disk{ID: "more", SizeGiB: 1, Blank: true})}
		},
			fault.InvalidArgument, "can only make disks larger"},
		"unknown ID": {growsDisks, func([]cloud.Disk) Change { return Change{DiskSizes: map[string]uint64{"nosuch": 6}} },
			fault.InvalidArgument, "has no disk nosuch"},
		"size above the limit": {growsDisks, func([]cloud.Disk) Change { return Change{DiskSizes: map[string]uint64{"a": cloud.MaxDiskGiB + 1}} },
			fault.InvalidArgument, "must be 1 to 65536"},
		"more than the host has": {growsDisks, func([]cloud.Disk) Change { return Change{DiskSizes: map[string]uint64{"a": 5000}} },
			fault.ResourceExhausted, "the host of VM web"},
		"agent of an earlier version": {old, func([]cloud.Disk) Change { return Change{DiskSizes: map[string]uint64{"a": 6}} },
			fault.FailedPrecondition, "the agent of its host is too old"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.AddHost("h1", plenty(), tc.host)
			vm := w.createInState(cloud.Stopped, "web")
			_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, tc.change(visibleDisks(vm.Spec.Disks)))
			require.True(t, fault.Is(err, tc.code), "%v", err)
			require.ErrorContains(t, err, tc.text)
			require.Equal(t, vm, w.get(vm.ID))
			require.EqualValues(t, 5, w.allocated(vm.Node).StorageGiB)
		})
	}
}

// TestSizesUnderOlderLeader checks that a VM whose disks a leader of an earlier version did not change is noticed.
func TestSizesUnderOlderLeader(t *testing.T) {
	vm := &cloud.VM{Spec: cloud.Spec{Disks: []cloud.Disk{{ID: "a", SizeGiB: 5}}}}
	require.True(t, hasSizes(vm, nil))
	require.True(t, hasSizes(vm, map[string]uint64{"a": 5}))
	require.False(t, hasSizes(vm, map[string]uint64{"a": 7}))
	require.False(t, hasSizes(vm, map[string]uint64{"b": 5}))
}
