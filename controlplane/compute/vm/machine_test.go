package vm

import (
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// allFeatures are the features of a host that serves everything.
func allFeatures() map[string]string {
	return map[string]string{cloud.FeatureUEFI: "", cloud.FeatureSecureBoot: "", cloud.FeatureTPM: "", cloud.FeatureCDROM: "",
		cloud.FeatureRescue: "", cloud.FeatureOSType: "", cloud.FeatureHugepages: "", cloud.FeatureDedicatedCPUs: ""}
}

// serve sets the features that a host reports, and waits until placements use them.
func (w *world) serve(host cloud.NodeID, features map[string]string) {
	w.t.Helper()
	w.update(func(tx *store.Tx) {
		n, err := node.Nodes.Get(tx, string(host))
		require.NoError(w.t, err)
		n.Features = features
		node.Nodes.Put(tx, n, string(host))
	})
	require.Eventually(w.t, func() bool {
		for _, c := range w.nodes.Fleet() {
			if c.Node.ID == host && maps.Equal(c.Node.Features, features) {
				return true
			}
		}
		return false
	}, 10*time.Second, time.Millisecond)
}

// TestMachineRefused checks which firmware, TPM and drives CreateVm refuses.
func TestMachineRefused(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	w.AwaitFleet()
	iso := w.image(1, 1<<20)
	private := w.image(2, 1<<20, func(i *cloud.Image) { i.Org = other.Org })
	packed := w.image(3, 1<<20, func(i *cloud.Image) { i.Format = cloud.FormatQCOW2 })
	features := allFeatures()
	features[cloud.FeatureTPM], features[cloud.FeatureHugepages] = "swtpm is not installed", "the host has none"
	delete(features, cloud.FeatureRescue)
	w.serve(host, features)
	with := func(key, value string) func(*CreateRequest) {
		return func(q *CreateRequest) { q.Metadata = map[string]string{key: value} }
	}
	secure := func(q *CreateRequest) { q.Spec.Security.SecureBoot = true }
	for says, c := range map[string]struct {
		kind   fault.Kind
		change []func(*CreateRequest)
	}{
		`trivet/firmware must be bios or uefi, not "grub"`:           {fault.InvalidArgument, []func(*CreateRequest){with(cloud.FirmwareKey, "grub")}},
		`trivet/os-type must be linux or windows, not "beos"`:        {fault.InvalidArgument, []func(*CreateRequest){with(cloud.OSTypeKey, "beos")}},
		`trivet/rtc must be utc or localtime, not "mars"`:            {fault.InvalidArgument, []func(*CreateRequest){with(cloud.RTCKey, "mars")}},
		`trivet/cdrom must be the ID of an image, not "/etc/shadow"`: {fault.InvalidArgument, []func(*CreateRequest){with(cloud.CDROMKey, "/etc/shadow")}},
		"no image " + string(private):                                {fault.NotFound, []func(*CreateRequest){with(cloud.CDROMKey, string(private))}},
		string(packed) + " is not RAW":                               {fault.InvalidArgument, []func(*CreateRequest){with(cloud.CDROMKey, string(packed))}},
		"secure boot needs uefi":                                     {fault.InvalidArgument, []func(*CreateRequest){with(cloud.FirmwareKey, "bios"), secure}},
		"the firmware must load the kernel":                          {fault.InvalidArgument, []func(*CreateRequest){func(q *CreateRequest) { q.Spec.Boot.Kernel = iso }, secure}},
		"h1 does not serve tpm: swtpm is not installed":              {fault.ResourceExhausted, []func(*CreateRequest){func(q *CreateRequest) { q.Spec.Security.TPM = true }}},
		"h1 does not serve hugepages: the host has none":             {fault.ResourceExhausted, []func(*CreateRequest){func(q *CreateRequest) { q.Spec.Memory = &cloud.Memory{SizeMiB: 64, Hugepages: true} }}},
		"must be a multiple of 2 with huge pages, got 65":            {fault.InvalidArgument, []func(*CreateRequest){func(q *CreateRequest) { q.Spec.Memory = &cloud.Memory{SizeMiB: 65, Hugepages: true} }}},
		"h1 does not serve rescue: its agent is too old":             {fault.ResourceExhausted, []func(*CreateRequest){with(cloud.RescueKey, string(iso))}},
		"is reserved for the rescue disk":                            {fault.InvalidArgument, []func(*CreateRequest){func(q *CreateRequest) { q.Spec.Disks[0].ID = cloud.RescueDisk }}},
		"at most 5 on the sata bus of a VM with a CD-ROM drive, got 6": {fault.InvalidArgument, []func(*CreateRequest){func(q *CreateRequest) {
			q.Metadata = map[string]string{cloud.CDROMKey: string(iso), cloud.OSTypeKey: "windows"}
			for _, id := range []string{"b", "c", "d", "e", "f"} {
				q.Spec.Disks = append(q.Spec.Disks, cloud.Disk{ID: id, Blank: true, SizeGiB: 1})
			}
		}}},
	} {
		_, err := w.vms.Create(w.as(acme, ""), acme, small("x", c.change...), [32]byte{})
		require.True(t, fault.Is(err, c.kind), "%s: %v", says, err)
		require.ErrorContains(t, err, says)
	}
	require.Zero(t, w.allocated(host))
}

// TestHugepages checks that VMs with huge pages are placed by the huge pages of hosts and not by their other memory, and
// count as much in the quota as other VMs.
func TestHugepages(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty(), func(n *cloud.Node) { n.HugepagesMiB = 1024 })
	w.AwaitFleet()
	w.serve(host, allFeatures())
	huge := func(q *CreateRequest) { q.Spec.Memory = &cloud.Memory{SizeMiB: 768, Hugepages: true} }
	vm := w.create("a", huge)
	require.True(t, convert.Assigned(vm).GetHugepages())
	require.EqualValues(t, 768, w.allocated(host).HugepagesMiB)
	require.Zero(t, w.allocated(host).MemoryMiB)
	require.EqualValues(t, 768, amountOf(vm).MemoryMiB)

	_, err := w.vms.Create(w.as(acme, ""), acme, small("b", huge), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "h1 has 256 MiB of huge pages free, 768 needed")
	w.create("c")
	_, err = w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID, Force: true})
	require.NoError(t, err)
	w.reportAbsent(host, vm.ID, vm.Generation+100)
	require.Zero(t, w.allocated(host).HugepagesMiB)
	require.Eventually(t, func() bool { // placement sees the free pages soon after the commit
		_, err := w.vms.Create(w.as(acme, ""), acme, small("b", huge), [32]byte{})
		return err == nil
	}, 10*time.Second, time.Millisecond)
}

