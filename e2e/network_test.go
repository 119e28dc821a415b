package e2e

import (
	"context"
	"errors"
	"fmt"
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
	c.run("Prometheus finds and scrapes the members and the agents", func(t *testing.T) { c.discover() })
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
	c.run("a floating IP leads to the backends of a service IP", func(t *testing.T) { c.floatingService(front[0], a, b, d) })
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
