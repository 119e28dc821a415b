package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// healthWorld is a world with a service IP that has a health check and three backends: port p1 on host h1, port p2 on
// host h2, and the address 10.0.0.99, which no port has.
type healthWorld struct {
	*feedScript
	service cloud.ServiceIP
}

func newHealthWorld(t *testing.T) *healthWorld {
	w := &healthWorld{feedScript: newFeedScript(t)}
	w.createVPC("prod")
	for n := 1; n <= 2; n++ {
		port := fmt.Sprintf("p%d", n)
		w.createPort(port, "prod")
		w.bind(cloud.PortID(w.ids[port]), cloud.NodeID(fmt.Sprintf("h%d", n)))
		w.connect(cloud.NodeID(fmt.Sprintf("h%d", n)), fmt.Sprintf("192.0.2.%d", n))
	}
	w.update(func(tx *store.Tx) (err error) {
		q := ServiceRequest{Subnet: cloud.SubnetID(w.ids["prod-subnet"]), Service: cloud.ServiceIP{
			Name: "api", Affinity: cloud.AffinityNone,
			Ports:  []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 8080}},
			Health: &cloud.HealthCheck{IntervalSeconds: 1, Unhealthy: 1, Healthy: 1},
			Backends: []cloud.Backend{
				{Port: cloud.PortID(w.ids["p1"]), Weight: 1}, {Port: cloud.PortID(w.ids["p2"]), Weight: 1},
				{Address: netip.MustParseAddr("10.0.0.99"), Weight: 1},
			},
		}}
		w.service, err = createService(tx, acme, q)
		return err
	})
	w.settle()
	return w
}

// report sends a report of a host about a backend, p1, p2 or an address.
func (w *healthWorld) report(node cloud.NodeID, backend string, healthy bool) {
	w.t.Helper()
	h := &agentv1.BackendHealth{
		VpcId: w.ids["prod"], ServiceIpId: string(w.service.ID), PortId: w.ids[backend], Healthy: healthy,
	}
	if h.PortId == "" {
		h.Address = backend
	}
	w.agents[node].request(&agentv1.SyncNetworksRequest{
		AppliedRevision: w.agents[node].revision, BackendHealth: []*agentv1.BackendHealth{h},
	})
}

// show returns the status of the service IP and one letter for each backend: h is healthy, u is unhealthy, and ? is not
// checked.
func (w *healthWorld) show() string {
	w.t.Helper()
	s, err := w.networks.GetServiceIP(w.t.Context(), acme, w.service.ID)
	require.NoError(w.t, err)
	var out strings.Builder
	for _, b := range s.Backends {
		switch {
		case b.Healthy:
			out.WriteByte('h')
		case b.Checked:
			out.WriteByte('u')
		default:
			out.WriteByte('?')
		}
	}
	return statusText[s.Status] + " " + out.String()
}

// TestBackendHealth sends reports of two hosts about the backends of a service IP. It checks the record, its status,
// and the messages to the hosts.
func TestBackendHealth(t *testing.T) {
	w := newHealthWorld(t)
	require.Equal(t, "PENDING ???", w.show())
	w.report("h1", "p2", true)
	require.Equal(t, "PENDING ???", w.show(), "a host may report about its own ports only")
	w.report("h1", "p1", false)
	require.Equal(t, "PENDING u??", w.show())
	w.report("h2", "p2", false)
	w.createVPCOf(acme, "lab", "10.1.0.0/16")
	w.createPort("q", "lab")
	w.peer("link", "prod", "lab")
	w.bind(cloud.PortID(w.ids["q"]), "h3")
	w.connect("h3", "192.0.2.3")
	w.settle()
	require.NotNil(t, w.agents["h3"].state[string(w.service.ID)], "the host has the VPC because of the peering")
	w.report("h3", "10.0.0.99", true)
	require.Equal(t, "PENDING uu?", w.show(), "a host without a port of the VPC reports")
	w.report("h2", "10.0.0.99", false)
	require.Equal(t, "ERROR uuu", w.show())
	w.report("h1", "p1", true)
	require.Equal(t, "ACTIVE huu", w.show())

	// Both hosts receive the health.
	w.settle()
	for _, a := range w.agents {
		require.True(t, a.state[string(w.service.ID)].(*networkv1.ServiceIp).GetBackends()[0].GetHealthy())
	}
	// A repeat changes nothing. Reports about unknown records are ignored.
	charged := w.agents["h1"].charged.Load()
	w.report("h1", "p1", true)
	w.report("h1", "10.0.0.98", true)
	w.agents["h1"].request(&agentv1.SyncNetworksRequest{BackendHealth: []*agentv1.BackendHealth{
		{VpcId: "unknown", ServiceIpId: string(w.service.ID), PortId: w.ids["p1"]},
		{VpcId: w.ids["prod"], ServiceIpId: "unknown", PortId: w.ids["p1"]},
	}})
	require.Equal(t, "ACTIVE huu", w.show())
	require.Equal(t, charged, w.agents["h1"].charged.Load())
	require.NoError(t, w.agents["h1"].ctx.Err())
}