// TestDedicatedCPUs checks that VMs with dedicated CPUs are placed by the dedicated CPUs of hosts and not by their vCPUs, and
// count as much in the quota as other VMs. The policy can be changed only while the VM is STOPPED.
func TestDedicatedCPUs(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty(), func(n *cloud.Node) { n.DedicatedCPUs = 3 })
	w.AwaitFleet()
	w.serve(host, allFeatures())
	dedicated := func(q *CreateRequest) {
		q.Spec.CPU, q.Metadata = &cloud.CPU{VCPUs: 2}, map[string]string{cloud.CPUPolicyKey: "dedicated"}
	}
	vm := w.create("a", dedicated)
	require.True(t, convert.Assigned(vm).GetDedicatedCpus())
	require.EqualValues(t, 2, w.allocated(host).DedicatedVCPUs)
	require.Zero(t, w.allocated(host).VCPUs)
	require.EqualValues(t, 2, amountOf(vm).VCPUs)
	_, err := w.vms.Create(w.as(acme, ""), acme, small("b", dedicated), [32]byte{})
	require.ErrorContains(t, err, "h1 has 1 dedicated CPUs free, 2 needed")

	share := Change{Metadata: map[string]string{cloud.CPUPolicyKey: "shared"}}
	w.report(vm.ID, cloud.ObservedBuilt)
	_, err = w.vms.Update(w.as(acme, ""), acme, vm.ID, share)
	require.NoError(t, err)
	require.Zero(t, w.allocated(host).DedicatedVCPUs)
	require.EqualValues(t, 2, w.allocated(host).VCPUs)
	running := w.createInState(cloud.Running, "c")
	_, err = w.vms.Update(w.as(acme, ""), acme, running.ID, Change{Metadata: map[string]string{cloud.CPUPolicyKey: "dedicated"}})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
}

