package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	domain "github.com/trivet-cloud/trivet/shared/cloud"
)

// insideGuests runs the subtests in which programs in guests send and capture frames. The guests a, b, d and e of
// TestNetworks are on the hosts 1, 2, 3 and 2. The guests a, b and d are in the VPC with the ID vpc, and a is in the
// subnet with the ID front. The subtests attach further NICs to these guests.
func (c *networkCloud) insideGuests(vpc, front string, a, b, d, e *machine) {
	raw := c.newRawVPC(a, b, e)
	c.run("no forged frame of a guest arrives", func(t *testing.T) { c.spoof(raw, d) })
	c.run("a guest routes between two VPCs", func(t *testing.T) { c.appliance(vpc, front, a, b, d) })
	c.run("packets that are too big for the external network are reported", func(t *testing.T) { c.externalMTU(b) })
	c.run("a host without control plane keeps its networks", func(t *testing.T) { c.cutOff(raw, d) })
}

// nic is a network interface that was attached to a running guest. The guest has no DHCP on it.
type nic struct {
	*machine
	device string // in the guest
	port   *networkv1.Port
	mac    domain.MAC
	ip     netip.Addr
	ip6    netip.Addr // invalid if the subnet has no IPv6
}

// plug attaches a NIC to a running guest and configures the addresses of its port in the guest. The subnet must have
// no DHCP.
func (c *networkCloud) plug(m *machine, id, subnet string, groups ...string) *nic {
	c.t.Helper()
	ctx := c.context(time.Minute)
	vm, err := c.vms.AttachNic(ctx, &vmv1.AttachNicRequest{VmId: m.vm.GetId(), Nic: &vmv1.NetworkSpec{
		Id: id, SubnetId: subnet, Model: vmv1.NicModel_NIC_MODEL_VIRTIO_NET, SecurityGroups: groups,
	}})
	require.NoError(c.t, err)
	n := &nic{machine: m}
	for _, s := range vm.GetSpec().GetNetwork() {
		if s.GetId() == id {
			n.port, err = c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: s.GetPortId()})
			require.NoError(c.t, err)
		}
	}
	require.NotNil(c.t, n.port)
	n.mac, err = domain.ParseMAC("mac_address", n.port.GetMacAddress())
	require.NoError(c.t, err)
	n.ip = netip.MustParseAddr(n.port.GetIpAddress())
	n.ip6, _ = netip.ParseAddr(n.port.GetIpv6Address())
	// The DHCP client of the guest first removes all addresses and then sets the device up.
	find := fmt.Sprintf(`d=$(grep -l %s /sys/class/net/eth*/address) && d=${d%%/address} && d=${d##*/} && `+
		`ip link show "$d" | grep -q ,UP`, n.port.GetMacAddress())
	m.eventually("the guest has the NIC", find)
	script := find + fmt.Sprintf(` && ip addr add %s/24 dev "$d"`, n.ip)
	if n.ip6.IsValid() {
		// Without duplicate address detection, the guest can use the address at once.
		script += fmt.Sprintf(` && echo 0 >"/proc/sys/net/ipv6/conf/$d/accept_dad" && ip addr add %s/64 dev "$d"`, n.ip6)
	}
	n.device = m.run(script + ` && echo "$d"`)
	return n
}

// update changes the port of the NIC.
func (n *nic) update(change *networkv1.UpdatePortRequest) {
	n.c.t.Helper()
	change.Id = n.port.GetId()
	_, err := n.c.networks.UpdatePort(n.c.context(time.Minute), change)
	require.NoError(n.c.t, err)
}

// privateSubnet creates a VPC with one subnet without DHCP, and returns the IDs of both. prefix is an IPv4 prefix of
// /24. prefix6 is an IPv6 prefix of /64, or empty. The prefixes of the VPC are the /16 and the /48 that contain them.
func (c *networkCloud) privateSubnet(name, prefix, prefix6 string) (vpc, subnet string) {
	ctx := c.context(30 * time.Second)
	create := &networkv1.CreateVpcRequest{Name: name, CidrBlock: parent(prefix, 16)}
	if prefix6 != "" {
		create.Ipv6CidrBlock = parent(prefix6, 48)
	}
	v, err := c.networks.CreateVpc(ctx, create)
	require.NoError(c.t, err)
	s, err := c.networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{
		Name: name, VpcId: v.GetId(), CidrBlock: prefix, Ipv6CidrBlock: prefix6, DhcpEnabled: ptr(false),
	})
	require.NoError(c.t, err)
	return v.GetId(), s.GetId()
}

