package network

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// AssignEvery is the interval at which package leader runs AssignGateways on the leader.
const AssignEvery = time.Second

// HostState is the state of a host that the assignment of gateways depends on.
type HostState struct {
	ID    cloud.NodeID
	State cloud.NodeState
	// Unresponsive is true if the leader has led for longer than cloud.HeartbeatTimeout, and has received no heartbeat
	// of the host in this time.
	Unresponsive bool
}

// AssignGateways chooses a host for each NAT gateway that is on one host at a time, and for each floating IP of a
// service IP. It withdraws them from hosts that can no longer have them. It also sets floating IPs of ports to PENDING
// if the port's host has lost the external network.
//
// states has every host that the leader knows. A host that has a record in the network service and is not in states is
// neither ready nor lost. AssignGateways does nothing before Follow has read all records. It writes nothing if every
// gateway has the right place.
func (f *Feed) AssignGateways(ctx context.Context, states []HostState) error {
	f.mu.Lock()
	var choices []choice
	var unserved []recordKey
	if f.index != nil {
		choices, unserved = f.index.choose(states), f.index.takeUnserved()
	}
	f.mu.Unlock()
	var failed error
	for _, c := range choices {
		failed = errors.Join(failed, f.update(ctx, func(tx *store.Tx) error { return moveGateway(tx, c) }))
	}
	for _, key := range unserved {
		if err := f.update(ctx, func(tx *store.Tx) error { return deferFloating(tx, key) }); err != nil {
			failed = errors.Join(failed, err)
			f.recheckHost(key)
		}
	}
	return failed
}

// recheckHost makes the next call of takeUnserved return a floating IP again.
func (f *Feed) recheckHost(key recordKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.index != nil {
		f.index.changedHosts[f.index.entries[key].node] = true
	}
}

