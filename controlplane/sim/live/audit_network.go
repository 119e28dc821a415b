package live

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// networkRecords is the witness's copy of the records of the network service. The mutex of the witness guards it.
type networkRecords struct {
	f       *fleet
	vpcs    map[string]*cloud.VPC
	subnets map[string]*cloud.Subnet
	ports   map[string]*cloud.Port
	groups  map[string]*cloud.SecurityGroup
	hosts   map[cloud.NodeID]*cloud.HostNetwork
	edge    edgeRecords
	// released has the time at which an address was last released, by <subnet>-<address>.
	released map[string]cloud.Time
	// numbers has the number of records of each table in networkTables.
	numbers map[string]int
	// usage has the stored usage of the quotas of networks, by key.
	usage map[string][]byte
	// changes is the number of changes of records that hosts receive.
	changes int

	// The following fields describe the revision that is being checked: the addresses of deleted and released ports,
	// and whether a port was created or deleted.
	freed   []string
	resting map[string]bool
	changed bool
	// beginNumbers and beginUsage are the values of numbers and usage before the tenants made their first call.
	beginNumbers map[string]int
	beginUsage   map[string][]byte
}

// networkTables has the tables of the network service.
var networkTables = []string{
	"net-vpc", "net-subnet", "net-port", "net-security-group", "net-route-table", "net-nat", "net-floating-ip",
	"net-service-ip", "net-host-network", "subnet-of", "port-of", "port-at", "port-mac", "device-port", "group-port",
	"group-referrer", "group-default", "network-name", "vni", "vni-last", "vpc-default", "ipam", "ipam-assigned",
	"ipam-resting", "address6", "route-table-in", "route-table-of", "route-target", "nat-in", "nat-of", "floating-at",
	"external-address",
}

func newNetworkRecords(f *fleet) *networkRecords {
	n := &networkRecords{
		f: f, vpcs: map[string]*cloud.VPC{}, subnets: map[string]*cloud.Subnet{}, ports: map[string]*cloud.Port{},
		groups: map[string]*cloud.SecurityGroup{}, hosts: map[cloud.NodeID]*cloud.HostNetwork{}, released: map[string]cloud.Time{}, edge: newEdgeRecords(),
		numbers: map[string]int{}, usage: map[string][]byte{}, resting: map[string]bool{},
	}
	for _, t := range networkTables {
		n.numbers[t] = 0
	}
	return n
}

// change applies one event to the copy of the records.
func (n *networkRecords) change(e watch.Event, parts []string) (err error) {
	deleted := e.Type == watch.EventDelete
	if _, ok := n.numbers[parts[0]]; ok {
		if deleted {
			n.numbers[parts[0]]--
		} else if e.KV.Version == 1 {
			n.numbers[parts[0]]++
		}
	}
	switch parts[0] {
	case "net-vpc", "net-subnet", "net-security-group", "net-floating-ip", "net-nat", "net-route-table", "net-port":
		n.changes++
	}
	switch parts[0] {
	case "net-vpc":
		return copyRecord(n.vpcs, e, parts[2])
	case "net-subnet":
		return copyRecord(n.subnets, e, parts[2])
	case "net-security-group":
		return copyRecord(n.groups, e, parts[2])
	case "net-floating-ip":
		n.changed = true
		return copyRecord(n.edge.floating, e, parts[2])
	case "net-nat":
		n.changed = true
		return copyRecord(n.edge.nats, e, parts[2])
	case "net-route-table":
		n.changed = true
		return copyRecord(n.edge.tables, e, parts[2])
	case "net-host-network":
		return copyRecord(n.hosts, e, cloud.NodeID(parts[1]))
	case "net-port":
		before := n.ports[parts[2]]
		if err := copyRecord(n.ports, e, parts[2]); err != nil {
			return err
		}
		if deleted {
			n.changed = true
			n.freed = append(n.freed, addressKey(before))
			return nil
		}
		return n.portStep(before, n.ports[parts[2]])
	case "ipam-resting":
		if !deleted {
			at, err := strconv.ParseInt(parts[1], 16, 64)
			n.released[parts[2]], n.resting[parts[2]] = cloud.Time(at), true
			return err
		}
	case "usage", "org-usage":
		if strings.Contains(string(e.KV.Key), "networks") {
			n.usage[string(e.KV.Key)] = bytes.Clone(e.KV.Value)
		}
	}
	return nil
}

