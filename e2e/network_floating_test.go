package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// floatingService attaches a floating IP to a service IP, and then gives the service IP backends on hosts other than
// the host with the floating IP. It checks that clients outside reach all backends, and only the healthy ones after one
// of the backends was killed. It checks this again after the agent of the host with the floating IP was killed, and
// after another host with the floating IP was cut off from the control plane, which must then no longer answer for the
// address. The guests are on three hosts.
func (c *networkCloud) floatingService(subnet string, guests ...*machine) {
	t := c.t
	c.ensureInternet()
	ctx := c.context(time.Minute)
	ports := []*networkv1.ServicePort{{Protocol: "tcp", Port: 8080, TargetPort: 80}}
	check := &networkv1.HealthCheck{
		Protocol: "http", Path: "/", IntervalSeconds: 2, UnhealthyThreshold: 2, HealthyThreshold: 1,
	}
	s, err := c.networks.CreateServiceIp(ctx, &networkv1.CreateServiceIpRequest{
		Name: "public", SubnetId: subnet, Ports: ports, HealthCheck: check,
	})
	require.NoError(t, err)
	f, err := c.networks.CreateFloatingIp(ctx, &networkv1.CreateFloatingIpRequest{
		ExternalNetwork: "internet", ServiceIpId: s.GetId(),
	})
	require.NoError(t, err)
	require.Equal(t, networkv1.Status_STATUS_PENDING, f.GetStatus())
	first := c.activeFloating(f.GetId(), "")
	backends := slices.DeleteFunc(guests, func(m *machine) bool { return m.host == first })
	require.Len(t, backends, 2)
	k := c.boot("k2", backends[0].host, &vmv1.NetworkSpec{SubnetId: subnet})
	defer c.permitWorld(append(backends, k)...)()
	setBackends := func(all ...*machine) {
		q := &networkv1.UpdateServiceIpRequest{Id: s.GetId(), Ports: ports, HealthCheck: check}
		for _, m := range all {
			q.Backends = append(q.Backends, &networkv1.Backend{PortId: m.port()})
		}
		_, err := c.networks.UpdateServiceIp(c.context(time.Minute), q)
		require.NoError(t, err)
	}
	names := []string{backends[0].vm.GetName(), backends[1].vm.GetName()}
	setBackends(backends[0], backends[1], k)
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, true)
	c.awaitOutside(f.GetAddress(), append(names, "k2")...)

	t.Log("a backend is killed")
	_, err = c.vms.StopVm(c.context(time.Minute), &vmv1.StopVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, false)
	c.awaitOutside(f.GetAddress(), names...)

	t.Log("the agent of the host with the floating IP is killed")
	c.dir.Signal(c.hosts[first].Name, syscall.SIGKILL)
	second := c.activeFloating(f.GetId(), c.ids[first])
	c.awaitOutside(f.GetAddress(), names...)
	require.NoError(t, c.hosts[first].Start(""))
	require.NoError(t, c.hosts[first].Healthy(c.context(time.Minute)))

	t.Log("the host with the floating IP is cut off from the control plane")
	kept := backends[0]
	if kept.host == second {
		kept = backends[1]
	}
	setBackends(kept)
	c.awaitOutside(f.GetAddress(), kept.vm.GetName())
	heal := c.cutControlPlane(second)
	third := c.activeFloating(f.GetId(), c.ids[second])
	require.False(t, c.announces(t, second, f.GetAddress()), "the host that was cut off still answers for the address")
	require.True(t, c.announces(t, third, f.GetAddress()))
	c.awaitOutside(f.GetAddress(), kept.vm.GetName())
	heal()
	require.NoError(t, c.hosts[second].Healthy(c.context(time.Minute)))

	ctx = c.context(time.Minute)
	_, err = c.networks.DeleteFloatingIp(ctx, &networkv1.DeleteFloatingIpRequest{Id: f.GetId()})
	require.NoError(t, err)
	_, err = c.networks.DeleteServiceIp(ctx, &networkv1.DeleteServiceIpRequest{Id: s.GetId()})
	require.NoError(t, err)
	_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
}

