package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// prefix begins the names of all network namespaces of a run.
const prefix = "nbench-"

// host is a host of the benchmark: a network namespace with the agent's packages for devices and packet filters.
type host struct {
	name   string // of the namespace
	vtep   netip.Addr
	device *netdev.Host
	filter *firewall.Firewall
}

// site is a pair of hosts that a veth pair connects, with an underlay MTU of 1500 bytes.
type site struct {
	hosts [2]*host
}

// newSite makes a site. The names of its namespaces begin with prefix and name.
func newSite(ctx context.Context, name string) (s *site, err error) {
	s = &site{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for i := range s.hosts {
		vtep := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
		s.hosts[i] = &host{name: fmt.Sprintf("%s%s%d", prefix, name, i+1), vtep: vtep}
	}
	if err := joinHosts(ctx, s.hosts[0].name, s.hosts[1].name); err != nil {
		return s, err
	}
	for _, h := range s.hosts {
		if h.device, err = netdev.New(netdev.Options{
			VTEP: h.vtep, Device: "eth0", Namespace: filepath.Join(nsthread.Dir, h.name), Prefix: h.name + "-",
		}); err != nil {
			return s, err
		}
		if h.filter, err = firewall.New(firewall.Options{Trusted: []string{"vx*"}}); err != nil {
			return s, err
		}
	}
	return s, nil
}

// joinHosts makes two namespaces and a veth pair between them, with the addresses 192.0.2.1 and 192.0.2.2.
func joinHosts(ctx context.Context, one, two string) error {
	return commands(ctx,
		"ip netns add "+one, "ip netns add "+two,
		fmt.Sprintf("ip -n %s link add eth0 type veth peer name eth0 netns %s", one, two),
		fmt.Sprintf("ip -n %s address add 192.0.2.1/24 dev eth0", one),
		fmt.Sprintf("ip -n %s address add 192.0.2.2/24 dev eth0", two),
		fmt.Sprintf("ip -n %s link set eth0 up", one), fmt.Sprintf("ip -n %s link set eth0 up", two),
		fmt.Sprintf("ip -n %s link set lo up", one), fmt.Sprintf("ip -n %s link set lo up", two),
	)
}

// close closes the hosts and removes all namespaces of the benchmark. No process may use them any more.
func (s *site) close() error {
	for _, h := range s.hosts {
		if h != nil && h.device != nil {
			h.device.Close()
		}
	}
	return removeNamespaces()
}

func removeNamespaces() error {
	paths, err := filepath.Glob(filepath.Join(nsthread.Dir, prefix+"*"))
	errs := []error{err}
	for _, path := range paths {
		errs = append(errs, netns.DeleteNamed(filepath.Base(path)))
	}
	return errors.Join(errs...)
}

// commands runs programs one after the other. Words are separated by spaces.
func commands(ctx context.Context, lines ...string) error {
	for _, l := range lines {
		words := strings.Fields(l)
		if out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", l, err, out)
		}
	}
	return nil
}

// firstPort is the number of the first port of a VPC. Lower numbers belong to the gateway.
const firstPort = 10

// addressOf returns the address of a port with a number below 65,000.
func addressOf(number int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte(number >> 8), byte(number)})
}

func macOf(number int) cloud.MAC { return cloud.MAC{2, 0, 0, 0, byte(number >> 8), byte(number)} }

// newVPC returns a VPC with the subnet 10.0.0.0/16, without ports and groups.
func newVPC(id string, vni uint32) cloud.HostVPC {
	all := netip.MustParsePrefix("10.0.0.0/16")
	return cloud.HostVPC{
		ID: cloud.VPCID(id), MTU: 1450, CIDR: all,
		Subnets: []cloud.HostSubnet{{ID: "subnet", VNI: vni, CIDR: all, Gateway: addressOf(1), DHCP: true}},
	}
}

// portOf returns the port with a number.
func portOf(number int, groups ...cloud.SecurityGroupID) cloud.HostPort {
	return cloud.HostPort{
		ID: cloud.PortID(fmt.Sprintf("port-%05d", number)), Device: fmt.Sprintf("p%d", number),
		MAC: macOf(number), IP: addressOf(number), Secured: true, Groups: groups,
	}
}

// remoteOf returns the port with a number on another host.
func remoteOf(number int, vtep netip.Addr) cloud.RemotePort {
	return cloud.RemotePort{MAC: macOf(number), IP: addressOf(number), VTEP: vtep}
}

// groupOf returns a group with a number of rules that permit single TCP ports, and a rule that permits everything from
// the members of the group peers, if it is not "". The group permits all egress.
func groupOf(id cloud.SecurityGroupID, rules int, peers cloud.SecurityGroupID) cloud.HostGroup {
	g := cloud.HostGroup{ID: id, Rules: []cloud.Rule{{Direction: cloud.Egress, AnyProtocol: true}}}
	for i := range rules {
		ports := cloud.PortRange{First: uint16(1 + i), Last: uint16(1 + i)}
		g.Rules = append(g.Rules, cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Ports: ports})
	}
	if peers != "" {
		g.Rules = append(g.Rules, cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: peers})
	}
	return g
}

// membersOf returns a group whose members are the ports with the numbers first to first+count-1.
func membersOf(id cloud.SecurityGroupID, first, count int) cloud.GroupMembers {
	m := cloud.GroupMembers{ID: id}
	for i := range count {
		m.Addresses = append(m.Addresses, addressOf(first+i))
	}
	return m
}

// apply makes a VPC on the host, as the agent does: devices, packet filter, ports up.
func (h *host) apply(ctx context.Context, vpc cloud.HostVPC) error {
	if _, err := h.device.Prepare(ctx, vpc); err != nil {
		return err
	}
	if err := h.filterVPC(ctx, vpc); err != nil {
		return err
	}
	_, err := h.device.Activate(ctx, vpc)
	return err
}

// filterVPC applies the packet filter of a VPC whose namespace exists.
func (h *host) filterVPC(ctx context.Context, vpc cloud.HostVPC) error {
	ns, err := netns.GetFromPath(h.device.Path(vpc.ID))
	if err != nil {
		return err
	}
	defer ns.Close()
	_, err = h.filter.Set(ctx, ns, vpc)
	return err
}

// attach makes a namespace, and attaches it to a port of a VPC as a container is attached. It returns the namespace's
// name. The packet filter of the VPC must be applied.
func (h *host) attach(ctx context.Context, vpc cloud.HostVPC, number int) (string, error) {
	name := fmt.Sprintf("%s-%s-e%d", h.name, vpc.ID, number)
	if _, err := nsthread.Create(name); err != nil {
		return "", err
	}
	endpoint := netdev.Endpoint{Namespace: filepath.Join(nsthread.Dir, name), Device: "eth0"}
	if err := h.device.AttachVeth(ctx, vpc, portOf(number).ID, endpoint); err != nil {
		return "", err
	}
	return name, h.device.ActivatePort(ctx, vpc, portOf(number).ID)
}
