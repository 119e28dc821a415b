package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Assigned returns the desired state of a VM as the message that is sent to the agent on its host.
func Assigned(vm *cloud.VM) *agentv1.AssignedVm {
	power := agentv1.Power_POWER_OFF
	if vm.Desired.On {
		power = agentv1.Power_POWER_ON
	}
	next := vm.NextSpec()
	sockets, cores := next.CPU.Topology()
	out := &agentv1.AssignedVm{
		VmId: string(vm.ID), Name: vm.Name, OrgId: string(vm.Org), ProjectId: string(vm.Project), Generation: vm.Generation,
		Power: power, StopGraceMs: vm.Desired.GraceMS, Reboots: vm.Desired.Reboots, Resets: vm.Desired.Resets, Starts: vm.Desired.Starts,
		Vcpus: next.CPU.VCPUs, Sockets: sockets, CoresPerSocket: cores, CpuModel: next.CPU.Model,
		MemoryMib: next.Memory.SizeMiB, Hugepages: next.Memory.Hugepages, Disks: assignedDisks(vm), Kernel: assignedImage(vm.Kernel),
		Initrd: assignedImage(vm.Initrd), Cmdline: vm.Spec.Boot.Cmdline, Nics: assignedNICs(vm.Spec.Network),
		MetadataTokensOptional: vm.TokensOptional(), RolledBackAttempt: vm.RolledBack,
	}
	if r := vm.LastMigration; out.RolledBackAttempt == 0 && r != nil && !r.Moved {
		out.RolledBackAttempt = r.Attempt // the record of an earlier version has no RolledBack
	}
	if out.CpuModel == "" {
		out.CpuModel = vm.BaselineCPU
	}
	assignMachine(out, vm)
	return out
}

// assignMachine sets the firmware, the TPM, the clock, the CD-ROM drive and the rescue disk. For a VM with a rescue
// disk it removes the kernel, so that the firmware boots from the rescue disk.
func assignMachine(out *agentv1.AssignedVm, vm *cloud.VM) {
	out.Firmware, out.OsType = agentv1.Firmware_FIRMWARE_BIOS, vmv1.OsType_OS_TYPE_LINUX
	if vm.UEFI() {
		out.Firmware = agentv1.Firmware_FIRMWARE_UEFI
	}
	if vm.Windows() {
		out.OsType = vmv1.OsType_OS_TYPE_WINDOWS
	}
	out.DedicatedCpus = vm.DedicatedCPUs()
	out.SecureBoot, out.Tpm, out.RtcLocalTime = vm.Spec.Security.SecureBoot, vm.Spec.Security.TPM, vm.LocalClock()
	out.Cdrom = assignedImage(vm.CDROM)
	if vm.Rescue != nil {
		out.Rescue = assignedDisk(*vm.Rescue)
		out.Kernel, out.Initrd, out.Cmdline = nil, nil, ""
	}
}

// AssignedMigration returns the message that tells the agent on the host on its role in the migration m. It returns nil
// if m is nil.
func AssignedMigration(m *cloud.Migration, on cloud.NodeID) *agentv1.AssignedMigration {
	if m == nil {
		return nil
	}
	out := &agentv1.AssignedMigration{Attempt: m.Attempt, Phase: agentv1.MigrationPhase(m.Phase), MemoryChannels: m.MemoryChannels}
	if on == m.Source {
		out.Role, out.PeerNodeId = agentv1.MigrationRole_MIGRATION_ROLE_SOURCE, string(m.Target)
		out.SendRunning = m.SendRunning
		if m.Phase >= cloud.MigrationTransfer {
			out.PeerAddress = m.Address
		}
		return out
	}
	out.Role, out.PeerNodeId, out.Machine = agentv1.MigrationRole_MIGRATION_ROLE_TARGET, string(m.Source), m.Machine
	if m.GiveUp {
		out.Phase = agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK
	}
	return out
}

