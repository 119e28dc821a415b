package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// plug gives a NIC of a VM its port: the requested one, or a new one in the requested subnet or else in the first
// subnet. plug creates the default VPC if the project has no subnet. The caller holds the lock of the cloud. Other
// methods take the two locks in the other order, which is safe because scripts make one call at a time.
func (f *fakeNetwork) plug(vm string, nic *vmv1.NetworkSpec) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.subnets) == 0 {
		f.addDefaultVPC()
	}
	var p *networkv1.Port
	if nic.GetPortId() == "" {
		subnet, err := find(f.subnets, "subnet", cmp.Or(nic.GetSubnetId(), f.subnets[0].GetId()))
		if err != nil {
			return err
		}
		n := len(f.ports) + 1
		p = &networkv1.Port{
			Id: f.cloud.nextID(), VpcId: subnet.GetVpcId(), SubnetId: subnet.GetId(), SecurityGroups: nic.GetSecurityGroups(), PortSecurity: true,
			MacAddress: cmp.Or(nic.GetMacAddress(), fmt.Sprintf("02:00:00:00:00:%02x", n)),
			IpAddress:  cmp.Or(nic.GetIpAddress(), strings.TrimSuffix(subnet.GetGatewayIp(), "1")+fmt.Sprint(n+1)),
		}
		if len(p.GetSecurityGroups()) == 0 {
			p.SecurityGroups = []string{f.groups[0].GetId()}
		}
		f.ports = append(f.ports, p)
	} else {
		var err error
		if p, err = find(f.ports, "port", nic.GetPortId()); err != nil {
			return err
		}
		if p.GetDeviceId() != "" {
			return withReason(codes.FailedPrecondition, "IN_USE", "port %s is used by VM %s", p.GetId(), p.GetDeviceId())
		}
	}
	p.DeviceType, p.DeviceId, p.NodeId, p.Status = "vm", vm, "host-1", networkv1.Status_STATUS_ACTIVE
	nic.PortId, nic.SubnetId, nic.NetworkId, nic.MacAddress, nic.IpAddress = p.GetId(), p.GetSubnetId(), p.GetVpcId(), p.GetMacAddress(), p.GetIpAddress()
	return nil
}

// addDefaultVPC creates the default VPC with its subnet and the default security group.
func (f *fakeNetwork) addDefaultVPC() {
	v := &networkv1.Vpc{Id: f.cloud.nextID(), Name: "default", CidrBlock: "10.0.0.0/16", Mtu: 1450, IsDefault: true}
	f.vpcs = append(f.vpcs, v)
	f.subnets = append(f.subnets, &networkv1.Subnet{
		Id: f.cloud.nextID(), Name: "default", VpcId: v.GetId(), CidrBlock: "10.0.0.0/20", GatewayIp: "10.0.0.1", DhcpEnabled: true,
	})
	if len(f.groups) == 0 {
		f.groups = append(f.groups, &networkv1.SecurityGroup{Id: f.cloud.nextID(), Name: "default", IsDefault: true})
	}
}

// unplug ends the use of a port by a NIC. It deletes a port without a name, which plug has created.
func (f *fakeNetwork) unplug(port string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports = slices.DeleteFunc(f.ports, func(p *networkv1.Port) bool { return p.GetId() == port && p.GetName() == "" })
	for _, p := range f.ports {
		if p.GetId() == port {
			p.DeviceType, p.DeviceId, p.NodeId, p.Status = "", "", "", networkv1.Status_STATUS_DOWN
		}
	}
}
