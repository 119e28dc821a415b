package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	small "github.com/trivet-cloud/trivet/images/guest"
)

// networkCloud is a cloud of three members and several hosts, each host in a network namespace of its own.
type networkCloud struct {
	*world
	hosts  []*lab.Agent
	ids    []string // of hosts
	images lab.GuestImages
	// external is the external network "internet" of all hosts.
	external *lab.External
	// networks and vms call member 1 as the tenant ada of the project default.
	networks networkv1.NetworkServiceClient
	vms      vmv1.VmServiceClient
}

// newNetworkCloud starts a cloud with count hosts that are READY and have a network.
func newNetworkCloud(t *testing.T, count int) *networkCloud {
	w := newWorld(t, func(w *world) { w.trio.Extra = lab.Unlimited })
	c := &networkCloud{world: w}
	numbers := make([]int, count)
	for i := range numbers {
		numbers[i] = i + 1
	}
	spaces, err := lab.NewHosts(numbers...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, spaces.Close()) })
	c.external, err = lab.NewExternal(spaces)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.external.Close()) })
	ctx := w.context(2 * time.Minute)
	for _, n := range numbers {
		forward, err := lab.Forward(spaces.Net(n), "127.0.0.1:7443", "127.0.0.2:7443", "127.0.0.3:7443")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, forward.Close()) })
		first := 640_000 + os.Getpid()%1000*1000 + n*100
		agent := &lab.Agent{
			Dir: w.dir, Bin: w.trio.Bin, Name: fmt.Sprintf("host-%d", n), Members: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"},
			Cgroup: fmt.Sprintf("trivet-e2e-%d-%d", os.Getpid(), n), UIDRange: fmt.Sprintf("%d-%d", first, first+99),
			Metrics: spaces.Address(n) + ":7444", Net: spaces.Net(n), Underlay: spaces.Address(n),
			Labels:   map[string]string{"host": fmt.Sprintf("host-%d", n)},
			External: c.external.Connection(n),
			Network:  map[string]any{"prefix": fmt.Sprintf("host%d-", n)},
		}
		c.hosts = append(c.hosts, agent)
		token, err := w.admin.NodeToken(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { c.stop(agent) })
		require.NoError(t, agent.Start(token))
	}
	for _, agent := range c.hosts {
		require.NoError(t, agent.Healthy(ctx))
		node, err := w.admin.AwaitNode(ctx, agent.Name)
		require.NoError(t, err)
		c.ids = append(c.ids, node.GetId())
	}
	c.images, err = lab.ImportGuest(ctx, w.trio, w.admin, guest(t))
	require.NoError(t, err)
	tenant := w.dial(1, w.tenant("ada", "default", "default", "project:member"))
	c.networks, c.vms = tenant.Networks(), tenant.VMs
	return c
}

// run runs a part of a test, whose failures are that part's.
func (c *networkCloud) run(name string, f func(t *testing.T)) {
	whole := c.t
	whole.Run(name, func(t *testing.T) {
		c.t = t
		defer func() { c.t = whole }()
		f(t)
	})
}

// stop ends an agent, its guests and its namespaces.
func (c *networkCloud) stop(agent *lab.Agent) {
	if c.dir.Running(agent.Name) != 0 {
		require.NoError(c.t, c.dir.Stop(agent.Name, 12*time.Second))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := agent.EndGuests(ctx)
	require.NoError(c.t, err)
	require.NoError(c.t, agent.RemoveNetworks())
}

// vpc creates a VPC with one subnet per prefix, and returns the IDs of the VPC and of its subnets.
func (c *networkCloud) vpc(name, cidr string, prefixes ...string) (vpc string, subnets []string) {
	ctx := c.context(30 * time.Second)
	v, err := c.networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{Name: name, CidrBlock: cidr})
	require.NoError(c.t, err)
	for i, p := range prefixes {
		s, err := c.networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{Name: fmt.Sprintf("%s-%d", name, i), VpcId: v.GetId(), CidrBlock: p, DhcpEnabled: ptr(true)})
		require.NoError(c.t, err)
		subnets = append(subnets, s.GetId())
	}
	return v.GetId(), subnets
}

func ptr[T any](v T) *T { return &v }

