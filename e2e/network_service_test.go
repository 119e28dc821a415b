package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// serviceIP creates a service IP with a backend on each of three hosts, and kills one of the backends. It checks that
// all connections succeed before, and after hosts have recorded the failure. The guests a and b are on two of the
// hosts, in the subnet of the service IP, and d is in another subnet.
func (c *networkCloud) serviceIP(subnet string, a, b, d *machine) {
	t := c.t
	k := c.boot("k", 2, &vmv1.NetworkSpec{SubnetId: subnet})
	ctx := c.context(time.Minute)
	s, err := c.networks.CreateServiceIp(ctx, &networkv1.CreateServiceIpRequest{
		Name: "api", SubnetId: subnet, Ports: []*networkv1.ServicePort{{Protocol: "tcp", Port: 8080, TargetPort: 80}},
		Backends: []*networkv1.Backend{{PortId: a.port()}, {PortId: b.port()}, {PortId: k.port()}},
		HealthCheck: &networkv1.HealthCheck{
			Protocol: "http", Path: "/", IntervalSeconds: 2, UnhealthyThreshold: 2, HealthyThreshold: 1,
		},
	})
	require.NoError(t, err)
	require.Equal(t, networkv1.Status_STATUS_PENDING, s.GetStatus(), "no host has checked the backends")
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, true)

	// Each backend is also a client, and may be the backend of its own connection.
	for _, m := range []*machine{a, b, d, k} {
		m.awaitPages("api.default.internal", "a", "b", "k")
	}
	_, err = c.vms.StopVm(c.context(time.Minute), &vmv1.StopVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
	c.awaitHealth(s.GetId(), networkv1.Status_STATUS_ACTIVE, true, true, false)
	for _, m := range []*machine{a, b, d} {
		// The host of the client applies the record some time after the control plane has written it.
		m.eventually("connections reach only healthy backends", m.fetchPages(s.GetAddress(), 4))
		m.awaitPages(s.GetAddress(), "a", "b")
	}
	ctx = c.context(time.Minute)
	_, err = c.networks.DeleteServiceIp(ctx, &networkv1.DeleteServiceIpRequest{Id: s.GetId()})
	require.NoError(t, err)
	_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: k.vm.GetId(), Force: true})
	require.NoError(t, err)
}

// fetchPages returns a script that prints the last line of the page of the service IP count times. It fails if a
// connection does.
func (m *machine) fetchPages(address string, count int) string {
	fetch := `printf 'GET / HTTP/1.0\r\n\r\n' | timeout 5 nc -w 3 ` + address + ` 8080 | tail -n 1 | grep .`
	return fmt.Sprintf("for i in $(seq %d); do %s || exit 1; done", count, fetch)
}

// awaitPages fetches the page of the service IP until each of the backends has answered. All connections must succeed,
// and no other backend may answer.
func (m *machine) awaitPages(address string, backends ...string) {
	m.c.t.Helper()
	seen := map[string]bool{}
	ctx := m.c.context(2 * time.Minute)
	require.NoError(m.c.t, lab.Until(ctx, "all backends have answered", func(context.Context) error {
		for _, page := range strings.Fields(m.run(m.fetchPages(address, 4))) {
			require.Contains(m.c.t, backends, page, "from %s", m.vm.GetName())
			seen[page] = true
		}
		if len(seen) < len(backends) {
			return fmt.Errorf("%v", slices.Sorted(maps.Keys(seen)))
		}
		return nil
	}))
}

// awaitHealth waits until a service IP has the status, and its backends, in their order, the given health.
func (c *networkCloud) awaitHealth(id string, status networkv1.Status, healthy ...bool) {
	c.t.Helper()
	require.NoError(c.t, lab.Until(c.context(time.Minute), "the health is recorded", func(ctx context.Context) error {
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