// copyRecord stores the record of an event in all, or deletes it there.
func copyRecord[K comparable, T any](all map[K]*T, e watch.Event, key K) error {
	if e.Type == watch.EventDelete {
		delete(all, key)
		return nil
	}
	now, err := decode[T](e.KV.Value)
	all[key] = now
	return err
}

// addressKey returns the key of a port's IPv4 address in networkRecords.released.
func addressKey(p *cloud.Port) string { return string(p.Subnet) + "-" + p.IP.String() }

// portStep checks a change of a port's record from the value before, nil for a new port, to the value now.
func (n *networkRecords) portStep(before, now *cloud.Port) error {
	if before == nil {
		n.changed = true
		at, was := n.released[addressKey(now)]
		if rested := now.CreatedAt - at; was && rested < cloud.Time(network.RestTime.Milliseconds()) {
			return fmt.Errorf("port %s gets the address %s, which was released %d ms ago", now.ID, now.IP, rested)
		}
		if was {
			n.f.count("addresses assigned again")
		}
		before = &cloud.Port{}
	}
	if now.BindingGeneration < before.BindingGeneration {
		return fmt.Errorf("port %s goes back from binding %d to %d", now.ID, before.BindingGeneration, now.BindingGeneration)
	}
	if now.Node != "" && now.Node != before.Node && now.BindingGeneration == before.BindingGeneration {
		return fmt.Errorf("port %s is bound to %s without a new binding generation", now.ID, now.Node)
	}
	if now.Status == cloud.NetworkActive && before.Status != cloud.NetworkActive {
		n.f.count("ports ACTIVE")
		h := n.f.hostOf(now.Node)
		if h == nil {
			return fmt.Errorf("port %s is ACTIVE on the unknown host %q", now.ID, now.Node)
		}
		if last := h.acknowledgedBinding(now.ID); last < now.BindingGeneration {
			return fmt.Errorf("port %s is ACTIVE with binding %d, but %s has acknowledged only %d",
				now.ID, now.BindingGeneration, h.name, last)
		}
	}
	if now.Status == cloud.NetworkError && before.Status != cloud.NetworkError {
		n.f.count("ports with ERROR")
	}
	return nil
}

// endRevision checks the records as of a revision of which all events were applied.
func (n *networkRecords) endRevision() error {
	defer func() { n.freed, n.changed = nil, false; clear(n.resting) }()
	if !n.changed {
		return nil
	}
	for _, a := range n.freed {
		if !n.resting[a] {
			return fmt.Errorf("the address %s is released and does not rest", a)
		}
	}
	used := map[string]cloud.PortID{}
	for _, p := range n.ports {
		keys := []string{addressKey(p), string(p.VPC) + "-" + p.MAC.String()}
		if p.IP6.IsValid() {
			keys = append(keys, string(p.Subnet)+"-"+p.IP6.String())
		}
		for _, key := range keys {
			if other, taken := used[key]; taken {
				return fmt.Errorf("ports %s and %s both have %s", p.ID, other, key)
			}
			used[key] = p.ID
		}
		if n.subnets[string(p.Subnet)] == nil || n.vpcs[string(p.VPC)] == nil {
			return fmt.Errorf("port %s has no subnet or VPC", p.ID)
		}
	}
	return n.checkEdge()
}

// unsettled returns "" if every port of a host and every NAT gateway is ACTIVE, and every host has the records that it
// needs. Otherwise it describes one difference.
func (n *networkRecords) unsettled() string {
	for id, p := range n.ports {
		if p.Node != "" && p.Status != cloud.NetworkActive || p.Node == "" && p.Status != cloud.NetworkDown {
			return fmt.Sprintf("port %s of host %q has the status %d %s", id, p.Node, p.Status, p.StatusReason)
		}
	}
	for id, g := range n.edge.nats {
		if g.Status != cloud.NetworkActive {
			return fmt.Sprintf("NAT gateway %s of host %q has the status %d %s", id, g.Node, g.Status, g.StatusReason)
		}
	}
	if why := n.servedTwice(); why != "" {
		return why
	}
	for _, h := range n.f.hosts {
		records, _ := h.networkRecords()
		if why := n.compare(h, records); why != "" {
			return fmt.Sprintf("%s %s", h.name, why)
		}
	}
	return ""
}

