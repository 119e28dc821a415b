package cloud

import (
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Keys of VM metadata that configure the virtual machine itself. They can be changed only while the VM is STOPPED.
const (
	// FirmwareKey selects the firmware: bios or uefi. The default is bios, and uefi with secure boot.
	FirmwareKey = "trivet/firmware"
	// OSTypeKey is the kind of the guest's operating system: linux, which is the default, or windows.
	OSTypeKey = "trivet/os-type"
	// RTCKey is the time that the guest's clock has at its start: utc or localtime, the host's local time. The default is
	// localtime for Windows and utc otherwise.
	RTCKey = "trivet/rtc"
	// CDROMKey is the ID of the image in the CD-ROM drive. Without it the VM has no drive.
	CDROMKey = "trivet/cdrom"
	// RescueKey is the ID of an image from which the VM boots instead of its own disks, so that a user can repair these.
	// The VM then has a rescue disk with the content of the image, before its own disks in the boot order.
	RescueKey = "trivet/rescue"
	// CPUPolicyKey determines the CPUs of the host on which the vCPUs run: shared, or dedicated. The default is shared.
	CPUPolicyKey = "trivet/cpu-policy"
)

// machineKeys has the allowed values of each metadata key that configures the virtual machine. A nil entry means that
// the value is the ID of an image.
var machineKeys = map[string][]string{
	FirmwareKey: {"bios", "uefi"}, OSTypeKey: {"linux", "windows"}, RTCKey: {"utc", "localtime"}, CDROMKey: nil, RescueKey: nil,
	CPUPolicyKey: {"shared", "dedicated"},
}

// Names of the features of virtual machines that not every host supports. Hosts report which features they support
// (agent.v1.MachineFeature).
const (
	FeatureUEFI       = "uefi"
	FeatureSecureBoot = "secure-boot"
	FeatureTPM        = "tpm"
	FeatureCDROM      = "cdrom"
	FeatureRescue     = "rescue"
	FeatureOSType     = "os-type"
	FeatureHugepages  = "hugepages"

	FeatureDedicatedCPUs = "dedicated-cpus"
	// FeatureVolumeMigration: the agent can migrate VMs with volumes that several hosts can use.
	FeatureVolumeMigration = "volume-migration"
	// FeatureEncryptedMigration: the agent can migrate VMs with encrypted volumes of shared pools.
	FeatureEncryptedMigration = "encrypted-volume-migration"
	// FeatureFirmwareMigration: the agent can migrate VMs with UEFI, a TPM, a CD-ROM drive or a rescue disk.
	FeatureFirmwareMigration = "firmware-migration"
	// FeatureRunningMigration: as the target of a migration, the agent can receive memory while the guest runs on the
	// source.
	FeatureRunningMigration = "running-migration"
	// FeatureDiskGrowth: the agent grows disks that are not volumes, and accepts a disk that is smaller than its desired
	// size.
	FeatureDiskGrowth = "disk-growth"
	// FeatureMemoryChannels: as the target of a migration, the agent and its QEMU can receive memory over several
	// connections (Migration.MemoryChannels).
	FeatureMemoryChannels = "memory-channels"
	// FeatureGuestCalls: the agent executes calls of guest agents (agent.v1.GuestRequest).
	FeatureGuestCalls = "guest-calls"
	// FeatureConsoles: the agent opens consoles (agent.v1.OpenConsoleRequest).
	FeatureConsoles = "consoles"
)

// RescueDisk is the ID of the rescue disk. No other disk can have it.
const RescueDisk = "trivet-rescue"

// CheckMachine returns an InvalidArgument fault if the metadata of a VM has an invalid value for a key of machineKeys,
// or if such a value contradicts the spec.
func CheckMachine(metadata map[string]string, s *Spec) error {
	for key, values := range machineKeys {
		value := metadata[key]
		switch {
		case value == "":
		case values == nil && CheckUUID(key, value) != nil:
			return fault.Invalid("metadata", "%s must be the ID of an image, not %q", key, value)
		case values != nil && !slices.Contains(values, value):
			return fault.Invalid("metadata", "%s must be %s or %s, not %q", key, values[0], values[1], value)
		}
	}
	sata := 0
	for _, d := range s.Disks {
		if d.Bus == BusSATA {
			sata++
		}
	}
	switch {
	case s.Security.SecureBoot && metadata[FirmwareKey] == "bios":
		return fault.Invalid("metadata", "%s is bios, but secure boot needs uefi", FirmwareKey)
	case s.Security.SecureBoot && s.Boot.Kernel != "":
		return fault.Invalid("spec.security.secure_boot", "cannot be used with spec.boot.kernel: the firmware must load the kernel to verify it")
	case metadata[RescueKey] != "" && len(s.Disks) == MaxDisks:
		return fault.Invalid("metadata", "%s: the VM has %d disks, so it can have no rescue disk", RescueKey, MaxDisks)
	case metadata[CDROMKey] != "" && metadata[OSTypeKey] == "windows" && sata == busSlots[BusSATA]:
		return fault.Invalid("spec.disks", "at most %d on the sata bus of a VM with a CD-ROM drive, got %d", sata-1, sata)
	}
	return nil
}

// SameMachine reports whether two versions of a VM's metadata configure the same virtual machine.
func SameMachine(a, b map[string]string) bool {
	for key := range machineKeys {
		if a[key] != b[key] {
			return false
		}
	}
	return true
}

// UEFI reports whether the VM's firmware is UEFI instead of BIOS.
func (vm *VM) UEFI() bool { return vm.Spec.Security.SecureBoot || vm.Metadata[FirmwareKey] == "uefi" }

// Windows reports whether the guest's operating system is Windows, according to the VM's metadata.
func (vm *VM) Windows() bool { return vm.Metadata[OSTypeKey] == "windows" }

// LocalClock reports whether the guest's clock has the host's local time at its start.
func (vm *VM) LocalClock() bool {
	if rtc := vm.Metadata[RTCKey]; rtc != "" {
		return rtc == "localtime"
	}
	return vm.Windows()
}

// Images returns the IDs of all images that the VM uses: those of its spec, of its CD-ROM drive and of its rescue disk.
// Each ID occurs once.
func (vm *VM) Images() []ImageID {
	ids := vm.Spec.Images()
	for _, key := range []string{CDROMKey, RescueKey} {
		if id := ImageID(vm.Metadata[key]); id != "" && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// Features returns the names of the features that the VM's host must support.
func (vm *VM) Features() (all []string) {
	for _, f := range []struct {
		name   string
		needed bool
	}{
		{FeatureUEFI, vm.UEFI()},
		{FeatureSecureBoot, vm.Spec.Security.SecureBoot},
		{FeatureTPM, vm.Spec.Security.TPM},
		{FeatureCDROM, vm.Metadata[CDROMKey] != ""},
		{FeatureRescue, vm.Metadata[RescueKey] != ""},
		{FeatureOSType, vm.Windows() || vm.LocalClock()},
		{FeatureHugepages, vm.hugepages()},
		{FeatureDedicatedCPUs, vm.DedicatedCPUs()},
	} {
		if f.needed {
			all = append(all, f.name)
		}
	}
	return all
}

// MigrationFeatures returns the names of the features that both hosts of a migration of the VM must support. Its volumes
// can need more (see Volume.MigrationFeatures).
func (vm *VM) MigrationFeatures() (all []string) {
	if vm.UEFI() || vm.Spec.Security.TPM || vm.Metadata[CDROMKey] != "" || vm.Metadata[RescueKey] != "" {
		all = append(all, FeatureFirmwareMigration)
	}
	return all
}

// DedicatedCPUs reports whether each vCPU of the VM runs on a CPU of the host that it does not share.
func (vm *VM) DedicatedCPUs() bool { return vm.Metadata[CPUPolicyKey] == "dedicated" }

// hugepages reports whether the present process of the VM, or its next one, needs huge pages.
func (vm *VM) hugepages() bool {
	now, next := vm.Spec.Memory, vm.NextSpec().Memory
	return now != nil && now.Hugepages || next != nil && next.Hugepages
}

// StateOnHost returns a text that names the state of the VM, other than its disks, that is stored only on its host.
// Such a VM can be moved to another host only by a migration. StateOnHost returns "" if there is no such state. The text
// is the predicate of a sentence whose subject is the VM.
func (vm *VM) StateOnHost() string {
	switch {
	case vm.Spec.Security.TPM:
		return "has a TPM, whose state is on its host only"
	case vm.UEFI():
		return "has UEFI firmware, whose NVRAM is on its host only"
	}
	return ""
}

// MissingFeature returns the first of these features that the host does not support, or "" if the host supports all.
func (n *Node) MissingFeature(features []string) string {
	for _, name := range features {
		if problem, known := n.Features[name]; !known || problem != "" {
			return name
		}
	}
	return ""
}

// FeatureShortage returns the reason why the host cannot run a VM with these features, or "" if it can. The text is the
// predicate of a sentence whose subject is the host.
func (n *Node) FeatureShortage(features []string) string {
	name := n.MissingFeature(features)
	if name == "" {
		return ""
	}
	problem, known := n.Features[name]
	if !known {
		problem = "its agent is too old"
	}
	return "does not serve " + name + ": " + problem
}