// machine is a running guest.
type machine struct {
	c    *networkCloud
	vm   *vmv1.VirtualMachine
	nic  small.NIC // as the guest printed it
	host int       // index into networkCloud.hosts
}

// boot creates a VM on a host, starts it, and waits until the guest has an address on its first NIC.
func (c *networkCloud) boot(name string, host int, nics ...*vmv1.NetworkSpec) *machine {
	return c.bootWith(name, host, nil, nics...)
}

func (c *networkCloud) bootWith(name string, host int, metadata map[string]string, nics ...*vmv1.NetworkSpec) *machine {
	c.t.Helper()
	ctx := c.context(2 * time.Minute)
	for i, n := range nics {
		if n.Id == "" {
			n.Id = fmt.Sprintf("nic%d", i)
		}
	}
	vm, err := c.vms.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: name, Metadata: metadata, Labels: map[string]string{"trivet/node-selector": "host=" + c.hosts[host].Name},
		Spec: &vmv1.VmSpec{
			Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 192}, Network: nics,
			Boot: &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: "console=ttyS0 quiet panic=-1 tsc=unstable no_timer_check"},
		},
	})
	require.NoError(c.t, err)
	require.Equal(c.t, c.ids[host], vm.GetNodeId())
	_, err = c.vms.StartVm(ctx, &vmv1.StartVmRequest{VmId: vm.GetId()})
	require.NoError(c.t, err)
	m := &machine{c: c, vm: vm, host: host}
	if len(nics) > 0 {
		line, err := c.admin.Console(ctx, vm.GetId(), small.Prefix+"NIC name=eth0 mac", 1)
		require.NoError(c.t, err)
		m.nic, err = small.ParseNIC(line)
		require.NoError(c.t, err)
	}
	return m
}

// port is the ID of the port of the first NIC.
func (m *machine) port() string { return m.vm.GetSpec().GetNetwork()[0].GetPortId() }

// namespace is the path of the network namespace of the VPC of the machine's first NIC on its host.
func (m *machine) namespace() string {
	return fmt.Sprintf("/run/netns/host%d-%s", m.host+1, m.vm.GetSpec().GetNetwork()[0].GetNetworkId())
}

// try runs a shell script in the guest.
func (m *machine) try(ctx context.Context, script string) (string, error) {
	return lab.RunInGuest(ctx, m.namespace(), m.nic.Address.Addr().String(), script)
}

// run runs a shell script in the guest, which must succeed, and returns its output.
func (m *machine) run(script string) string {
	m.c.t.Helper()
	out, err := m.try(m.c.context(time.Minute), script)
	require.NoError(m.c.t, err)
	return strings.TrimSpace(out)
}

// eventually runs a shell script in the guest until it succeeds. Each run has a timeout of ten seconds: a change of the
// network may drop packets of a connection of the script, or of the connection to the guest, without an error.
func (m *machine) eventually(what, script string) {
	m.c.t.Helper()
	defer func(began time.Time) { m.c.t.Logf("%s after %v", what, time.Since(began)) }(time.Now())
	require.NoError(m.c.t, lab.Until(m.c.context(time.Minute), what, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := m.try(ctx, script)
		return err
	}))
}