// permitWorld adds a security group to the ports of guests that permits TCP port 80 from everywhere. The returned
// function removes it from the ports that still exist.
func (c *networkCloud) permitWorld(guests ...*machine) (remove func()) {
	ctx := c.context(time.Minute)
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{
		Name: "world", Rules: []*networkv1.SecurityGroupRule{ingress("tcp", 80)},
	})
	require.NoError(c.t, err)
	former := map[string][]string{}
	for _, m := range guests {
		port, err := c.networks.GetPort(ctx, &networkv1.GetPortRequest{Id: m.port()})
		require.NoError(c.t, err)
		former[m.port()] = port.GetSecurityGroups()
		_, err = c.networks.UpdatePort(ctx, &networkv1.UpdatePortRequest{
			Id: m.port(), SecurityGroups: &networkv1.GroupIds{Ids: append(port.GetSecurityGroups(), g.GetId())},
		})
		require.NoError(c.t, err)
	}
	return func() {
		for id, groups := range former {
			_, err := c.networks.UpdatePort(c.context(time.Minute), &networkv1.UpdatePortRequest{
				Id: id, SecurityGroups: &networkv1.GroupIds{Ids: groups},
			})
			if status.Code(err) != codes.NotFound {
				require.NoError(c.t, err)
			}
		}
	}
}

// ensureInternet creates the external network "internet" unless it exists.
func (c *networkCloud) ensureInternet() {
	ctx := c.context(time.Minute)
	_, err := c.admin.Networks().GetExternalNetwork(ctx, &networkv1.GetExternalNetworkRequest{Name: "internet"})
	if status.Code(err) == codes.NotFound {
		_, err = c.admin.Networks().CreateExternalNetwork(ctx, &networkv1.CreateExternalNetworkRequest{
			Name: "internet", CidrBlock: lab.ExternalCIDR, GatewayIp: lab.ExternalRouter,
			Pools: []*networkv1.AddressRange{{First: "203.0.113.100", Last: "203.0.113.110"}},
		})
	}
	require.NoError(c.t, err)
}

// activeFloating waits until a floating IP is ACTIVE on a host other than the one with the ID former, and returns the
// index of this host.
func (c *networkCloud) activeFloating(id, former string) (host int) {
	c.t.Helper()
	defer func(began time.Time) { c.t.Logf("floating IP ACTIVE after %v", time.Since(began)) }(time.Now())
	require.NoError(c.t, lab.Until(c.context(2*time.Minute), "the floating IP is ACTIVE", func(ctx context.Context) error {
		f, err := c.networks.GetFloatingIp(ctx, &networkv1.GetFloatingIpRequest{Id: id})
		if err != nil {
			return err
		}
		host = slices.Index(c.ids, f.GetNodeId())
		if f.GetStatus() != networkv1.Status_STATUS_ACTIVE || host < 0 || f.GetNodeId() == former {
			return fmt.Errorf("it is %s on host %q: %s", f.GetStatus(), f.GetNodeId(), f.GetStatusReason())
		}
		return nil
	}))
	return host
}

// awaitOutside fetches the page of a service IP from the external network until each of the backends has answered, and
// then requires that 20 connections succeed and no other backend answers.
func (c *networkCloud) awaitOutside(address string, backends ...string) {
	c.t.Helper()
	fetch := func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		text, err := c.fetchOutside(ctx, address+":8080")
		lines := strings.Fields(text)
		if err != nil || len(lines) == 0 {
			return "", fmt.Errorf("got %q: %w", text, err)
		}
		return lines[len(lines)-1], nil
	}
	seen := map[string]bool{}
	require.NoError(c.t, lab.Until(c.context(2*time.Minute), "all backends have answered", func(ctx context.Context) error {
		page, err := fetch(ctx)
		if seen[page] = true; err != nil {
			return err
		}
		for _, name := range backends {
			if !seen[name] {
				return fmt.Errorf("%v", slices.Sorted(maps.Keys(seen)))
			}
		}
		return nil
	}))
	// The host applies a change of health some time after the control plane has recorded it.
	clear(seen)
	require.NoError(c.t, lab.Until(c.context(2*time.Minute), "only the backends answer", func(ctx context.Context) error {
		for range 20 {
			page, err := fetch(ctx)
			if err != nil {
				return err
			}
			if !slices.Contains(backends, page) {
				return fmt.Errorf("%s answered", page)
			}
		}
		return nil
	}))
}