// TestMachine creates VMs with all features and with none, and checks what their host receives. A VM with state on its
// host cannot move.
func TestMachine(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	w.AwaitFleet()
	w.serve(host, allFeatures())
	iso := w.image(1, 1<<20)
	vm := w.create("win", func(q *CreateRequest) {
		q.Metadata = map[string]string{cloud.CDROMKey: string(iso), cloud.OSTypeKey: "windows"}
		q.Spec.Security = cloud.Security{SecureBoot: true, TPM: true}
	})
	require.Equal(t, cloud.BusSATA, vm.Spec.Disks[0].Bus, "Windows has no drivers for virtio")
	a := convert.Assigned(vm)
	require.Equal(t, agentv1.Firmware_FIRMWARE_UEFI, a.Firmware)
	require.Equal(t, vmv1.OsType_OS_TYPE_WINDOWS, a.OsType)
	require.True(t, a.SecureBoot && a.Tpm && a.RtcLocalTime)
	require.Equal(t, string(iso), a.Cdrom.ImageId)
	require.Equal(t, "has a TPM, whose state is on its host only", vm.StateOnHost())

	uefi := w.create("uefi", func(q *CreateRequest) {
		q.Metadata = map[string]string{cloud.FirmwareKey: "uefi", cloud.OSTypeKey: "windows", cloud.RTCKey: "utc"}
		q.Spec.Disks[0].Bus = cloud.BusVirtio
	})
	require.Equal(t, cloud.BusVirtio, uefi.Spec.Disks[0].Bus)
	a = convert.Assigned(uefi)
	require.Equal(t, agentv1.Firmware_FIRMWARE_UEFI, a.Firmware)
	require.False(t, a.SecureBoot || a.Tpm || a.RtcLocalTime)
	require.Equal(t, "has UEFI firmware, whose NVRAM is on its host only", uefi.StateOnHost())
	uefi.Spec.Disks = nil
	var why string
	require.NoError(t, w.store.View(t.Context(), func(v *store.View) (err error) { why, err = immovable(v, uefi); return err }))
	require.Equal(t, uefi.StateOnHost(), why)

	w.serve(host, nil)
	plain := w.create("plain")
	a = convert.Assigned(plain)
	require.Equal(t, agentv1.Firmware_FIRMWARE_BIOS, a.Firmware)
	require.Nil(t, a.Cdrom)
	require.Nil(t, a.Rescue)
	require.Empty(t, plain.StateOnHost())
	require.Empty(t, plain.Features(), "a host with an older agent serves such a VM")
}