// compare describes one difference between the records of a host and those that it needs: the VPCs of its ports and NAT
// gateways with all their subnets and ports, and the security groups of their projects.
func (n *networkRecords) compare(h *host, records map[string]proto.Message) string {
	needs, projects := map[cloud.VPCID]bool{}, map[cloud.ProjectID]bool{}
	for _, p := range n.ports {
		if p.Node == h.node {
			needs[p.VPC], projects[p.Project] = true, true
		}
	}
	for _, g := range n.edge.nats {
		if g.Node == h.node {
			needs[g.VPC], projects[g.Project] = true, true
		}
	}
	count := 0
	for id, p := range n.ports {
		if !needs[p.VPC] {
			continue
		}
		count++
		r, _ := records[id].(*agentv1.HostPort)
		if now, should := textOfPort(r), n.textOf(p); now != should {
			return fmt.Sprintf("has the port %s, and should have %s", now, should)
		}
	}
	for id, s := range n.subnets {
		if needs[s.VPC] {
			count++
			if r, _ := records[id].(*agentv1.HostSubnet); r.GetVni() != s.VNI {
				return fmt.Sprintf("has VNI %d for subnet %s, and should have %d", r.GetVni(), id, s.VNI)
			}
		}
	}
	for id := range needs {
		count++
		if r, _ := records[string(id)].(*agentv1.HostVpc); r == nil {
			return fmt.Sprintf("does not have VPC %s", id)
		}
	}
	for id, g := range n.groups {
		if !projects[g.Project] {
			continue
		}
		count++
		r, _ := records[id].(*networkv1.SecurityGroup)
		same := func(a cloud.Rule, b *networkv1.SecurityGroupRule) bool { return string(a.ID) == b.GetId() }
		if r == nil || !slices.EqualFunc(g.Rules, r.GetRules(), same) {
			return fmt.Sprintf("has the security group %v, and should have %+v", r, g)
		}
	}
	more, why := n.compareEdge(needs, records)
	if why != "" {
		return why
	}
	count += more
	if len(records) != count {
		return fmt.Sprintf("has %d network records, and should have %d", len(records), count)
	}
	return ""
}

// textOf returns what hosts must know of a port, and textOfPort what a host knows of it.
func (n *networkRecords) textOf(p *cloud.Port) string {
	vtep := ""
	if h := n.hosts[p.Node]; h != nil {
		vtep = h.VTEP.String()
	}
	ip6 := ""
	if p.IP6.IsValid() {
		ip6 = p.IP6.String()
	}
	return fmt.Sprintf("%s %s %s %s on %q at %q, binding %d, groups %v",
		p.ID, p.IP, ip6, p.MAC, p.Node, vtep, p.BindingGeneration, p.Groups)
}

func textOfPort(r *agentv1.HostPort) string {
	p := r.GetPort()
	return fmt.Sprintf("%s %s %s %s on %q at %q, binding %d, groups %v",
		p.GetId(), p.GetIpAddress(), p.GetIpv6Address(), p.GetMacAddress(), p.GetNodeId(), r.GetVtep(), r.GetBindingGeneration(), p.GetSecurityGroups())
}

// begin stores the present numbers of records. After everything was deleted, leftovers compares with them.
func (n *networkRecords) begin() {
	n.beginNumbers, n.beginUsage = maps.Clone(n.numbers), maps.Clone(n.usage)
}

// leftovers describes a difference of the records from those at the begin, or returns "" if there is none.
func (n *networkRecords) leftovers() string {
	for _, t := range networkTables {
		if n.numbers[t] != n.beginNumbers[t] {
			return fmt.Sprintf("the table %s has %d records, at the begin it had %d", t, n.numbers[t], n.beginNumbers[t])
		}
	}
	for key, now := range n.usage {
		if !bytes.Equal(now, n.beginUsage[key]) {
			return fmt.Sprintf("the record %s is %x, at the begin it was %x", key, now, n.beginUsage[key])
		}
	}
	return ""
}

// ready returns an error unless the network of each host is known, the first VPC is deleted, and the first floating
// IP's address can be assigned again.
func (n *networkRecords) ready() error {
	if len(n.hosts) < len(n.f.hosts) || len(n.vpcs) > 0 || n.numbers["vni-last"] == 0 ||
		len(n.edge.floating) > 0 || n.numbers["ipam-resting"] > 0 {
		return errors.New("the networks of the hosts are not ready")
	}
	return nil
}

// exists reports whether a network resource has a record.
func (n *networkRecords) exists(id string) bool {
	return n.vpcs[id] != nil || n.subnets[id] != nil || n.ports[id] != nil || n.groups[id] != nil || n.edge.exists(id)
}

// ordered returns the values of a map in the order of the keys.
func ordered[K cmp.Ordered, V any](all map[K]V) (out []V) {
	for _, k := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[k])
	}
	return out
}