// TestNetworks runs guests on three hosts and checks what a tenant sees of VPCs from inside of the guests.
func TestNetworks(t *testing.T) {
	c := newNetworkCloud(t, 3)
	vpc, front := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24", "10.0.2.0/24")
	_, twin := c.vpc("twin", "10.0.0.0/16", "10.0.1.0/24")
	a := c.bootWith("a", 0, map[string]string{"trivet/user-data": "#!/bin/sh\necho from user data\n"}, &vmv1.NetworkSpec{SubnetId: front[0], IpAddress: "10.0.1.10"})
	b := c.boot("b", 1, &vmv1.NetworkSpec{SubnetId: front[0]})
	d := c.boot("d", 2, &vmv1.NetworkSpec{SubnetId: front[1]})
	// The other VPC has the same prefixes and a guest with the same address as a.
	e := c.boot("e", 1, &vmv1.NetworkSpec{SubnetId: twin[0], IpAddress: "10.0.1.10"})

	c.run("DHCP gives what the records say", func(t *testing.T) {
		require.Equal(t, "10.0.1.10/24", a.nic.Address.String())
		require.Equal(t, "10.0.1.1", a.nic.Gateway.String())
		require.Equal(t, "a", a.nic.Host)
		require.Equal(t, 1450, a.nic.MTU)
		vm, err := c.vms.GetVm(c.context(time.Minute), &vmv1.GetVmRequest{VmId: b.vm.GetId()})
		require.NoError(t, err)
		require.Equal(t, []string{b.nic.Address.Addr().String()}, vm.GetStatus().GetIpAddresses())
		require.Equal(t, b.nic.MAC, vm.GetSpec().GetNetwork()[0].GetMacAddress())
	})
	c.run("ports are ACTIVE", func(t *testing.T) {
		for _, m := range []*machine{a, b, d, e} {
			port, err := c.networks.GetPort(c.context(time.Minute), &networkv1.GetPortRequest{Id: m.port()})
			require.NoError(t, err)
			require.Equal(t, networkv1.Status_STATUS_ACTIVE, port.GetStatus(), "%s: %s", m.vm.GetName(), port.GetStatusReason())
		}
	})
	c.run("guests of one VPC reach one another by address and name", func(t *testing.T) {
		for _, from := range []*machine{a, b, d} {
			for _, to := range []*machine{a, b, d} {
				from.run("ping -c 1 -W 5 " + to.nic.Address.Addr().String())
				from.run("ping -c 1 -W 5 " + to.vm.GetName() + ".default.internal")
			}
			from.run("ping -c 1 -W 5 10.0.1.1")
		}
	})
	c.run("VPCs with the same addresses do not meet", func(t *testing.T) {
		page := func(m *machine, address string) string {
			return m.run(`printf 'GET / HTTP/1.0\r\n\r\n' | timeout 3 nc ` + address + ` 80 | tail -n 1`)
		}
		require.Equal(t, "a", page(b, "10.0.1.10"))
		require.Equal(t, "e", page(e, "10.0.1.10"))
		_, err := e.try(c.context(time.Minute), "ping -c 1 -W 1 "+b.nic.Address.Addr().String())
		require.Error(t, err, "a guest must not reach another VPC")
	})
	c.run("packets up to the MTU pass, and larger ones are reported", func(t *testing.T) {
		a.run("ping -c 1 -W 5 -s 1372 " + b.nic.Address.Addr().String())
		require.Contains(t, a.run("ip link show eth0"), "mtu 1450")
	})
	c.run("metadata and user data", func(t *testing.T) {
		ask := `printf '%s HTTP/1.0\r\nHost: 169.254.169.254\r\nX-aws-ec2-metadata-token%s\r\n\r\n' | nc -w 5 169.254.169.254 80 | tr -d '\r'`
		token := a.run(fmt.Sprintf(ask, "PUT /latest/api/token", "-ttl-seconds: 60") + " | tail -n 1")
		require.Contains(t, a.run(fmt.Sprintf(ask, "GET /latest/user-data", ": none")), "401")
		get := fmt.Sprintf(ask, "GET %s", ": "+token)
		require.Contains(t, a.run(fmt.Sprintf(get, "/latest/meta-data/local-ipv4")), "10.0.1.10")
		require.Contains(t, a.run(fmt.Sprintf(get, "/latest/meta-data/hostname")), "a")
		require.Contains(t, a.run(fmt.Sprintf(get, "/latest/user-data")), "echo from user data")
		require.Contains(t, a.run("cat /dev/vda | strings"), "echo from user data", "the seed disk")
	})
	c.run("peering on and off", func(t *testing.T) { c.peering(t, vpc, front, a, b) })
	c.run("a service IP leads to healthy backends", func(t *testing.T) { c.serviceIP(front[0], a, b, d) })
	c.run("a rule that is removed stops traffic", func(t *testing.T) { c.revoke(a, b) })
	c.run("guests reach the internet by NAT, and are reached by floating IPs", func(t *testing.T) { c.outside(vpc, b, d) })
	c.run("guests are seen with the address of a NAT gateway", func(t *testing.T) { c.gateways(vpc, front[1], b, d) })
	c.run("NICs are attached and detached while the guest runs", func(t *testing.T) { c.hotPlug(b, twin[0]) })
	c.run("guests keep their network while the agent is gone", func(t *testing.T) {
		c.dir.Signal(c.hosts[1].Name, syscall.SIGKILL)
		d.run("ping -c 3 -W 5 " + b.nic.Address.Addr().String())
		require.NoError(t, lab.Until(c.context(time.Minute), "the agent is dead", func(context.Context) error {
			if c.dir.Running(c.hosts[1].Name) != 0 {
				return errors.New("it runs")
			}
			return nil
		}))
		require.NoError(t, c.hosts[1].Start(""))
		require.NoError(t, c.hosts[1].Healthy(c.context(time.Minute)))
		d.run("ping -c 3 -W 5 b.default.internal")
	})
	c.run("the leader is killed during 500 port creations", func(t *testing.T) { c.killLeaderDuringCreation(vpc, d) })
	c.run("a VPC has the MTU of its record", func(t *testing.T) { c.mtu() })
	c.run("a host with encryption drops what is not encrypted", func(t *testing.T) { c.encryption() })
	c.run("from inside of the guests", func(t *testing.T) { c.insideGuests(vpc, front[0], a, b, d, e) })
	c.run("what is deleted leaves nothing on the hosts", func(t *testing.T) { c.deleteAll(a, b, d, e) })
	c.run("guests with IPv6", func(t *testing.T) { c.ipv6() })
}

