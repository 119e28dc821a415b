package vpc

import (
	"net"
	"net/netip"

	"github.com/trivet-cloud/trivet/nodeagent/metadata"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// lookup returns what the metadata server tells the guest on this host that has an address in a VPC.
func (n *Networks) lookup(id cloud.VPCID, source netip.Addr) (*metadata.Instance, bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	w := n.workers[id]
	if w == nil || w.inForce == nil {
		return nil, false
	}
	p, ok := w.addrs[source]
	if !ok {
		return nil, false
	}
	return n.instance(w.inForce, p.subnet, p.port), true
}

// instance describes the guest of a port. The guest has the ID of the port's device. The caller holds mu.
func (n *Networks) instance(w *wanted, s *cloud.HostSubnet, p *cloud.HostPort) *metadata.Instance {
	id := string(p.ID)
	if record := n.tables.port(p.ID); record != nil && record.Device.ID != "" {
		id = record.Device.ID
	}
	nic := metadata.NIC{
		Port: p.ID, MAC: p.MAC, IPs: []netip.Addr{p.IP}, SecurityGroups: p.Groups, Subnet: s.ID, VPC: w.ID,
		SubnetCIDR: s.CIDR, SubnetCIDR6: s.CIDR6, VPCCIDR: w.CIDR, VPCCIDR6: w.CIDR6,
	}
	if p.IP6.IsValid() {
		nic.IP6s = []netip.Addr{p.IP6}
	}
	var keys []string
	var userData []byte
	if n.o.Keys != nil {
		keys, userData = n.o.Keys(id)
	}
	out := &metadata.Instance{Port: p.ID, ID: id, HostName: p.HostName, SSHKeys: keys, NICs: []metadata.NIC{nic}}
	files, err := cloudinit.Render(&cloudinit.Instance{
		ID: id, HostName: p.HostName, SSHKeys: keys, UserData: userData,
		NICs: []cloudinit.NIC{{MAC: net.HardwareAddr(p.MAC[:]), MTU: w.MTU, DHCP4: s.DHCP, DHCP6: s.DHCP && p.IP6.IsValid()}},
	})
	if err == nil {
		out.NoCloud = *files
	}
	return out
}
