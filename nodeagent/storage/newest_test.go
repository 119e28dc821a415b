package storage

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestWithNewestVolumes checks that a VM gets the newer desired state of a volume, either from the list of volumes or
// from its own disk, and that WithNewestVolumes does not modify its arguments.
func TestWithNewestVolumes(t *testing.T) {
	disks := func(generations ...uint64) *agentv1.AssignedVm {
		v := &agentv1.AssignedVm{Disks: []*agentv1.AssignedDisk{{Id: "root"}}}
		for _, g := range generations {
			v.Disks = append(v.Disks, &agentv1.AssignedDisk{Volume: &agentv1.AssignedVolume{VolumeId: string(vol), Generation: g}})
		}
		return v
	}
	vms := map[cloud.VMID]*agentv1.AssignedVm{"older": disks(1), "newer": disks(3), "none": disks()}
	grown := &agentv1.AssignedVolume{VolumeId: string(vol), Generation: 2, SizeBytes: 2 * mib}
	out := WithNewestVolumes(vms, map[cloud.VolumeID]*agentv1.AssignedVolume{vol: grown})
	require.Equal(t, grown, out["older"].Disks[1].Volume)
	require.EqualValues(t, 1, vms["older"].Disks[1].Volume.Generation)
	require.Same(t, vms["newer"], out["newer"])
	require.Same(t, vms["none"], out["none"])
	require.Same(t, vms["older"], WithNewestVolumes(vms, nil)["older"])
}

// TestReleaseWithoutAssignment checks that the release of an RBD image fails while the host may still have the volume,
// and does nothing once the control plane has assigned the volumes without it.
func TestReleaseWithoutAssignment(t *testing.T) {
	h := newHost(t)
	require.ErrorIs(t, h.Release(t.Context(), "", vol, vm, 1), errNoKey)
	h.Assign(nil, true)
	require.ErrorIs(t, h.Release(t.Context(), "", vol, vm, 1), errNoKey)
	h.Assign(nil, false)
	require.NoError(t, h.Release(t.Context(), "", vol, vm, 1))
	h.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{vol: {VolumeId: string(vol), Rbd: &agentv1.RbdPool{}}}, false)
	require.ErrorIs(t, h.Release(t.Context(), "", vol, vm, 1), errNoRBD)
}
