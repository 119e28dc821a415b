package network

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestFeed runs the scripts in testdata/feed. The output of each command but "status" is what the connected hosts
// receive because of the command: a line for each record or deletion. Commands:
//
//	vpc name=V [cidr=C] [evil]      creates a VPC with the subnet V-subnet, with evil in another project
//	port name=P vpc=V               creates a port
//	peer name=P vpc=V with=V        creates a peering, or accepts it if it exists
//	unpeer name=P                   deletes a peering
//	bind port=P node=N              binds a port to a host; without node it is unbound
//	delete port=P                   deletes a port
//	describe port=P                 changes the description of a port
//	group                           adds a rule to the security group "default"
//	floating name=F port=P          moves a floating IP to a port; creates it if needed. Without port it is detached
//	gateway name=G vpc=V [default]  creates a NAT gateway with an address of its own
//	service name=S vpc=V            creates a service IP without backends
//	address name=A [port=P|service=S] attaches a floating IP, which it creates if needed, or detaches it
//	assign [lost=N,M]               gives gateways and floating IPs of service IPs their hosts, and shows them. All
//	                                connected hosts are READY
//	gateways                        shows the NAT gateways and the floating IPs
//	connect node=N vtep=A [external] opens a stream; an older one of the host must end with ABORTED
//	disconnect node=N               ends the stream of a host
//	leader                          ends the term and begins another; all streams end with UNAVAILABLE
//	ack node=N [former] [fail=V]    acknowledges what the host has received, or with former what it had received before
//	                                the last command
//	status                          shows the status of all ports
func TestFeed(t *testing.T) {
	datadriven.Walk(t, "testdata/feed", func(t *testing.T, path string) {
		s := newFeedScript(t)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type feedScript struct {
	*feedWorld
	ids, names map[string]string       // IDs by name, names by ID
	owners     map[string]cloud.Tenant // of VPCs, by name
	former     int64
}

func newFeedScript(t *testing.T) *feedScript {
	return &feedScript{
		feedWorld: newFeedWorld(t), ids: map[string]string{}, names: map[string]string{}, owners: map[string]cloud.Tenant{},
	}
}

func (s *feedScript) name(name, id string) { s.ids[name], s.names[id] = id, name }

func (s *feedScript) arg(d *datadriven.TestData, key string) (value string) {
	if d.HasArg(key) {
		d.ScanArgs(s.t.(*testing.T), key, &value)
	}
	return value
}

func (s *feedScript) run(t *testing.T, d *datadriven.TestData) string {
	node, name := cloud.NodeID(s.arg(d, "node")), s.arg(d, "name")
	port := cloud.PortID(s.ids[s.arg(d, "port")])
	out := ""
	switch d.Cmd {
	case "vpc":
		cidr, owner := s.arg(d, "cidr"), acme
		if d.HasArg("evil") {
			owner = evil
		}
		s.createVPCOf(owner, name, cmp.Or(cidr, "10.0.0.0/16"))
	case "port":
		s.createPort(name, s.arg(d, "vpc"))
	case "peer":
		s.peer(name, s.arg(d, "vpc"), s.arg(d, "with"))
	case "unpeer":
		s.unpeer(name)
	case "bind":
		s.bind(port, node)
	case "migrate": // what MigrateNICs does for a port
		s.change(port, func(p *cloud.Port) {
			if p.MigrationNode = cloud.NodeID(s.arg(d, "other")); p.Node != node {
				p.Node, p.Status = node, cloud.NetworkPending
				p.BindingGeneration++
			}
		})
	case "delete":
		s.update(func(tx *store.Tx) error { _, err := deletePort(tx, acme, port); return err })
	case "describe":
		s.change(port, func(p *cloud.Port) { p.Description += "."; p.UpdatedAt++ })
	case "group":
		s.addRule()
	case "floating":
		s.moveFloating(name, port)
	case "gateway":
		s.createGateway(name, s.arg(d, "vpc"), d.HasArg("default"))
	case "service":
		s.createService(name, s.arg(d, "vpc"))
	case "address":
		s.attach(name, port, cloud.ServiceIPID(s.ids[s.arg(d, "service")]))
	case "assign":
		s.assign(s.arg(d, "lost"))
		out = s.gateways()
	case "gateways":
		return s.gateways()
	case "connect":
		s.externals = nil
		if d.HasArg("external") {
			s.externals = []string{"internet"}
		}
		old := s.agents[node]
		s.connect(node, s.arg(d, "vtep"))
		if old != nil {
			out = fmt.Sprintf("%v\n", old.end())
		}
	case "disconnect":
		close(s.agents[node].requests)
		require.NoError(t, s.agents[node].end())
		delete(s.agents, node)
	case "leader":
		s.stop()
		for _, node := range slices.Sorted(maps.Keys(s.agents)) {
			out += fmt.Sprintf("%s: %v\n", node, s.agents[node].end())
		}
		clear(s.agents)
		s.lead()
	case "ack":
		s.acknowledge(s.agents[node], d)
	case "status":
		return s.status()
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	if d.Cmd != "ack" {
		for _, a := range s.agents {
			s.former = max(s.former, a.revision)
		}
	}
	s.settle()
	for _, node := range slices.Sorted(maps.Keys(s.agents)) {
		if text := s.agents[node].show(s.names); text != "" {
			out += string(node) + ":\n  " + strings.ReplaceAll(text, "\n", "\n  ") + "\n"
		}
	}
	return out
}

func (s *feedScript) createVPC(name string) { s.createVPCOf(acme, name, "10.0.0.0/16") }

func (s *feedScript) createVPCOf(owner cloud.Tenant, name, cidr string) {
	s.owners[name] = owner
	prefix := netip.MustParsePrefix(cidr)
	s.update(func(tx *store.Tx) error {
		vpc, err := createVPC(tx, owner, VPCRequest{Name: name, CIDR: prefix})
		if err != nil {
			return err
		}
		subnet, err := createSubnet(tx, owner, SubnetRequest{VPC: vpc.ID, CIDR: netip.PrefixFrom(prefix.Addr(), 20), DHCP: true})
		if err != nil {
			return err
		}
		group, err := defaultGroup(tx, owner)
		if err != nil {
			return err
		}
		s.name(name, string(vpc.ID))
		s.name(name+"-subnet", string(subnet.ID))
		if owner == acme {
			s.name("default", string(group))
		} else {
			s.name("default-"+string(owner.Project), string(group))
		}
		return nil
	})
}

func (s *feedScript) createPort(name, vpc string) {
	owner := s.owners[vpc]
	s.update(func(tx *store.Tx) error {
		p, err := createPort(tx, owner, PortRequest{Subnet: cloud.SubnetID(s.ids[vpc+"-subnet"]), Secured: true})
		s.name(name, string(p.ID))
		if owner != acme {
			s.foreign[p.ID] = true
		}
		return err
	})
}

func (s *feedScript) addRule() {
	s.update(func(tx *store.Tx) error {
		g, err := find(tx, groups, kindGroup, acme, s.ids["default"])
		if err != nil {
			return err
		}
		g.Rules = append(g.Rules, cloud.Rule{ID: cloud.RuleID(fmt.Sprint(len(g.Rules))), Direction: cloud.Ingress, AnyProtocol: true})
		groups.Put(tx, g, string(acme.Project), string(g.ID))
		return nil
	})
}

func (s *feedScript) moveFloating(name string, port cloud.PortID) {
	s.update(func(tx *store.Tx) error {
		f := &cloud.FloatingIP{ID: cloud.FloatingIPID("floating-" + name), Project: acme.Project, Port: port}
		f.Address = netip.MustParseAddr("203.0.113.7")
		floatingIPs.Put(tx, f, string(acme.Project), string(f.ID))
		s.name(name, string(f.ID))
		return nil
	})
}

func (s *feedScript) acknowledge(a *fakeAgent, d *datadriven.TestData) {
	revision := a.revision
	if d.HasArg("former") {
		revision = s.former
	}
	var failures []*agentv1.VpcFailure
	if d.HasArg("fail") {
		failures = append(failures, &agentv1.VpcFailure{VpcId: s.ids[s.arg(d, "fail")], Error: "no device"})
	}
	a.acknowledge(revision, failures...)
}

func (s *feedScript) status() string {
	var lines []string
	require.NoError(s.t, s.store.View(s.t.Context(), func(v *store.View) error {
		all, _, err := ports.List(v, 0)
		for _, r := range all {
			p := r.Value
			lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s node=%s %s %s", s.names[string(p.ID)], p.Node, statusText[p.Status], p.StatusReason)))
		}
		return err
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

var statusText = map[cloud.NetworkStatus]string{
	cloud.NetworkPending: "PENDING", cloud.NetworkActive: "ACTIVE", cloud.NetworkError: "ERROR", cloud.NetworkDown: "DOWN",
}
