package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// serviceIP follows a service IP with a backend on each of three hosts, of which one is killed. a and b are on two of
// the hosts, in the subnet of the service IP, and d is in another subnet.
func (c *networkCloud) serviceIP(subnet string, a, b, d *machine) {
	t, ctx := c.t, c.context(3*time.Minute)
	k := c.boot("k", 2, &vmv1.NetworkSpec{SubnetId: subnet})
	s, err := c.networks.CreateServiceIp(ctx, &networkv1.CreateServiceIpRequest{
		Name: "api", SubnetId: subnet, Ports: []*networkv1.ServicePort{{Protocol: "tcp", Port: 8080, TargetPort: 80}},
		Backends:    []*networkv1.Backend{{PortId: a.port()}, {PortId: b.port()}, {PortId: k.port()}},
		HealthCheck: &networkv1.HealthCheck{Protocol: "http", Path: "/", IntervalSeconds: 2, UnhealthyThreshold: 2, HealthyThreshold: 1},
	})
	require.NoError(t, err)
	require.Equal(t, networkv1.Status_STATUS_PENDING, s.GetStatus(), "no host has checked the backends")
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, true)

	// Each backend is also a client, which may be led to itself.
	for _, m := range []*machine{a, b, d, k} {
		require.Equal(t, []string{"a", "b", "k"}, m.pages("api.default.internal"), "from %s", m.vm.GetName())
	}
	_, err = c.vms.StopVm(ctx, &vmv1.StopVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, false)
	for _, m := range []*machine{a, b, d} {
		m.eventually("the host has removed the dead backend", fmt.Sprintf("for i in $(seq 8); do %s || exit 1; done", fetchPage(s.GetAddress())))
		require.Equal(t, []string{"a", "b"}, m.pages(s.GetAddress()), "from %s", m.vm.GetName())
	}
	_, err = c.networks.DeleteServiceIp(ctx, &networkv1.DeleteServiceIpRequest{Id: s.GetId()})
	require.NoError(t, err)
	_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
}

// fetchPage returns the command that prints the last line of the page of the service IP, and fails without a page.
func fetchPage(address string) string {
	return `printf 'GET / HTTP/1.0\r\n\r\n' | timeout 5 nc -w 3 ` + address + ` 8080 | tail -n 1 | grep .`
}

// pages fetches the page of a service IP often and returns the different results, sorted.
func (m *machine) pages(address string) []string {
	m.c.t.Helper()
	out := m.run(fmt.Sprintf("for i in $(seq 24); do %s || echo none; done", fetchPage(address)))
	lines := strings.Fields(out)
	slices.Sort(lines)
	return slices.Compact(lines)
}

// awaitHealth waits until a service IP has the status and its backends have the health.
func (c *networkCloud) awaitHealth(id string, status networkv1.Status, healthy ...bool) {
	c.t.Helper()
	require.NoError(c.t, lab.Until(c.context(time.Minute), "the health of the backends is recorded", func(ctx context.Context) error {
		s, err := c.networks.GetServiceIp(ctx, &networkv1.GetServiceIpRequest{Id: id})
		if err != nil {
			return err
		}
		var have []bool
		for _, b := range s.GetBackends() {
			have = append(have, b.GetHealthy())
		}
		if s.GetStatus() != status || !slices.Equal(have, healthy) {
			return fmt.Errorf("%v (%s) with %v", s.GetStatus(), s.GetStatusReason(), have)
		}
		return nil
	}))
}
