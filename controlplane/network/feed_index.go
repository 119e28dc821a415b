package network

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// index has which host needs which VPC, and which record belongs to which VPC. It has no record itself.
type index struct {
	// revision is that up to which the index has every change.
	revision int64
	entries  map[recordKey]entry
	vpcs     map[cloud.VPCID]*vpcEntry
	projects map[cloud.ProjectID]*projectEntry
	// needs has the VPCs that a host needs.
	needs map[cloud.NodeID]map[cloud.VPCID]struct{}
	// portsOn has the ports, NAT gateways and floating IPs that are bound to a host.
	portsOn map[cloud.NodeID]map[recordKey]struct{}
	// pending has the ports, NAT gateways and floating IPs that wait for an acknowledgment of a host.
	pending map[cloud.NodeID]map[recordKey]pendingBinding
	// networks has the network record of each host.
	networks map[cloud.NodeID]*cloud.HostNetwork
	// gateways has the NAT gateways that are on one host, and the floating IPs of service IPs.
	gateways map[recordKey]gateway
	// changedHosts has the hosts whose network record has changed since the last call of takeUnserved.
	changedHosts map[cloud.NodeID]bool
	// underlay has the distinct underlay addresses in networks, sorted. It is nil if it must be computed again.
	// underlayVersion grows with each change of the addresses.
	underlay        []netip.Addr
	underlayVersion uint64
	// epoch is the number of the keys with which hosts send, and epochRevision the revision of its record.
	epoch         uint64
	epochRevision int64
	// encrypting is the number of hosts that encrypt. peersVersion grows with each change after which a host may have
	// other peers or keys.
	encrypting   int
	peersVersion uint64
	// changedNeeds has the needs that began or ended during a call of set, including those that did both.
	changedNeeds map[need]struct{}
}

// entry describes a record in the index, without the record's content.
type entry struct {
	// vpc is "" for a security group, and for a floating IP without a target.
	vpc cloud.VPCID
	// peer is the other VPC of a peering, "" for other records.
	peer cloud.VPCID
	// node is the host of a port, of a NAT gateway that is on one host or of a floating IP. It is "" for other records,
	// and for records without a host.
	node cloud.NodeID
	// migration is the other host of a live migration of the port's VM, or "" if the VM is not being migrated.
	migration cloud.NodeID
	// external is the external network of the floating IP of a port, "" for other records.
	external string
	// awaited is the host whose acknowledgment the record may wait for: node, or the former host of a gateway.
	awaited cloud.NodeID
	// hash is the hash of the message for hosts.
	hash uint64
}

type vpcEntry struct {
	project cloud.ProjectID
	mtu     uint16
	// records has the records of the VPC. A peering belongs to both of its VPCs.
	records map[recordKey]struct{}
	// ports has the number of ports and NAT gateways on each host that has any.
	ports map[cloud.NodeID]int
	// peers has the number of ACTIVE peerings with each peered VPC.
	peers map[cloud.VPCID]int
	// hosts has, for each host that needs the VPC, the number of reasons: see index.need.
	hosts map[cloud.NodeID]int
}

type projectEntry struct {
	vpcs   map[cloud.VPCID]struct{}
	groups map[recordKey]struct{}
}

// pendingBinding is a record that becomes ACTIVE when its host has acknowledged revision.
type pendingBinding struct {
	binding
	revision int64
}

// binding is a port, a NAT gateway or a floating IP on a host.
type binding struct {
	vpc        cloud.VPCID
	node       cloud.NodeID
	generation uint64
	status     cloud.NetworkStatus
	reason     string
	// external is the external network that the host must have, or "". It is set for floating IPs of ports.
	external string
	// withdrawn is true if node is the former host of a gateway. The host must acknowledge that it no longer has the
	// gateway.
	withdrawn bool
}

// bindingOf returns the binding of a port, a NAT gateway or a floating IP. It does not set the VPC of the binding. It
// returns nil for other records, and for records without a host.
func bindingOf(record any) *binding {
	if p := placementOf(record); p != nil {
		return p.binding()
	}
	switch r := record.(type) {
	case *cloud.Port:
		if r.Node != "" {
			return &binding{node: r.Node, generation: r.BindingGeneration, status: r.Status, reason: r.StatusReason}
		}
	case *cloud.FloatingIP:
		if r.Node != "" {
			return &binding{
				node: r.Node, generation: r.BindingGeneration, status: r.Status, reason: r.StatusReason, external: r.External,
			}
		}
	}
	return nil
}