// TestHealthIsForgotten requires that a backend is unchecked after its port was bound to another host or the health
// check has changed, and keeps its health otherwise.
func TestHealthIsForgotten(t *testing.T) {
	w := newHealthWorld(t)
	w.report("h1", "p1", true)
	w.report("h2", "p2", true)
	require.Equal(t, "ACTIVE hh?", w.show())
	update := func(change func(*cloud.ServiceIP)) {
		next := cloud.ServiceIP{
			Ports: w.service.Ports, Backends: slices.Clone(w.service.Backends), Affinity: cloud.AffinityNone,
		}
		check := *w.service.Health
		next.Health = &check
		change(&next)
		w.update(func(tx *store.Tx) error {
			_, err := updateService(tx, acme, ServiceUpdate{ID: w.service.ID, Service: next})
			return err
		})
	}
	update(func(s *cloud.ServiceIP) {
		s.Backends[0].Weight = 5
		s.Health.Port = 0
		s.Affinity = cloud.AffinityClientIP
	})
	require.Equal(t, "ACTIVE hh?", w.show())
	w.clock.Advance(time.Second)
	w.update(func(tx *store.Tx) error {
		p, err := ports.Get(tx, string(acme.Project), w.ids["p1"])
		if err != nil {
			return err
		}
		return BindNIC(tx, p, "h2", "web")
	})
	require.Equal(t, "ACTIVE ?h?", w.show())
	s, err := w.networks.GetServiceIP(t.Context(), acme, w.service.ID)
	require.NoError(t, err)
	require.Equal(t, s.CreatedAt+1000, s.UpdatedAt)
	w.settle()
	w.report("h1", "p1", true)
	require.Equal(t, "ACTIVE ?h?", w.show(), "the former host reports")
	update(func(s *cloud.ServiceIP) {
		s.Ports = []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 9090}}
	})
	require.Equal(t, "PENDING ???", w.show(), "the port that is checked has changed")
	update(func(s *cloud.ServiceIP) { s.Health = nil })
	require.Equal(t, "ACTIVE hhh", w.show())
	update(func(s *cloud.ServiceIP) { s.Backends = nil })
	require.Equal(t, "PENDING ", w.show())
}

// TestSelectedHealth sends reports about ports that a service IP selects by a label. The record of the service IP
// changes with the reports, and not with the ports. A port that was bound to another host, or got the label again, is
// unchecked.
func TestSelectedHealth(t *testing.T) {
	w := newHealthWorld(t)
	label := func(port, value string) {
		w.update(func(tx *store.Tx) error {
			labels := map[string]string{"app": value}
			_, err := updatePort(tx, acme, PortUpdate{ID: cloud.PortID(w.ids[port]), Labels: &labels})
			return err
		})
	}
	w.update(func(tx *store.Tx) error {
		_, err := updateService(tx, acme, ServiceUpdate{ID: w.service.ID, Service: cloud.ServiceIP{
			Ports: w.service.Ports, Health: w.service.Health, Affinity: cloud.AffinityNone,
			Selector: map[string]string{"app": "web"},
		}})
		return err
	})
	require.Equal(t, "PENDING ", w.show())
	w.settle()
	before := w.agents["h1"].state[string(w.service.ID)]
	label("p1", "web")
	label("p2", "web")
	w.settle()
	require.Equal(t, "PENDING ??", w.show())
	require.Same(t, before, w.agents["h1"].state[string(w.service.ID)], "the service IP is not sent again")
	require.Equal(t, map[string]string{"app": "web"},
		w.agents["h1"].state[w.ids["p2"]].(*agentv1.HostPort).GetPort().GetLabels())

	w.report("h1", "p2", true)
	w.report("h2", "10.0.0.99", true)
	require.Equal(t, "PENDING ??", w.show())
	w.report("h1", "p1", true)
	w.report("h2", "p2", false)
	require.Equal(t, "ACTIVE hu", w.show())
	w.settle()
	reports := w.agents["h2"].state[string(w.service.ID)].(*networkv1.ServiceIp).GetBackends()
	require.Len(t, reports, 2)
	require.True(t, reports[0].GetHealthy())

	label("p1", "db")
	require.Equal(t, "ERROR u", w.show())
	w.report("h1", "p1", true)
	label("p1", "web")
	require.Equal(t, "PENDING ?u", w.show(), "the health is that before the change of the label")
	w.report("h1", "p1", true)
	w.update(func(tx *store.Tx) error {
		p, err := ports.Get(tx, string(acme.Project), w.ids["p1"])
		if err != nil {
			return err
		}
		return BindNIC(tx, p, "h2", "web")
	})
	require.Equal(t, "PENDING ?u", w.show(), "the health is that of the former host")
}