// TestMachineUpdate changes the TPM and the rescue disk of a VM. The VM must be STOPPED, and its host must serve them.
// The image of the rescue disk is in use for as long as the VM has the disk.
func TestMachineUpdate(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	w.AwaitFleet()
	rescue, kernel := w.image(1, 1000), w.image(2, 1<<20)
	images := image.New(image.Options{Store: w.store, Commands: leadertest.Single(), Members: func() []uint64 { return []uint64{1} }, Self: 1})
	update := func(vm *cloud.VM, c Change) (*cloud.VM, error) {
		out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, c)
		return &out, err
	}
	begin := Change{Metadata: map[string]string{cloud.RescueKey: string(rescue)}}
	vm := w.createInState(cloud.Stopped, "web")
	_, err := update(vm, begin)
	require.ErrorContains(t, err, "does not serve rescue")
	_, err = update(vm, Change{Security: &cloud.Security{TPM: true}})
	require.ErrorContains(t, err, "does not serve tpm")
	require.Equal(t, vm, w.get(vm.ID))
	w.serve(host, allFeatures())
	_, err = update(vm, Change{Security: &cloud.Security{TPM: true}, Boot: &cloud.Boot{Kernel: kernel}})
	require.NoError(t, err)

	now, err := update(vm, begin)
	require.NoError(t, err)
	require.Greater(t, now.Generation, vm.Generation, "the host must receive the change")
	a := convert.Assigned(now)
	require.True(t, a.Tpm)
	require.EqualValues(t, 1024, a.Rescue.SizeBytes, "whole sectors")
	require.Nil(t, a.Kernel, "the rescue disk boots, and not the kernel")
	require.True(t, usesImage(now, a.Rescue.Image.Sha256))
	require.Error(t, images.Delete(w.as(acme, ""), acme.Org, rescue, [32]byte{}), "the image is in use")

	now, err = update(vm, Change{Metadata: map[string]string{cloud.RescueKey: ""}})
	require.NoError(t, err)
	a = convert.Assigned(now)
	require.Nil(t, a.Rescue)
	require.Equal(t, string(kernel), a.Kernel.ImageId)
	require.NoError(t, images.Delete(w.as(acme, ""), acme.Org, rescue, [32]byte{}))

	running := w.createInState(cloud.Running, "running")
	_, err = update(running, Change{Metadata: map[string]string{cloud.FirmwareKey: "uefi"}})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "stop VM running first")
	require.Equal(t, running, w.get(running.ID))
}

// TestMigrationOfFirmware migrates a VM with secure boot, a TPM and a CD-ROM drive. Both hosts must have an agent that
// can migrate such VMs, and the target must serve the features of the VM.
func TestMigrationOfFirmware(t *testing.T) {
	w := newWorld(t)
	features := func(more ...string) map[string]string {
		all := allFeatures()
		for _, name := range more {
			all[name] = ""
		}
		return all
	}
	migrates := features(cloud.FeatureFirmwareMigration, cloud.FeatureVolumeMigration)
	source := w.volumeHost("n1", func(n *cloud.Node) { n.Features = features(cloud.FeatureVolumeMigration) })
	iso := w.image(1, 1<<20)
	vm := w.running("pc", func(q *CreateRequest) {
		q.Metadata = map[string]string{cloud.CDROMKey: string(iso)}
		q.Spec.Security = cloud.Security{SecureBoot: true, TPM: true}
	})
	target := w.volumeHost("n2", func(n *cloud.Node) { n.Features = features(cloud.FeatureVolumeMigration) })
	refused := func(text string) {
		t.Helper()
		_, err := w.vms.Migrate(w.as(acme, ""), acme, vm.ID, target, 0, false, [32]byte{})
		require.ErrorContains(t, err, text)
		require.Equal(t, cloud.Running, w.get(vm.ID).State)
	}
	refused("it is on a host that does not serve firmware-migration: its agent is too old")
	w.serve(source, migrates)
	refused("does not serve firmware-migration: its agent is too old")
	without := features(cloud.FeatureFirmwareMigration, cloud.FeatureVolumeMigration)
	without[cloud.FeatureTPM] = "swtpm is not installed"
	w.serve(target, without)
	refused("does not serve tpm: swtpm is not installed")
	w.serve(target, migrates)
	vm = w.migrate(vm.ID, target)
	require.Equal(t, string(iso), w.assignedTo(target, vm.ID).GetCdrom().GetImageId())
	require.True(t, w.assignedTo(target, vm.ID).GetTpm())
}