// hostChange is a change that must be sent to a host. An empty key means that the set of the VPCs that the host needs
// has changed. lost is a VPC that the host no longer needs, or "". If confirm is true, the host gets a message even if
// its records do not change, so that it acknowledges the revision.
type hostChange struct {
	node    cloud.NodeID
	key     recordKey
	lost    cloud.VPCID
	confirm bool
}

func newIndex() *index {
	return &index{
		entries: map[recordKey]entry{}, vpcs: map[cloud.VPCID]*vpcEntry{}, projects: map[cloud.ProjectID]*projectEntry{},
		needs: map[cloud.NodeID]map[cloud.VPCID]struct{}{}, portsOn: map[cloud.NodeID]map[recordKey]struct{}{},
		pending: map[cloud.NodeID]map[recordKey]pendingBinding{}, networks: map[cloud.NodeID]*cloud.HostNetwork{},
		gateways: map[recordKey]gateway{}, changedHosts: map[cloud.NodeID]bool{},
		underlayVersion: 1, epoch: firstEpoch, peersVersion: 1, changedNeeds: map[need]struct{}{},
	}
}

// set records the present state of a record, nil if it was deleted, and returns which hosts have to get the change.
// revision is that of the change.
func (x *index) set(key recordKey, record any, revision int64) (out []hostChange) {
	old, had := x.entries[key]
	var now entry
	b := bindingOf(record)
	if p, ok := record.(*cloud.Peering); ok {
		// Each peering has a record in both projects. Hosts get the record of the project that proposed the peering.
		if p.Status == cloud.NetworkActive && p.Project == key.project {
			now.peer = p.PeerVPC
		} else {
			record = nil
		}
	}
	if record != nil {
		k := feedKinds[key.kind]
		now.vpc, now.hash = k.vpc(x, record), hashOf(k.message(record))
		if b != nil {
			b.vpc, now.awaited, now.external = now.vpc, b.node, b.external
			if !b.withdrawn {
				now.node = b.node
			}
		}
	}
	if p, ok := record.(*cloud.Port); ok {
		now.migration = p.MigrationNode
	}
	same := had == (record != nil) && old == now
	if key.kind == feedPort || key.kind == feedNAT || key.kind == feedFloating {
		out = x.setPending(key, old.awaited, b, revision, same)
	}
	if key.kind == feedNAT || key.kind == feedFloating {
		x.setGateway(key, record, now.vpc)
	}
	if same {
		return out
	}
	peered := x.hostsOfBoth(old)
	if had {
		x.remove(key, old)
	}
	if record != nil {
		x.add(key, now)
	}
	if v, ok := record.(*cloud.VPC); ok {
		x.vpcs[v.ID].mtu = v.MTU
	}
	out = x.takeNeeds(out)
	if key.kind == feedPeering {
		for _, node := range append(peered, x.hostsOfBoth(now)...) {
			out = append(out, hostChange{node: node, key: key})
		}
		return out
	}
	if old.node != now.node && mutant.On(mutant.SendStaleBinding) {
		return out
	}
	if key.kind != feedFloating || !mutant.On(mutant.KeepMovedFloating) {
		out = x.toHosts(out, key, old.vpc)
	}
	if now.vpc != old.vpc {
		out = x.toHosts(out, key, now.vpc)
	}
	return out
}

// setPending records whether a port, a NAT gateway or a floating IP waits for an acknowledgment. former is the host
// whose acknowledgment the record may have waited for before the change. same is true if the message for hosts has not
// changed. The result has the host that must acknowledge the change, if any.
func (x *index) setPending(key recordKey, former cloud.NodeID, b *binding, revision int64, same bool) []hostChange {
	old, waited := x.pending[former][key]
	deleteIn(x.pending, former, key)
	if b == nil || b.status != cloud.NetworkPending && b.status != cloud.NetworkError {
		return nil
	}
	now := pendingBinding{binding: *b, revision: revision}
	confirm := true
	if waited && same {
		// Only the status has changed, so what the host has acknowledged is still valid.
		now.revision, confirm = old.revision, false
	}
	putIn(x.pending, b.node, key, now)
	if !confirm {
		return nil
	}
	return []hostChange{{node: b.node, confirm: true}}
}

func (x *index) add(key recordKey, e entry) {
	x.entries[key] = e
	if key.kind == feedGroup {
		x.project(key.project).groups[key] = struct{}{}
	}
	if e.vpc == "" {
		return
	}
	v := x.vpcs[e.vpc]
	if v == nil {
		v = &vpcEntry{
			project: key.project, records: map[recordKey]struct{}{}, ports: map[cloud.NodeID]int{}, peers: map[cloud.VPCID]int{},
			hosts: map[cloud.NodeID]int{},
		}
		x.vpcs[e.vpc] = v
		x.project(key.project).vpcs[e.vpc] = struct{}{}
	}
	v.records[key] = struct{}{}
	if e.node != "" {
		putIn(x.portsOn, e.node, key, struct{}{})
		x.countPort(v, e.vpc, e.node, 1)
	}
	if e.migration != "" {
		x.countPort(v, e.vpc, e.migration, 1)
	}
	if peer := x.vpcs[e.peer]; peer != nil {
		peer.records[key] = struct{}{}
		x.countPeering(e.vpc, e.peer, 1)
	}
}

