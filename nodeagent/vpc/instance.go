package vpc

import (
	"bytes"
	"net"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/metadata"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// GuestData is the part of a VM's metadata that does not follow from its ports.
type GuestData struct {
	// SSHKeys are public keys in the format of authorized_keys.
	SSHKeys []string
	// UserData is the content of the VM's user data, for cloud-init.
	UserData []byte
	// TokensOptional permits requests without a session token.
	TokensOptional bool
}

func (d *GuestData) equal(o *GuestData) bool {
	return slices.Equal(d.SSHKeys, o.SSHKeys) && bytes.Equal(d.UserData, o.UserData) &&
		d.TokensOptional == o.TokensOptional
}

// guest caches the metadata of a guest, together with the data from which it was rendered.
type guest struct {
	id       string
	data     GuestData
	instance *metadata.Instance
}

// lookup returns what the metadata server tells the guest on this host that has an address in a VPC. It renders the
// guest's files only if they changed, and without the lock: a guest causes a call by each connection and each request,
// and the user data has up to 64 KiB.
func (n *Networks) lookup(id cloud.VPCID, source netip.Addr) (*metadata.Instance, bool) {
	n.mu.RLock()
	w, devices := n.served(id)
	if w == nil || w.addrs[source] == nil {
		n.mu.RUnlock()
		return nil, false
	}
	state, p := w.inForce, w.addrs[source]
	device, restored := devices[p.port.ID]
	if !restored {
		device = n.device(p.port.ID)
	}
	n.mu.RUnlock()

	g := guest{id: device}
	if n.o.Guest != nil {
		known := false
		if g.data, known = n.o.Guest(device); !known {
			return nil, false
		}
	}
	last := p.guest.Load()
	if last != nil && last.id == g.id && last.data.equal(&g.data) {
		return last.instance, true
	}
	g.instance = n.instance(state, p, &g)
	p.guest.Store(&g)
	return g.instance, true
}

// device returns the ID of the VM or container that has a port, or the ID of the port if it has none. The caller holds
// mu.
func (n *Networks) device(port cloud.PortID) string {
	if record := n.tables.port(port); record != nil && record.Device.ID != "" {
		return record.Device.ID
	}
	return string(port)
}

// instance describes the guest g of a port.
func (n *Networks) instance(w *wanted, at *place, g *guest) *metadata.Instance {
	s, p := at.subnet, at.port
	nic := metadata.NIC{
		Port: p.ID, MAC: p.MAC, IPs: []netip.Addr{p.IP}, SecurityGroups: p.Groups, Subnet: s.ID, VPC: w.ID,
		SubnetCIDR: s.CIDR, SubnetCIDR6: s.CIDR6, VPCCIDR: w.CIDR, VPCCIDR6: w.CIDR6,
	}
	if p.IP6.IsValid() {
		nic.IP6s = []netip.Addr{p.IP6}
	}
	out := &metadata.Instance{
		Port: p.ID, ID: g.id, HostName: p.HostName, SSHKeys: g.data.SSHKeys, NICs: []metadata.NIC{nic},
		TokensRequired: !g.data.TokensOptional && !mutant.On(mutant.SkipToken),
	}
	files, err := cloudinit.Render(&cloudinit.Instance{
		ID: g.id, HostName: p.HostName, SSHKeys: g.data.SSHKeys, UserData: g.data.UserData,
		NICs: cloudinit.NICs([]cloudinit.Port{w.cloudinitPort(s, p)}),
	})
	if err != nil {
		n.o.Log.Warn("a guest gets no files of cloud-init from the metadata service", "port", p.ID, "err", err)
		return out
	}
	out.NoCloud = *files
	return out
}

// cloudinitPort describes the guest's interface with a port. The values are those that DHCP gives.
func (w *wanted) cloudinitPort(s *cloud.HostSubnet, p *cloud.HostPort) cloudinit.Port {
	out := cloudinit.Port{
		MAC: net.HardwareAddr(p.MAC[:]), MTU: w.MTU, DHCP: s.DHCP, DNS: s.DNS, Gateways: []netip.Addr{s.Gateway},
		Addresses: []netip.Prefix{netip.PrefixFrom(p.IP, s.CIDR.Bits())},
	}
	if p.IP6.IsValid() {
		out.Addresses = append(out.Addresses, netip.PrefixFrom(p.IP6, s.CIDR6.Bits()))
		out.Gateways = append(out.Gateways, s.Gateway6())
	}
	if len(out.DNS) == 0 {
		out.DNS = out.Gateways
	}
	if w.Domain != "" {
		out.Search = []string{w.Domain}
	}
	return out
}