// assignedNICs returns the NICs that the guest should have: all but those that are being detached.
func assignedNICs(all []cloud.NIC) (out []*agentv1.AssignedNic) {
	for _, n := range all {
		if n.Change == cloud.DeviceDetaching {
			continue
		}
		out = append(out, &agentv1.AssignedNic{
			Id: n.ID, PortId: n.PortID, VpcId: n.NetworkID, MacAddress: n.MAC, Model: vmv1.NicModel(n.Model), Mtu: uint32(n.MTU),
		})
	}
	return out
}

// assignedDisks returns the disks that the guest should have: all except those that are being detached. It does not set
// the field volume of disks that are volumes.
func assignedDisks(vm *cloud.VM) (out []*agentv1.AssignedDisk) {
	for _, d := range vm.Disks {
		if i := vm.FindDisk(d.ID); i < 0 || vm.Spec.Disks[i].Change != cloud.DeviceDetaching {
			out = append(out, assignedDisk(d))
		}
	}
	return out
}

// AssignedVolume returns the desired state of a volume as the message that is sent to the agent on the host on, which is
// the volume's host or the other host of a migration. It does not set the key of an encrypted volume, the RBD pool or the snapshots. Package controlplane/compute/volume sets them.
func AssignedVolume(v *cloud.Volume, on cloud.NodeID) *agentv1.AssignedVolume {
	limits := v.Limits()
	var source *agentv1.SnapshotSource
	if v.Source != nil {
		source = &agentv1.SnapshotSource{VolumeId: string(v.Source.Volume), SnapshotId: string(v.Source.Snapshot)}
	}
	vm, disk := v.VM, v.Disk
	if v.Ending { // The host must end the last attachment, as if the volume was detached.
		vm, disk = "", ""
	}
	out := &agentv1.AssignedVolume{
		Source:   source,
		VolumeId: string(v.ID), Generation: v.Generation, Pool: v.Pool, SizeBytes: v.SizeBytes(), Format: vmv1.VolumeFormat(v.Format),
		Image: assignedImage(v.Image), MustExist: v.Present || v.ExternalImage != "", AttachmentGeneration: v.AttachmentGeneration, VmId: string(vm),
		DiskId: disk, MaxIops: limits.IOPS, MaxBytesPerSecond: limits.BytesPerSecond, Encrypted: v.Encrypted,
		Flatten: v.Flatten, Fence: v.Fence, ExternalImage: v.ExternalImage, CheckImage: v.ExternalImage != "" && !v.Present,
		Migrated: v.Migrated,
	}
	if on == v.Other {
		out.Standby, out.Migrated, out.Flatten, out.Fence = true, false, false, false
		out.AttachmentGeneration = max(v.AttachmentGeneration, v.StandbyGeneration)
	}
	return out
}

// VolumeObservation returns an agent's observation of a volume as the message that the agent sends.
func VolumeObservation(o cloud.VolumeObservation) *agentv1.VolumeObservation {
	return &agentv1.VolumeObservation{
		VolumeId: string(o.Volume), Generation: o.Generation, Present: o.Present, SizeBytes: o.SizeBytes,
		FlushedGeneration: o.FlushedGeneration, Error: o.Error,
		Flattened: o.Flattened, FlattenPercent: o.FlattenPercent, Format: vmv1.VolumeFormat(o.Format),
		Snapshots: each(o.Snapshots, snapshotObservation),
	}
}

// VolumeObservationFrom converts the protobuf message of an agent to an observation of a volume. It is the inverse of
// VolumeObservation.
func VolumeObservationFrom(o *agentv1.VolumeObservation) cloud.VolumeObservation {
	return cloud.VolumeObservation{
		Volume: cloud.VolumeID(o.GetVolumeId()), Generation: o.GetGeneration(), Present: o.GetPresent(), SizeBytes: o.GetSizeBytes(),
		FlushedGeneration: o.GetFlushedGeneration(), Error: o.GetError(),
		Flattened: o.GetFlattened(), FlattenPercent: o.GetFlattenPercent(), Format: enum[cloud.VolumeFormat](o.GetFormat()),
		Snapshots: each(o.GetSnapshots(), snapshotObservationFrom),
	}
}