// revoke checks that b can no longer reach a after the group's rule was removed, and again after it was added.
func (c *networkCloud) revoke(a, b *machine) {
	ctx := c.context(time.Minute)
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "ping"})
	require.NoError(c.t, err)
	rule := &networkv1.AddSecurityGroupRuleRequest{SecurityGroupId: g.GetId(), Rule: &networkv1.SecurityGroupRule{
		Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4, Protocol: "icmp",
	}}
	g, err = c.networks.AddSecurityGroupRule(ctx, rule)
	require.NoError(c.t, err)
	ingress := g.GetRules()[len(g.GetRules())-1].GetId()
	_, err = c.networks.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		Id: a.port(), SecurityGroups: &networkv1.GroupIds{Ids: []string{g.GetId()}},
	})
	require.NoError(c.t, err)
	b.eventually("ping passes", "ping -c 1 -W 1 10.0.1.10")
	_, err = c.networks.RemoveSecurityGroupRule(ctx, &networkv1.RemoveSecurityGroupRuleRequest{SecurityGroupId: g.GetId(), RuleId: ingress})
	require.NoError(c.t, err)
	b.eventually("ping is dropped", "! ping -c 1 -W 1 10.0.1.10")
	b.run("! ping -c 1 -W 1 10.0.1.10")
	_, err = c.networks.AddSecurityGroupRule(ctx, rule)
	require.NoError(c.t, err)
	b.eventually("ping passes again", "ping -c 1 -W 1 10.0.1.10")
}