func (x *index) remove(key recordKey, e entry) {
	delete(x.entries, key)
	project := x.project(key.project)
	delete(project.groups, key)
	if v := x.vpcs[e.vpc]; v != nil {
		if e.node != "" {
			deleteIn(x.portsOn, e.node, key)
			x.countPort(v, e.vpc, e.node, -1)
		}
		if e.migration != "" {
			x.countPort(v, e.vpc, e.migration, -1)
		}
		if x.vpcs[e.peer] != nil {
			x.countPeering(e.vpc, e.peer, -1)
			x.removeFrom(e.peer, key)
		}
		x.removeFrom(e.vpc, key)
	}
	x.removeProject(key.project)
}

// removeFrom removes a record from a VPC, and the VPC if that was its last record.
func (x *index) removeFrom(id cloud.VPCID, key recordKey) {
	v := x.vpcs[id]
	delete(v.records, key)
	if len(v.records) == 0 {
		delete(x.vpcs, id)
		delete(x.project(v.project).vpcs, id)
		x.removeProject(v.project)
	}
}

// removeProject removes a project that has neither VPCs nor groups.
func (x *index) removeProject(id cloud.ProjectID) {
	if p := x.project(id); len(p.vpcs) == 0 && len(p.groups) == 0 {
		delete(x.projects, id)
	}
}

func (x *index) project(id cloud.ProjectID) *projectEntry {
	p := x.projects[id]
	if p == nil {
		p = &projectEntry{vpcs: map[cloud.VPCID]struct{}{}, groups: map[recordKey]struct{}{}}
		x.projects[id] = p
	}
	return p
}

// toHosts adds the hosts that have to get a change of a record to out: those that need the VPC, or for a security group
// any VPC of the project.
func (x *index) toHosts(out []hostChange, key recordKey, vpc cloud.VPCID) []hostChange {
	if key.kind == feedGroup {
		p := x.projects[key.project]
		if p == nil {
			return out
		}
		for id := range p.vpcs {
			for node := range x.vpcs[id].hosts {
				out = append(out, hostChange{node: node, key: key})
			}
		}
		return out
	}
	if v := x.vpcs[vpc]; v != nil {
		for node := range v.hosts {
			out = append(out, hostChange{node: node, key: key})
		}
	}
	return out
}

// setHost stores the network record of a host, which is nil if it was deleted. If the host's underlay address has
// changed, the result has all ports and NAT gateways that are bound to the host, for each host that needs their VPCs.
func (x *index) setHost(node cloud.NodeID, h *cloud.HostNetwork) (out []hostChange) {
	var former, vtep netip.Addr
	had := x.networks[node]
	if had != nil {
		former = had.VTEP
	}
	x.countEncrypting(had, h)
	x.changedHosts[node] = true
	if h == nil {
		delete(x.networks, node)
	} else {
		x.networks[node], vtep = h, h.VTEP
	}
	if former == vtep {
		return nil
	}
	x.underlay = nil
	x.underlayVersion++
	for key := range x.portsOn[node] {
		out = x.toHosts(out, key, x.entries[key].vpc)
	}
	return out
}

// underlayAddresses returns the underlay addresses of all hosts.
func (x *index) underlayAddresses() []netip.Addr {
	if x.underlay == nil {
		known := map[netip.Addr]bool{}
		for _, h := range x.networks {
			if h.VTEP.IsValid() {
				known[h.VTEP] = true
			}
		}
		x.underlay = slices.AppendSeq(make([]netip.Addr, 0, len(known)), maps.Keys(known))
		slices.SortFunc(x.underlay, netip.Addr.Compare)
	}
	return x.underlay
}

// putIn sets the value of a key in one of the maps of m.
func putIn[A, K comparable, V any](m map[A]map[K]V, a A, key K, value V) {
	if m[a] == nil {
		m[a] = map[K]V{}
	}
	m[a][key] = value
}

// deleteIn deletes a key in one of the maps of m, and the map itself if it is empty then.
func deleteIn[A, K comparable, V any](m map[A]map[K]V, a A, key K) {
	delete(m[a], key)
	if len(m[a]) == 0 {
		delete(m, a)
	}
}