func assignedDisk(d cloud.ResolvedDisk) *agentv1.AssignedDisk {
	return &agentv1.AssignedDisk{
		Id: d.ID, SizeBytes: d.SizeBytes, Bus: vmv1.DiskBus(d.Bus), Cache: vmv1.DiskCache(d.Cache), Image: assignedImage(d.Image),
	}
}

func assignedImage(i *cloud.ImageRef) *agentv1.AssignedImage {
	if i == nil {
		return nil
	}
	return &agentv1.AssignedImage{ImageId: string(i.ID), Sha256: i.SHA256, SizeBytes: i.SizeBytes, Format: vmv1.ImageFormat(i.Format)}
}

// Observation returns an agent's observation of a VM as the message that the agent sends.
func Observation(o cloud.Observation) *agentv1.VmObservation {
	return &agentv1.VmObservation{
		VmId: string(o.VM), Generation: o.Generation, Observed: agentv1.Observed(o.Observed), Exit: agentv1.Exit(o.Exit),
		Pid: o.PID, StartedAt: o.StartedAt, IpAddresses: copySlice(o.Addresses), Usage: Usage(o.Usage), LastError: o.LastError,
		RebootsDone: o.RebootsDone, ResetsDone: o.ResetsDone, StartsDone: o.StartsDone, StopsWithLease: o.StopsWithLease, Nics: each(o.NICs, nicObservation),
		Disks: each(o.Disks, diskObservation), Migration: migrationObservation(o.Migration),
		LaunchGeneration: o.LaunchGeneration, Vcpus: o.VCPUs, MemoryMib: o.MemoryMiB, Guest: guestReport(o.Usage),
	}
}

// guestReport returns what a guest reports about itself, or nil if that is nothing.
func guestReport(u *cloud.Usage) *agentv1.GuestReport {
	if u == nil || len(u.GuestAddresses) == 0 {
		return nil
	}
	return &agentv1.GuestReport{IpAddresses: copySlice(u.GuestAddresses)}
}

func diskObservation(d cloud.DiskObservation) *agentv1.DiskObservation {
	return &agentv1.DiskObservation{Id: d.ID, Attached: d.Attached, Error: d.Error}
}

func diskObservationFrom(d *agentv1.DiskObservation) cloud.DiskObservation {
	return cloud.DiskObservation{ID: d.GetId(), Attached: d.GetAttached(), Error: d.GetError()}
}

func nicObservation(n cloud.NICObservation) *agentv1.NicObservation {
	return &agentv1.NicObservation{Id: n.ID, Attached: n.Attached, Error: n.Error}
}

func nicObservationFrom(n *agentv1.NicObservation) cloud.NICObservation {
	return cloud.NICObservation{ID: n.GetId(), Attached: n.GetAttached(), Error: n.GetError()}
}

// ObservationFrom converts the protobuf message of an agent to an observation. It is the inverse of Observation.
func ObservationFrom(o *agentv1.VmObservation) cloud.Observation {
	usage := UsageFrom(o.GetUsage())
	if usage != nil {
		usage.GuestAddresses = copySlice(o.GetGuest().GetIpAddresses())
	}
	return cloud.Observation{
		VM: cloud.VMID(o.GetVmId()), Generation: o.GetGeneration(), Observed: enum[cloud.Observed](o.GetObserved()),
		Exit: enum[cloud.Exit](o.GetExit()), PID: o.GetPid(), StartedAt: o.GetStartedAt(), Addresses: copySlice(o.GetIpAddresses()),
		Usage: usage, LastError: o.GetLastError(), RebootsDone: o.GetRebootsDone(),
		ResetsDone: o.GetResetsDone(), StartsDone: o.GetStartsDone(), StopsWithLease: o.GetStopsWithLease(), NICs: each(o.GetNics(), nicObservationFrom),
		Disks: each(o.GetDisks(), diskObservationFrom), Migration: migrationObservationFrom(o.GetMigration()),
		LaunchGeneration: o.GetLaunchGeneration(), VCPUs: o.GetVcpus(), MemoryMiB: o.GetMemoryMib(),
	}
}
