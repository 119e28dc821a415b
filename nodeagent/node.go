package main

import (
	"maps"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/version"
)

// encryptLabel is the node label of hosts that encrypt the traffic to other hosts. Its value is true. Placement can
// select hosts by it.
const encryptLabel = "trivet/encrypt"

// node holds what the agent reports to the control plane about this host.
type node struct {
	host        facts.Host
	allocatable facts.Resources
	labels      map[string]string
	ready       bool
	pools       func() []*agentv1.StoragePool // returns none until the pools have been opened
	rbdProblem  string                        // why the host serves no RBD volumes, or ""
	metricsURL  func() string                 // returns the URL of metrics_listen, or ""
	machines    facts.Machines
	cpus        hostCPUs
}

// describe returns the node of a host with these settings, properties and accelerator.
func describe(c Config, host facts.Host, accel facts.Accelerator, cpus hostCPUs) *node {
	reserve := facts.Resources(c.Reserve)
	reserve.MemoryMiB += host.HugepagesMiB
	reserve.VCPUs += uint32(len(cpus.dedicated))
	n := &node{
		host: host, cpus: cpus, labels: maps.Clone(c.Labels), ready: accel.Kind == facts.KVM || c.AllowTCG,
		allocatable: facts.Allocatable(host.Capacity, reserve, facts.Overcommit(c.Overcommit)),
		pools:       func() []*agentv1.StoragePool { return nil },
		metricsURL:  func() string { return "" },
	}
	if n.labels == nil {
		n.labels = map[string]string{}
	}
	n.labels[cloud.AcceleratorLabel] = string(accel.Kind)
	if c.Network.Encrypt {
		n.labels[encryptLabel] = "true"
	}
	return n
}

var architectures = map[string]vmv1.Architecture{
	"x86_64": vmv1.Architecture_ARCHITECTURE_X86_64, "aarch64": vmv1.Architecture_ARCHITECTURE_AARCH64,
}

func (n *node) facts() *agentv1.NodeFacts {
	return &agentv1.NodeFacts{
		BootId: n.host.BootID, AgentVersion: version.Version(), QemuVersion: n.host.QEMU.Version, CpuModels: n.host.QEMU.CPUModels,
		Architecture: architectures[n.host.Arch], StoragePools: n.pools(),
		LiveMigration: true, Rbd: n.rbdProblem == "", RbdProblem: n.rbdProblem, RbdEncryption: n.rbdProblem == "",
		MachineFeatures: n.machineFeatures(), HugepagesMib: n.host.HugepagesMiB,
		DedicatedCpus: uint32(len(n.cpus.dedicated)), MetricsUrl: n.metricsURL(),
	}
}

// machineFeatures returns the features of virtual machines that this agent knows. A feature that the host cannot serve
// has a Problem.
func (n *node) machineFeatures() []*agentv1.MachineFeature {
	m, noHugepages, noDedicated, noChannels := n.machines, "", "", ""
	if !qemu.ReceivesChannels(n.host.QEMU.Version) {
		noChannels = "QEMU " + n.host.QEMU.Version + " cannot receive memory over several connections from the agent: only 7.2 to 8.1 can"
	}
	if n.host.HugepagesMiB == 0 {
		noHugepages = "the host has reserved no huge pages of 2 MiB: set vm.nr_hugepages and restart the agent"
	}
	if len(n.cpus.dedicated) == 0 {
		noDedicated = "the host has no dedicated CPUs: set dedicated_cpus and restart the agent"
	}
	return []*agentv1.MachineFeature{
		{Name: cloud.FeatureUEFI, Problem: m.UEFI.Problem},
		{Name: cloud.FeatureSecureBoot, Problem: m.SecureUEFI.Problem},
		{Name: cloud.FeatureTPM, Problem: m.TPMProblem},
		{Name: cloud.FeatureCDROM}, {Name: cloud.FeatureRescue}, {Name: cloud.FeatureOSType},
		{Name: cloud.FeatureHugepages, Problem: noHugepages}, {Name: cloud.FeatureDedicatedCPUs, Problem: noDedicated},
		{Name: cloud.FeatureVolumeMigration}, {Name: cloud.FeatureFirmwareMigration}, {Name: cloud.FeatureEncryptedMigration},
		{Name: cloud.FeatureRunningMigration}, {Name: cloud.FeatureMemoryChannels, Problem: noChannels},
		{Name: cloud.FeatureGuestCalls}, {Name: cloud.FeatureConsoles}, {Name: cloud.FeatureDiskGrowth},
	}
}

// heartbeat returns the host's state for a heartbeat, without the node's id. It omits storage classes: the control
// plane derives them from the storage pools in the facts.
func (n *node) heartbeat() *vmv1.HeartbeatNodeRequest {
	state := vmv1.NodeState_NODE_STATE_NOT_READY
	if n.ready {
		state = vmv1.NodeState_NODE_STATE_READY
	}
	drivers := []vmv1.VolumeDriverKind{vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED}
	if len(n.pools()) == 0 {
		drivers = nil
	}
	if n.rbdProblem == "" {
		drivers = append(drivers, vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_RBD)
	}
	return &vmv1.HeartbeatNodeRequest{
		SupportedVolumeDrivers: drivers,
		State:                  state, Capacity: capacity(n.host.Capacity), Allocatable: capacity(n.allocatable), Labels: maps.Clone(n.labels),
		Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
	}
}

func capacity(r facts.Resources) *vmv1.NodeCapacity {
	return &vmv1.NodeCapacity{Vcpus: r.VCPUs, MemoryMib: r.MemoryMiB, StorageGib: r.StorageGiB}
}