// outside checks NAT from two hosts, and a floating IP of b.
func (c *networkCloud) outside(vpc string, b, d *machine) {
	t, ctx := c.t, c.context(2*time.Minute)
	_, err := c.admin.Networks().CreateExternalNetwork(ctx, &networkv1.CreateExternalNetworkRequest{
		Name: "internet", CidrBlock: lab.ExternalCIDR, GatewayIp: lab.ExternalRouter,
		Pools: []*networkv1.AddressRange{{First: "203.0.113.100", Last: "203.0.113.110"}},
	})
	require.NoError(t, err)
	page, err := lab.ListenIn(c.external.Net(), lab.ExternalRouter+":80")
	require.NoError(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(w, host)
	})}
	go server.Serve(page)
	defer server.Close()
	ask := `printf 'GET / HTTP/1.0\r\n\r\n' | timeout 3 nc ` + lab.ExternalRouter + ` 80 2>/dev/null | tail -n 1`
	require.Empty(t, b.run(ask), "without a NAT gateway, the internet must not be reachable")

	_, err = c.networks.CreateNatGateway(ctx, &networkv1.CreateNatGatewayRequest{VpcId: vpc, ExternalNetwork: "internet", IsDefault: true})
	require.NoError(t, err)
	for m, want := range map[*machine]string{b: "203.0.113.12", d: "203.0.113.13"} {
		m.eventually("NAT works", `test "$(`+ask+`)" = `+want)
	}

	f, err := c.networks.CreateFloatingIp(ctx, &networkv1.CreateFloatingIpRequest{ExternalNetwork: "internet", PortId: b.port()})
	require.NoError(t, err)
	b.eventually("the guest uses its floating IP", `test "$(`+ask+`)" = `+f.GetAddress())
	fetch := func(ctx context.Context) (string, error) {
		conn, err := lab.DialIn(ctx, c.external.Net(), f.GetAddress()+":80")
		if err != nil {
			return "", err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := conn.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
			return "", err
		}
		text, err := io.ReadAll(conn)
		return string(text), err
	}
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	_, err = fetch(short)
	cancel()
	require.Error(t, err, "the default group must keep the internet out")
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{Name: "http"})
	require.NoError(t, err)
	_, err = c.networks.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{SecurityGroupId: g.GetId(), Rule: &networkv1.SecurityGroupRule{
		Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4, Protocol: "tcp", PortMin: 80, PortMax: 80,
		RemoteCidr: "0.0.0.0/0",
	}})
	require.NoError(t, err)
	port, err := c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: b.port()})
	require.NoError(t, err)
	_, err = c.networks.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		Id: b.port(), SecurityGroups: &networkv1.GroupIds{Ids: append(port.GetSecurityGroups(), g.GetId())},
	})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the floating IP serves the guest's page", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		text, err := fetch(ctx)
		if err == nil && !strings.HasSuffix(strings.TrimSpace(text), "\nb") {
			err = fmt.Errorf("got %q", text)
		}
		return err
	}))
	_, err = c.networks.DeleteFloatingIp(ctx, &networkv1.DeleteFloatingIpRequest{Id: f.GetId()})
	require.NoError(t, err)
	b.eventually("NAT works again", `test "$(`+ask+`)" = 203.0.113.12`)
}

// hotPlug attaches a NIC to a running guest and detaches it.
func (c *networkCloud) hotPlug(m *machine, subnet string) {
	ctx := c.context(2 * time.Minute)
	vm, err := c.vms.AttachNic(ctx, &vmv1.AttachNicRequest{VmId: m.vm.GetId(), Nic: &vmv1.NetworkSpec{Id: "late", SubnetId: subnet, Model: vmv1.NicModel_NIC_MODEL_VIRTIO_NET}})
	require.NoError(c.t, err)
	require.Len(c.t, vm.GetSpec().GetNetwork(), 2)
	_, err = c.admin.Console(ctx, m.vm.GetId(), small.Prefix+"NIC name=eth1 mac="+vm.GetSpec().GetNetwork()[1].GetMacAddress(), 1)
	require.NoError(c.t, err)
	vm, err = c.vms.DetachNic(ctx, &vmv1.DetachNicRequest{VmId: m.vm.GetId(), NicId: "late"})
	require.NoError(c.t, err)
	require.Len(c.t, vm.GetSpec().GetNetwork(), 1)
	_, err = c.admin.Console(ctx, m.vm.GetId(), small.Prefix+"NIC name=eth1 removed", 1)
	require.NoError(c.t, err)
}

// deleteAll deletes VMs, and checks that the hosts have no namespaces of VPCs afterwards.
func (c *networkCloud) deleteAll(all ...*machine) {
	ctx := c.context(2 * time.Minute)
	for _, m := range all {
		_, err := c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: m.vm.GetId(), Force: true})
		require.NoError(c.t, err)
	}
	ports, err := c.networks.ListPorts(ctx, &networkv1.ListPortsRequest{})
	require.NoError(c.t, err)
	require.Empty(c.t, ports.GetPorts())
	require.NoError(c.t, lab.Until(ctx, "the hosts have no VPCs", func(context.Context) error {
		entries, err := os.ReadDir("/run/netns")
		if err != nil {
			return err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), "host") && !strings.HasSuffix(e.Name(), "-edge") {
				return fmt.Errorf("%s exists", e.Name())
			}
		}
		return nil
	}))
}