// parent returns the prefix of the given length that contains prefix.
func parent(prefix string, bits int) string {
	return netip.PrefixFrom(netip.MustParsePrefix(prefix).Addr(), bits).Masked().String()
}

// group creates a security group that has only the given rules, and returns its ID.
func (c *networkCloud) group(name string, rules ...*networkv1.SecurityGroupRule) string {
	ctx := c.context(30 * time.Second)
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: name, Rules: rules})
	require.NoError(c.t, err)
	return g.GetId()
}

// openRules permit everything.
func openRules() (rules []*networkv1.SecurityGroupRule) {
	for _, d := range []networkv1.Direction{networkv1.Direction_DIRECTION_INGRESS, networkv1.Direction_DIRECTION_EGRESS} {
		for _, e := range []networkv1.Ethertype{networkv1.Ethertype_ETHERTYPE_IPV4, networkv1.Ethertype_ETHERTYPE_IPV6} {
			rules = append(rules, &networkv1.SecurityGroupRule{Direction: d, Ethertype: e})
		}
	}
	return rules
}

// ingress permits incoming IPv4 packets of a protocol from everywhere. The port 0 permits all ports.
func ingress(protocol string, port uint32) *networkv1.SecurityGroupRule {
	return &networkv1.SecurityGroupRule{
		Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4,
		Protocol: protocol, PortMin: port, PortMax: port,
	}
}

// rawVPC is a VPC with IPv6 whose ports permit everything. Its subnet has no DHCP.
type rawVPC struct {
	id, subnet, group string
	gateway, gateway6 netip.Addr
	attacker          *nic // a NIC of b, on host 2
	near, far         *nic // a NIC of e on the attacker's host, and a NIC of a on host 1
}

// newRawVPC creates the VPC, and attaches a NIC in it to each of the three guests.
func (c *networkCloud) newRawVPC(a, b, e *machine) *rawVPC {
	r := &rawVPC{gateway: netip.MustParseAddr("10.0.5.1"), gateway6: netip.MustParseAddr("fd00:0:0:5::1")}
	r.id, r.subnet = c.privateSubnet("raw", "10.0.5.0/24", "fd00:0:0:5::/64")
	r.group = c.group("raw", openRules()...)
	r.attacker = c.plug(b, "raw", r.subnet, r.group)
	r.near = c.plug(e, "raw", r.subnet, r.group)
	r.far = c.plug(a, "raw", r.subnet, r.group)
	return r
}

// capture is a running capture of all frames that a guest receives.
type capture struct {
	m    *machine
	file string // path of the output in the guest
	end  string // text in the last frame
}

// startCapture starts to capture the frames of all interfaces of a guest.
func (m *machine) startCapture() *capture {
	m.c.t.Helper()
	p := &capture{m: m, file: fmt.Sprintf("/tmp/capture-%d", time.Now().UnixNano())}
	p.end = "<end of " + p.file + ">"
	m.run(fmt.Sprintf("/init capture any 300 '%s' >%s 2>&1 </dev/null &\nuntil grep -q . %s; do sleep 0.05; done",
		p.end, p.file, p.file))
	return p
}

// awaitText waits until a frame with the text has been captured.
func (p *capture) awaitText(text string) {
	p.m.c.t.Helper()
	p.m.eventually(fmt.Sprintf("%s captures %q", p.m.vm.GetName(), text), fmt.Sprintf("grep -q %x %s", text, p.file))
}

// stop ends the capture and returns the captured frames in hexadecimal digits.
func (p *capture) stop() string {
	p.m.c.t.Helper()
	// The script contains the end text, so the HTTP request that sends the script to the guest ends the capture.
	wait := fmt.Sprintf("for i in $(seq 100); do tail -n 1 %s | grep -q %x && break; sleep 0.1; done", p.file, p.end)
	out := p.m.run(fmt.Sprintf("# %s\n%s\ncat %s && rm %s", p.end, wait, p.file, p.file))
	require.True(p.m.c.t, strings.HasPrefix(out, "capturing\n"), "the capture did not run")
	return out
}

// send sends frames from the NIC, each three times.
func (n *nic) send(frames [][]byte) {
	n.c.t.Helper()
	var lines strings.Builder
	for _, f := range frames {
		fmt.Fprintf(&lines, "%x\n", f)
	}
	n.run(fmt.Sprintf("/init send %s 3 <<'END'\n%sEND", n.device, lines.String()))
}
