package machine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// TestGrowthPlan checks when the plan grows a disk that is not a volume: before the CPUs of a launched guest run, and
// while a guest runs.
func TestGrowthPlan(t *testing.T) {
	want := &agentv1.AssignedVm{Power: agentv1.Power_POWER_ON, Starts: 1, Disks: []*agentv1.AssignedDisk{
		{Id: "root", SizeBytes: 4096, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO},
		{Id: "data", SizeBytes: 0, Volume: &agentv1.AssignedVolume{SizeBytes: 8192}},
	}}
	running := Observation{Record: Record{Built: true, Live: true, StartsDone: 1}, Guest: Running, PressedFor: -1}
	waiting := running
	waiting.Guest = Waiting
	for name, tc := range map[string]struct {
		o      Observation
		sizes  map[string]uint64
		action Action
	}{
		"running guest with a smaller disk":  {running, map[string]uint64{"root": 2048}, ResizeDisk},
		"launched guest with a smaller disk": {waiting, map[string]uint64{"root": 2048}, ResizeDisk},
		"disk of the desired size":           {running, map[string]uint64{"root": 4096}, Nothing},
		"launched guest, disk of that size":  {waiting, map[string]uint64{"root": 4096}, Resume},
		"larger disk":                        {running, map[string]uint64{"root": 8192}, Nothing},
		"size that could not be read":        {running, nil, Nothing},
		"volume":                             {running, map[string]uint64{"root": 4096, "data": 1}, Nothing},
		"disk that is not in the assignment": {running, map[string]uint64{"rescue": 1}, Nothing},
	} {
		tc.o.Sizes = tc.sizes
		tc.o.Volumes = []qemu.AttachedDisk{{Disk: qemu.Disk{ID: "data"}, Present: true, Size: 8192}}
		p := NextAction(want, tc.o)
		require.Equal(t, tc.action, p.Action, name)
		if tc.action == ResizeDisk {
			require.Equal(t, "root", p.Disk, name)
		}
	}
}
