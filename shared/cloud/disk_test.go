package cloud

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const someVolume = VolumeID("0190a000-0000-7000-8000-0000000000f1")

func volumeDisk(id string) Disk {
	return Disk{ID: id, Volume: someVolume, Bus: BusVirtio, Cache: CacheWriteback}
}

// TestDiskOfStoppedVM attaches a disk to a stopped VM and detaches it. Both take effect at once.
func TestDiskOfStoppedVM(t *testing.T) {
	root := Disk{ID: "root", Blank: true, SizeGiB: 1, BootIndex: 1}
	vm := VM{State: Stopped, Spec: Spec{Disks: []Disk{root}}, Disks: []ResolvedDisk{{ID: "root", SizeBytes: 1 << 30}}, Generation: 1}
	vm.AttachDisk(volumeDisk("data"))
	require.Equal(t, []ResolvedDisk{{ID: "data", Bus: BusVirtio, Cache: CacheWriteback, Volume: someVolume}, {ID: "root", SizeBytes: 1 << 30}}, vm.Disks,
		"disks must be in boot order, and those that the VM has must stay as they are")
	require.EqualValues(t, 2, vm.Generation)
	vm.DetachDisk(vm.FindDisk("data"))
	require.Equal(t, []Disk{root}, vm.Spec.Disks)
	require.Len(t, vm.Disks, 1)
}

// TestDiskOfRunningVM attaches a disk to a running VM and detaches it. Each takes effect when the host has reported it.
func TestDiskOfRunningVM(t *testing.T) {
	vm := VM{State: Running, Desired: Desired{On: true}, Generation: 1}
	report := func(disks ...DiskObservation) bool {
		return vm.Observe(Observation{Generation: vm.Generation, Observed: ObservedRunning, Disks: disks}, 1)
	}
	vm.AttachDisk(volumeDisk("data"))
	report()
	require.Equal(t, DeviceAttaching, vm.Spec.Disks[0].Change)
	report(DiskObservation{ID: "data", Attached: true})
	require.Equal(t, DeviceUnchanged, vm.Spec.Disks[0].Change)

	vm.DetachDisk(0)
	report(DiskObservation{ID: "data", Attached: true})
	require.Len(t, vm.Spec.Disks, 1, "the guest still has the disk")
	report(DiskObservation{ID: "data", Attached: true, Error: "the guest did not release the device"})
	require.Equal(t, DeviceUnchanged, vm.Spec.Disks[0].Change)
	require.Equal(t, &DiskRefusal{"data", "the guest did not release the device"}, vm.DiskRefusal)

	vm.DetachDisk(0)
	require.Nil(t, vm.DiskRefusal)
	report()
	require.Empty(t, vm.Spec.Disks)
	require.Empty(t, vm.Disks)
}

// TestDiskThatTheHostRefuses checks that a disk that the host could not attach is removed from the VM, and that a
// report with an older generation changes nothing.
func TestDiskThatTheHostRefuses(t *testing.T) {
	vm := VM{State: Running, Desired: Desired{On: true}, Generation: 1}
	vm.AttachDisk(volumeDisk("data"))
	old := Observation{Generation: 1, Observed: ObservedRunning, Disks: []DiskObservation{{ID: "data", Error: "no free slot"}}}
	require.False(t, vm.Observe(old, 1))
	old.Generation = vm.Generation
	require.True(t, vm.Observe(old, 1))
	require.Empty(t, vm.Spec.Disks)
	require.Equal(t, "no free slot", vm.DiskRefusal.Error)
}

// TestDiskOfVMThatEnds checks that a pending attachment or detachment takes effect when the VM's process has ended.
func TestDiskOfVMThatEnds(t *testing.T) {
	vm := VM{State: Running, Desired: Desired{On: true}, Generation: 1}
	vm.AttachDisk(volumeDisk("a"))
	vm.AttachDisk(Disk{ID: "b", Volume: "other"})
	vm.DetachDisk(1)
	vm.Observe(Observation{Generation: vm.Generation, Observed: ObservedEnded, Exit: ExitGuest, StartsDone: 1}, 1)
	require.Len(t, vm.Spec.Disks, 1)
	require.Equal(t, DeviceUnchanged, vm.Spec.Disks[0].Change)
	require.Equal(t, Stopped, vm.State)
}