// update runs a transaction with a time limit.
func (f *Feed) update(ctx context.Context, run func(*store.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	_, err := f.opts.Store.Update(ctx, run)
	return err
}

// choice is the new place of a gateway. from is the state of the gateway on which the choice is based.
type choice struct {
	key  recordKey
	from gateway
	to   place
}

// poolKey identifies a hostPool.
type poolKey struct {
	external string
	mtu      uint16
}

// choose returns the gateways whose place changes. Its duration grows with the number of hosts plus the number of
// gateways, not with their product.
func (x *index) choose(states []HostState) (choices []choice) {
	hosts, loads := map[cloud.NodeID]gatewayHost{}, map[cloud.NodeID]int{}
	for _, s := range states {
		hosts[s.ID] = gatewayHost{ready: s.State == cloud.NodeReady, lost: s.Unresponsive}
	}
	var moving []recordKey
	for key, g := range x.gateways {
		loads[g.node]++
		if h, known := x.hostFor(g, g.node, hosts); !known || h.lost || !h.usable || g.former != "" {
			moving = append(moving, key)
		}
	}
	slices.SortFunc(moving, compareKeys)
	pools := map[poolKey]*hostPool{}
	for _, key := range moving {
		g := x.gateways[key]
		host := func(id cloud.NodeID) (gatewayHost, bool) { return x.hostFor(g, id, hosts) }
		best := func() cloud.NodeID {
			v := x.vpcs[g.vpc]
			if v == nil {
				return ""
			}
			pool := poolKey{g.external, v.mtu}
			if pools[pool] == nil {
				pools[pool] = x.poolFor(g, hosts, loads)
			}
			return pools[pool].best(v.hosts, g.node)
		}
		to := choosePlace(g, host, best)
		if to.node != g.node || to.former != g.former ||
			to.node == "" && (to.reason != g.reason || g.status != cloud.NetworkPending) {
			choices = append(choices, choice{key, g, to})
			loads[to.node]++
		}
	}
	return choices
}

// poolFor returns the hosts that can get another gateway of the external network of g, in VPCs with the MTU of the VPC
// of g.
func (x *index) poolFor(g gateway, hosts map[cloud.NodeID]gatewayHost, loads map[cloud.NodeID]int) *hostPool {
	pool := newHostPool(loads)
	for id := range x.networks {
		if h, _ := x.hostFor(g, id, hosts); h.usable && h.ready && !h.lost {
			pool.add(id)
		}
	}
	return pool
}

// hostFor returns the properties of a host for one gateway. known is false for a host without a network record, which
// was removed.
func (x *index) hostFor(g gateway, id cloud.NodeID, hosts map[cloud.NodeID]gatewayHost) (h gatewayHost, known bool) {
	n := x.networks[id]
	if n == nil {
		return h, false
	}
	h = hosts[id]
	if v := x.vpcs[g.vpc]; v != nil {
		h.usable = slices.Contains(n.External, g.external) && n.Shortage(v.mtu) == ""
	}
	return h, true
}

// setGateway records a NAT gateway that is on one host, or a floating IP of a service IP in the VPC with an ID. record
// is nil if the record was deleted.
func (x *index) setGateway(key recordKey, record any, vpc cloud.VPCID) {
	if p := placementOf(record); p != nil {
		x.gateways[key] = p.gateway(vpc)
	} else {
		delete(x.gateways, key)
	}
}

// placed refers to the fields of a record that store its place. The record is a NAT gateway on one host, or a floating
// IP of a service IP.
type placed struct {
	*cloud.Placement
	external string
	status   *cloud.NetworkStatus
	reason   *string
	updated  *cloud.Time
}

// placementOf returns the place of a record whose host AssignGateways chooses. It returns nil for other records.
func placementOf(record any) *placed {
	switch r := record.(type) {
	case *cloud.NATGateway:
		if r.OnOneHost() {
			return &placed{&r.Placement, r.External, &r.Status, &r.StatusReason, &r.UpdatedAt}
		}
	case *cloud.FloatingIP:
		if r.ServiceIP != "" {
			return &placed{&r.Placement, r.External, &r.Status, &r.StatusReason, &r.UpdatedAt}
		}
	}
	return nil
}

func (p *placed) gateway(vpc cloud.VPCID) gateway {
	return gateway{vpc, p.external, p.Node, p.Former, p.BindingGeneration, *p.status, *p.reason}
}

// binding returns the binding of the record to its host. While the former host must still acknowledge the withdrawal,
// it returns the binding to the former host. It returns nil if the record has neither a host nor a former host.
func (p *placed) binding() *binding {
	b := &binding{node: p.Node, generation: p.BindingGeneration, status: *p.status, reason: *p.reason}
	if p.Former != "" {
		b.node, b.withdrawn, b.status = p.Former, true, cloud.NetworkPending
	}
	if b.node == "" {
		return nil
	}
	return b
}

// begin sets the status of a record that has no host yet.
func (p *placed) begin() {
	p.Node, p.Former, *p.status, *p.reason = "", "", cloud.NetworkPending, "no host is assigned yet"
}

// beginGateway sets the status of a NAT gateway that was created or whose OnOneHost has changed.
func beginGateway(n *cloud.NATGateway) {
	n.Node, n.Former, n.Status, n.StatusReason = "", "", cloud.NetworkActive, ""
	if p := placementOf(n); p != nil {
		p.begin()
	}
}

// readPlaced reads a record that has a place. put writes the record. Both results are nil if there is no such record.
func readPlaced(tx *store.Tx, key recordKey) (record any, put func(), err error) {
	path := []string{string(key.project), key.id}
	if key.kind == feedNAT {
		n, err := natGateways.Get(tx, path...)
		if err != nil || n == nil {
			return nil, nil, err
		}
		return n, func() { natGateways.Put(tx, n, path...) }, nil
	}
	f, err := floatingIPs.Get(tx, path...)
	if err != nil || f == nil {
		return nil, nil, err
	}
	return f, func() { floatingIPs.Put(tx, f, path...) }, nil
}

// moveGateway sets the place of a gateway in a transaction. It does nothing if the gateway has changed since c.from was
// read.
func moveGateway(tx *store.Tx, c choice) error {
	record, put, err := readPlaced(tx, c.key)
	if err != nil {
		return err
	}
	p := placementOf(record)
	if p == nil || p.gateway(c.from.vpc) != c.from {
		return nil
	}
	if f, ok := record.(*cloud.FloatingIP); ok {
		f.VPC = c.from.vpc // records of earlier versions have none
	}
	if c.to.node != p.Node {
		p.BindingGeneration++
	}
	p.Node, p.Former, *p.updated = c.to.node, c.to.former, tx.Now()
	*p.status, *p.reason = cloud.NetworkPending, c.to.reason
	if p.Node != "" && p.VNI == 0 {
		if p.VNI, err = assignVNI(tx, c.key.id); err != nil {
			return err
		}
	}
	put()
	return nil
}

// setPlacedStatus applies an acknowledgment to a NAT gateway or a floating IP, and reports whether it has changed the
// record.
func setPlacedStatus(tx *store.Tx, node cloud.NodeID, a bindingStatus) (bool, error) {
	record, put, err := readPlaced(tx, a.key)
	if err != nil || record == nil {
		return false, err
	}
	p := placementOf(record)
	if f, ok := record.(*cloud.FloatingIP); ok && p == nil {
		p = &placed{&f.Placement, f.External, &f.Status, &f.StatusReason, &f.UpdatedAt}
	}
	if p == nil || p.BindingGeneration != a.generation {
		return false, nil
	}
	switch {
	case a.withdrawn && p.Former == node:
		p.Former, *p.reason = "", "no host is assigned yet"
	case !a.withdrawn && p.Node == node && p.Former == "" && (*p.status != a.status || *p.reason != a.reason) &&
		(*p.status == cloud.NetworkPending || *p.status == cloud.NetworkError):
		*p.status, *p.reason = a.status, a.reason
	default:
		return false, nil
	}
	*p.updated = tx.Now()
	put()
	return true, nil
}

// lacksExternal is the reason why a floating IP of a port on a host is PENDING.
func lacksExternal(node cloud.NodeID, external string) string {
	return fmt.Sprintf("host %s, which the port is on, is not connected to the external network %s", node, external)
}

// takeUnserved returns the floating IPs of ports whose host no longer has the external network, if the network record
// of the host has changed since the last call.
func (x *index) takeUnserved() (keys []recordKey) {
	for node := range x.changedHosts {
		for key := range x.portsOn[node] {
			e := x.entries[key]
			if n := x.networks[node]; e.external != "" && (n == nil || !slices.Contains(n.External, e.external)) {
				keys = append(keys, key)
			}
		}
	}
	clear(x.changedHosts)
	return slices.SortedFunc(slices.Values(keys), compareKeys)
}

// deferFloating sets an ACTIVE floating IP of a port to PENDING if the port's host does not have the external network.
func deferFloating(tx *store.Tx, key recordKey) error {
	f, err := floatingIPs.Get(tx, string(key.project), key.id)
	if err != nil || f == nil || f.Port == "" || f.Status != cloud.NetworkActive {
		return err
	}
	lacks, err := lacksNetwork(tx, f.Node, f.External)
	if err != nil || !lacks {
		return err
	}
	f.Status, f.StatusReason, f.UpdatedAt = cloud.NetworkPending, lacksExternal(f.Node, f.External), tx.Now()
	floatingIPs.Put(tx, f, string(key.project), key.id)
	return nil
}

// lacksNetwork reports whether a host is not connected to an external network.
func lacksNetwork(r store.Reader, node cloud.NodeID, external string) (bool, error) {
	n, err := HostNetworkOf(r, node)
	return err == nil && (n == nil || !slices.Contains(n.External, external)), err
}
