package convert

import (
	"math"

	"github.com/trivet-cloud/trivet/shared/cloud"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Spec returns the spec of a VM as the message of the API.
func Spec(s *cloud.Spec) *vmv1.VmSpec {
	out := &vmv1.VmSpec{Disks: each(s.Disks, disk), Network: each(s.Network, nic)}
	if c := s.CPU; c != nil {
		out.Cpu = &vmv1.CpuSpec{Vcpus: c.VCPUs, CoresPerSocket: c.CoresPerSocket, Sockets: c.Sockets, CpuModel: c.Model}
	}
	if m := s.Memory; m != nil {
		out.Memory = &vmv1.MemorySpec{SizeMib: m.SizeMiB, Hugepages: m.Hugepages}
	}
	if b := s.Boot; b != (cloud.Boot{}) {
		out.Boot = &vmv1.BootSpec{Kernel: string(b.Kernel), Initrd: string(b.Initrd), Cmdline: b.Cmdline}
	}
	if b := s.Security; b != (cloud.Security{}) {
		out.Security = &vmv1.SecuritySpec{SecureBoot: b.SecureBoot, Tpm: b.TPM}
	}
	return out
}

// SpecFrom returns the VM spec in a request's message, or the empty spec if the message is nil.
func SpecFrom(s *vmv1.VmSpec) cloud.Spec {
	out := cloud.Spec{
		Disks: each(s.GetDisks(), DiskFrom), Network: each(s.GetNetwork(), NICFrom),
		Boot: cloud.Boot{
			Kernel: cloud.ImageID(s.GetBoot().GetKernel()), Initrd: cloud.ImageID(s.GetBoot().GetInitrd()),
			Cmdline: s.GetBoot().GetCmdline(),
		},
		Security: cloud.Security{SecureBoot: s.GetSecurity().GetSecureBoot(), TPM: s.GetSecurity().GetTpm()},
	}
	if c := s.GetCpu(); c != nil {
		out.CPU = &cloud.CPU{VCPUs: c.GetVcpus(), CoresPerSocket: c.GetCoresPerSocket(), Sockets: c.GetSockets(), Model: c.GetCpuModel()}
	}
	if m := s.GetMemory(); m != nil {
		out.Memory = &cloud.Memory{SizeMiB: m.GetSizeMib(), Hugepages: m.GetHugepages()}
	}
	return out
}

// enum converts a proto3 enumeration, which may contain any 32-bit integer. A number outside 0 to 254 becomes 255, the
// highest value of T, which every check in package cloud rejects.
func enum[T ~uint8, E ~int32](e E) T {
	if e < 0 || e >= math.MaxUint8 {
		return math.MaxUint8
	}
	return T(e)
}

func disk(d cloud.Disk) *vmv1.DiskSpec {
	source := &vmv1.DiskSource{}
	switch {
	case d.Image != "":
		source.Source = &vmv1.DiskSource_ImageId{ImageId: string(d.Image)}
	case d.Volume != "":
		source.Source = &vmv1.DiskSource_VolumeId{VolumeId: string(d.Volume)}
	case d.Blank:
		source.Source = &vmv1.DiskSource_Blank{Blank: true}
	}
	return &vmv1.DiskSpec{
		Id: d.ID, Source: source, SizeGib: d.SizeGiB, Bus: vmv1.DiskBus(d.Bus), Cache: vmv1.DiskCache(d.Cache), BootIndex: d.BootIndex,
	}
}

// DiskFrom converts the message of a disk in a request. It returns the empty disk if the message is nil.
func DiskFrom(d *vmv1.DiskSpec) cloud.Disk {
	return cloud.Disk{
		ID: d.GetId(), Image: cloud.ImageID(d.GetSource().GetImageId()), Volume: cloud.VolumeID(d.GetSource().GetVolumeId()),
		Blank: d.GetSource().GetBlank(), SizeGiB: d.GetSizeGib(), Bus: enum[cloud.DiskBus](d.GetBus()),
		Cache: enum[cloud.DiskCache](d.GetCache()), BootIndex: d.GetBootIndex(),
	}
}

func nic(n cloud.NIC) *vmv1.NetworkSpec {
	return &vmv1.NetworkSpec{
		Id: n.ID, NetworkId: n.NetworkID, MacAddress: n.MAC, IpAddress: n.IP, Model: vmv1.NicModel(n.Model),
		SecurityGroups: copySlice(n.SecurityGroups), PortId: n.PortID, SubnetId: n.SubnetID, CidrBlock: n.CIDR,
		GatewayIp: n.Gateway, DhcpEnabled: n.DHCP,
	}
}

// NICFrom returns the NIC in a request's message, or the empty NIC if the message is nil.
func NICFrom(n *vmv1.NetworkSpec) cloud.NIC {
	return cloud.NIC{
		ID: n.GetId(), NetworkID: n.GetNetworkId(), MAC: n.GetMacAddress(), IP: n.GetIpAddress(),
		Model: enum[cloud.NICModel](n.GetModel()), SecurityGroups: copySlice(n.GetSecurityGroups()), PortID: n.GetPortId(),
		SubnetID: n.GetSubnetId(), CIDR: n.GetCidrBlock(), Gateway: n.GetGatewayIp(), DHCP: n.GetDhcpEnabled(),
	}
}

// Hypervisor converts a hypervisor from its protobuf enumeration. A number outside 0 to 254 becomes 255, which every
// check rejects.
func Hypervisor(h vmv1.HypervisorType) cloud.Hypervisor { return enum[cloud.Hypervisor](h) }
