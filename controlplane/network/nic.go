package network

import (
	"maps"
	"net/netip"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// DefaultNetwork is the network_id of a NIC that is to be in the default VPC of its project, and the name of this VPC
// and of its first subnet.
const DefaultNetwork = "default"

// The prefixes of a project's default VPC and of its subnet.
var (
	defaultVPCPrefix    = netip.MustParsePrefix("10.0.0.0/16")
	defaultSubnetPrefix = netip.MustParsePrefix("10.0.0.0/20")
)

// defaultVPCs has the ID of the default VPC of a project, at vpc-default/<project>.
var defaultVPCs = store.NewTable[cloud.VPCID]("vpc-default")

// Claimed is the port of a NIC with its subnet and VPC.
type Claimed struct {
	Port   cloud.Port
	Subnet cloud.Subnet
	VPC    cloud.VPC
}

// NIC returns the NIC of a request with the values of its port, subnet and VPC.
func (c *Claimed) NIC(requested cloud.NIC) cloud.NIC {
	n := requested
	n.NetworkID, n.SubnetID, n.PortID = string(c.VPC.ID), string(c.Subnet.ID), string(c.Port.ID)
	n.MAC, n.IP, n.IP6 = c.Port.MAC.String(), c.Port.IP.String(), ""
	if c.Port.IP6.IsValid() {
		n.IP6 = c.Port.IP6.String()
	}
	n.CIDR, n.Gateway, n.DHCP, n.MTU = c.Subnet.CIDR.String(), c.Subnet.Gateway.String(), c.Subnet.DHCP, c.VPC.MTU
	n.SecurityGroups = nil
	for _, id := range c.Port.Groups {
		n.SecurityGroups = append(n.SecurityGroups, string(id))
	}
	return n
}

// ClaimNIC finds or creates the port of a NIC of a VM, and records that the VM uses it. at is the name of the NIC in
// the request with a final dot, for errors.
//
// A NIC with a port uses that port, which must have no device; the port stays when the VM is deleted. Otherwise
// ClaimNIC creates a port, which is deleted with the VM: in the NIC's subnet, or in the only subnet of its VPC, or in
// the project's default VPC, which it creates if the project has none. The fields for CIDR, gateway and DHCP are
// results of ClaimNIC: a request with other values is refused.
func ClaimNIC(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, nic *cloud.NIC, at string) (Claimed, error) {
	port, err := portForNIC(tx, t, nic, at)
	if err != nil {
		return Claimed{}, err
	}
	subnet, err := find(tx, subnets, kindSubnet, t, string(port.Subnet))
	if err != nil {
		return Claimed{}, err
	}
	vpc, err := find(tx, vpcs, kindVPC, t, string(port.VPC))
	if err != nil {
		return Claimed{}, err
	}
	if err := checkResults(nic, subnet, at); err != nil {
		return Claimed{}, err
	}
	setDevice(tx, port, cloud.PortDevice{Kind: cloud.DeviceVM, ID: string(vm)})
	return Claimed{*port, *subnet, *vpc}, nil
}

// BindNIC binds the port of a NIC to the host of its VM. hostName is the VM's name, by which other guests find the port
// in DNS. The port and its floating IP are PENDING until the host has acknowledged the binding. As a backend of service
// IPs with a health check, the port gets no new connections until the host has checked it.
func BindNIC(tx *store.Tx, port *cloud.Port, node cloud.NodeID, hostName string) error {
	port.Node, port.HostName = node, hostName
	port.BindingGeneration++
	port.Status, port.StatusReason = cloud.NetworkPending, ""
	port.UpdatedAt = tx.Now()
	ports.Put(tx, port, string(port.Project), string(port.ID))
	if err := moveFloating(tx, port); err != nil {
		return err
	}
	return forgetHealth(tx, port)
}

// nicPorts returns the ports of all NICs of a VM.
func nicPorts(tx *store.Tx, t cloud.Tenant, vm cloud.VMID) ([]*cloud.Port, error) {
	used, _, err := devicePorts.List(tx, 0, string(vm))
	if err != nil {
		return nil, err
	}
	all := make([]*cloud.Port, len(used))
	for i, u := range used {
		if all[i], err = find(tx, ports, kindPort, t, u.Path[1]); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// MoveNICs binds the ports of all NICs of a VM to the VM's new host, like BindNIC.
func MoveNICs(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, node cloud.NodeID, hostName string) error {
	all, err := nicPorts(tx, t, vm)
	if err != nil {
		return err
	}
	for _, port := range all {
		if err := BindNIC(tx, port, node, hostName); err != nil {
			return err
		}
	}
	return nil
}

// RenameNICs changes the name under which other guests find the ports of a VM's NICs in DNS.
func RenameNICs(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, hostName string) error {
	all, err := nicPorts(tx, t, vm)
	if err != nil {
		return err
	}
	for _, port := range all {
		port.HostName, port.UpdatedAt = hostName, tx.Now()
		ports.Put(tx, port, string(port.Project), string(port.ID))
	}
	return nil
}

// inNIC returns a copy of an error of the port service that names the invalid field as a field of the NIC. at is the
// name of the NIC in the request with a final dot. An error without a field gets the field in otherwise.
func inNIC(err error, at, otherwise string) error {
	f, ok := fault.From(err)
	if !ok {
		return err
	}
	out := *f
	switch name, inDetails := f.Details["field"].(string); {
	case f.Field != "":
		out.Field = at + f.Field
		if rest, ok := strings.CutPrefix(f.Message, f.Field); ok {
			out.Message = out.Field + rest
		}
	case inDetails:
		out.Field = at + name
		out.Details = maps.Clone(f.Details)
		delete(out.Details, "field")
	case otherwise != "":
		out.Field = at + otherwise
	}
	return &out
}

func portForNIC(tx *store.Tx, t cloud.Tenant, nic *cloud.NIC, at string) (*cloud.Port, error) {
	if nic.PortID != "" {
		return givenPort(tx, t, nic, at)
	}
	subnet, err := subnetForNIC(tx, t, nic, at)
	if err != nil {
		return nil, err
	}
	q := PortRequest{Subnet: subnet, Secured: true}
	if nic.MAC != "" {
		if q.MAC, err = cloud.ParseMAC(at+"mac_address", nic.MAC); err != nil {
			return nil, err
		}
	}
	if nic.IP != "" {
		if q.IP, err = cloud.ParseAddr(at+"ip_address", nic.IP); err != nil {
			return nil, err
		}
	}
	if len(nic.SecurityGroups) > 0 {
		ids := make([]cloud.SecurityGroupID, 0, len(nic.SecurityGroups))
		for _, id := range nic.SecurityGroups {
			ids = append(ids, cloud.SecurityGroupID(id))
		}
		if err := checkGroupIDs(ids); err != nil {
			return nil, inNIC(err, at, "")
		}
		if err := checkGroupsExist(tx, t, ids); err != nil {
			return nil, inNIC(err, at, "security_groups")
		}
		q.Groups = &ids
	}
	port, err := createPort(tx, t, q)
	if err != nil {
		return nil, inNIC(err, at, "")
	}
	port.Owned = true
	return &port, nil
}

// givenPort returns the port that a NIC names. It returns FailedPrecondition if a device uses the port, and
// InvalidArgument if the NIC asks for something that the port does not have.
func givenPort(tx *store.Tx, t cloud.Tenant, nic *cloud.NIC, at string) (*cloud.Port, error) {
	if err := cloud.CheckUUID(at+"port_id", nic.PortID); err != nil {
		return nil, err
	}
	port, err := find(tx, ports, kindPort, t, nic.PortID)
	if err != nil {
		return nil, inNIC(err, at, "port_id")
	}
	if port.Device.ID != "" {
		device, err := labelDevice(tx, port)
		if err != nil {
			return nil, err
		}
		return nil, inNIC(inUse(label(kindPort, port.Name, nic.PortID), []string{device}), at, "port_id")
	}
	for _, f := range []struct{ name, requested, has string }{
		{"subnet_id", nic.SubnetID, string(port.Subnet)}, {"mac_address", nic.MAC, port.MAC.String()},
		{"ip_address", nic.IP, port.IP.String()},
	} {
		if f.requested != "" && !strings.EqualFold(f.requested, f.has) {
			return nil, fault.Invalid(at+f.name, "%s has %s, not %s", label(kindPort, port.Name, nic.PortID), f.has, f.requested).With("constraint", "port")
		}
	}
	if len(nic.SecurityGroups) > 0 {
		return nil, fault.Invalid(at+"security_groups", "must be empty with port_id: change the groups of the port").With("constraint", "port")
	}
	return port, nil
}

// subnetForNIC returns the subnet in which a NIC's port is created.
func subnetForNIC(tx *store.Tx, t cloud.Tenant, nic *cloud.NIC, at string) (cloud.SubnetID, error) {
	if nic.SubnetID != "" {
		if err := cloud.CheckUUID(at+"subnet_id", nic.SubnetID); err != nil {
			return "", err
		}
		if _, err := find(tx, subnets, kindSubnet, t, nic.SubnetID); err != nil {
			return "", inNIC(err, at, "subnet_id")
		}
		return cloud.SubnetID(nic.SubnetID), nil
	}
	vpc := cloud.VPCID(nic.NetworkID)
	if vpc == "" || vpc == DefaultNetwork {
		var err error
		if vpc, err = defaultVPC(tx, t); err != nil {
			return "", inNIC(err, at, "")
		}
	} else {
		if err := cloud.CheckUUID(at+"network_id", nic.NetworkID); err != nil {
			return "", err
		}
		if _, err := find(tx, vpcs, kindVPC, t, nic.NetworkID); err != nil {
			return "", inNIC(err, at, "network_id")
		}
	}
	inside, _, err := subnetsOf.List(tx, 2, string(vpc))
	if err != nil {
		return "", err
	}
	if len(inside) != 1 {
		text, err := labelOf(tx, t.Project, kindVPC, string(vpc))
		if err != nil {
			return "", err
		}
		if len(inside) == 0 {
			return "", fault.Invalid(at+"subnet_id", "%s has no subnet: create one first", text).With("constraint", "required")
		}
		return "", fault.Invalid(at+"subnet_id", "is required, because %s has several subnets", text).With("constraint", "required")
	}
	return cloud.SubnetID(inside[0].Path[1]), nil
}

// defaultVPC returns the default VPC of a project. If the project has none, it creates one with one subnet.
func defaultVPC(tx *store.Tx, t cloud.Tenant) (cloud.VPCID, error) {
	id, err := defaultVPCs.Get(tx, string(t.Project))
	if err != nil {
		return "", err
	}
	if id != nil {
		return *id, nil
	}
	vpc, err := createVPC(tx, t, VPCRequest{
		Name: DefaultNetwork, CIDR: defaultVPCPrefix, Description: "The network of NICs that name no other.",
		Default: true,
	})
	if err != nil {
		return "", err
	}
	_, err = createSubnet(tx, t, SubnetRequest{
		Name: DefaultNetwork, VPC: vpc.ID, CIDR: defaultSubnetPrefix, DHCP: true,
	})
	return vpc.ID, err
}

// checkResults returns InvalidArgument if a NIC has values for results that are not those of its subnet.
func checkResults(nic *cloud.NIC, s *cloud.Subnet, at string) error {
	if nic.NetworkID != "" && nic.NetworkID != DefaultNetwork && nic.NetworkID != string(s.VPC) {
		return fault.Invalid(at+"network_id", "%s is in VPC %s, not %s", label(kindSubnet, s.Name, string(s.ID)), s.VPC, nic.NetworkID).With("constraint", "subnet")
	}
	if nic.DHCP && !s.DHCP {
		return fault.Invalid(at+"dhcp_enabled", "%s has no DHCP", label(kindSubnet, s.Name, string(s.ID))).With("constraint", "subnet")
	}
	for _, f := range []struct{ name, requested, has string }{
		{"cidr_block", nic.CIDR, s.CIDR.String()}, {"gateway_ip", nic.Gateway, s.Gateway.String()},
	} {
		if f.requested != "" && f.requested != f.has {
			return fault.Invalid(at+f.name, "the subnet has %s, not %s", f.has, f.requested).With("constraint", "subnet")
		}
	}
	return nil
}

// ReleaseNICs ends the use of all ports of a VM. It deletes the ports that ClaimNIC created.
func ReleaseNICs(tx *store.Tx, t cloud.Tenant, vm cloud.VMID) error {
	all, err := nicPorts(tx, t, vm)
	if err != nil {
		return err
	}
	for _, port := range all {
		if err := ReleaseNIC(tx, t, port); err != nil {
			return err
		}
	}
	return nil
}

// ReleasePort ends the use of one port by a VM, like ReleaseNICs. It does nothing if the VM does not use the port.
func ReleasePort(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, id cloud.PortID) error {
	port, err := ports.Get(tx, string(t.Project), string(id))
	if err != nil || port == nil || port.Device != (cloud.PortDevice{Kind: cloud.DeviceVM, ID: string(vm)}) {
		return err
	}
	return ReleaseNIC(tx, t, port)
}

// ReleaseNIC ends the use of a port by its device. It deletes a port that ClaimNIC created.
func ReleaseNIC(tx *store.Tx, t cloud.Tenant, port *cloud.Port) error {
	if port.Owned {
		return removeOwned(tx, t, port)
	}
	devicePorts.Delete(tx, port.Device.ID, string(port.ID))
	port.Device, port.Node, port.HostName, port.MigrationNode = cloud.PortDevice{}, "", "", ""
	port.Status, port.StatusReason = cloud.NetworkDown, ""
	port.UpdatedAt = tx.Now()
	ports.Put(tx, port, string(t.Project), string(port.ID))
	if err := moveFloating(tx, port); err != nil {
		return err
	}
	return forgetHealth(tx, port)
}

// removeOwned deletes a port that was created for a VM, with what leads to it: its floating IP is detached, and it is
// removed from routes and service IPs. Otherwise a VM could not be deleted while something refers to its address.
func removeOwned(tx *store.Tx, t cloud.Tenant, port *cloud.Port) error {
	floating, err := floatingAt.Get(tx, string(port.ID))
	if err != nil {
		return err
	}
	if floating != nil {
		f, err := find(tx, floatingIPs, kindFloating, t, string(*floating))
		if err != nil {
			return err
		}
		detachFloating(tx, f)
		f.UpdatedAt = tx.Now()
		floatingIPs.Put(tx, f, string(t.Project), string(f.ID))
	}
	if err := removeRoutes(tx, t.Project, string(port.ID)); err != nil {
		return err
	}
	services, _, err := backendsOf.List(tx, 0, string(port.ID))
	if err != nil {
		return err
	}
	for _, u := range services {
		s, err := find(tx, serviceIPs, kindService, t, u.Path[1])
		if err != nil {
			return err
		}
		s.Backends = withoutPort(s.Backends, port.ID)
		setServiceStatus(s)
		s.UpdatedAt = tx.Now()
		backendsOf.Delete(tx, u.Path...)
		serviceIPs.Put(tx, s, string(t.Project), string(s.ID))
	}
	return removePort(tx, t, port)
}

// withoutPort returns the backends that are not a port.
func withoutPort(all []cloud.Backend, port cloud.PortID) (out []cloud.Backend) {
	for _, b := range all {
		if b.Port != port {
			out = append(out, b)
		}
	}
	return out
}
