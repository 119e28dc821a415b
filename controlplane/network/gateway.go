package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// AssignEvery is the interval at which package leader runs AssignGateways on the leader.
const AssignEvery = time.Second

// HostState is the state of a host that the assignment of NAT gateways depends on.
type HostState struct {
	ID    cloud.NodeID
	State cloud.NodeState
	// Unresponsive is true if the leader has led for longer than cloud.HeartbeatTimeout, and has received no heartbeat
	// of the host in this time.
	Unresponsive bool
}

// gateway has the fields of a NAT gateway on one host that the choice of the host depends on.
type gateway struct {
	vpc        cloud.VPCID
	external   string
	node       cloud.NodeID
	former     cloud.NodeID
	generation uint64
	status     cloud.NetworkStatus
	reason     string
}

// place is the result of the choice: the gateway's host, if it has one, and the reason for its status. former is as in
// cloud.NATGateway.
type place struct {
	node, former cloud.NodeID
	reason       string
}

// gatewayHost has the properties of a host that the choice of a gateway's host depends on.
type gatewayHost struct {
	// usable is true if the host can have the gateway: it has the external network, and its underlay carries the VPC.
	usable bool
	// ready is true if the host may get another gateway.
	ready bool
	// lost is true if the host was removed or is unresponsive. A gateway leaves a lost host without the host's
	// acknowledgment.
	lost bool
	// hasVPC is true if the host needs the VPC for another reason too. load is the number of gateways that are on the
	// host.
	hasVPC bool
	load   int
}

// choosePlace returns the place of a gateway. hosts has every known host; a host that is not in it is lost.
//
//   - A gateway stays on its host while the host is usable. It also stays on a lost host if no other host can have it:
//     the host's kernel may still forward packets although its agent does not run.
//   - A gateway leaves a host that is not lost only after the host has acknowledged the withdrawal.
func choosePlace(g gateway, hosts map[cloud.NodeID]gatewayHost) place {
	lost := func(id cloud.NodeID) bool { h, known := hosts[id]; return !known || h.lost }
	if g.former != "" && !lost(g.former) && !mutant.On(mutant.GatewayTwice) {
		return place{former: g.former, reason: withdrawReason(g.former)}
	}
	best := bestHost(g, hosts)
	switch {
	case g.node != "" && lost(g.node) && best == "":
		if _, known := hosts[g.node]; known {
			return place{node: g.node, reason: g.reason}
		}
	case g.node != "" && lost(g.node):
	case g.node != "" && hosts[g.node].usable:
		return place{node: g.node, reason: g.reason}
	case g.node != "" && !mutant.On(mutant.GatewayTwice):
		return place{former: g.node, reason: withdrawReason(g.node)}
	}
	if best == "" {
		return place{reason: fmt.Sprintf("waits for a host: no host with the external network %s is connected", g.external)}
	}
	return place{node: best, reason: fmt.Sprintf("waits until host %s has the gateway", best)}
}

func withdrawReason(former cloud.NodeID) string {
	return fmt.Sprintf("waits until host %s, which it was on, has the gateway no longer", former)
}

// bestHost returns the host for a gateway that leaves its host or has none. It prefers a host that needs the VPC
// anyway, and then the host with the fewest gateways. It returns "" if no host can have the gateway.
func bestHost(g gateway, hosts map[cloud.NodeID]gatewayHost) (best cloud.NodeID) {
	for _, id := range slices.Sorted(maps.Keys(hosts)) {
		h := hosts[id]
		if !h.usable || !h.ready || h.lost || id == g.node {
			continue
		}
		if b := hosts[best]; best == "" || cmp.Or(compareBool(h.hasVPC, b.hasVPC), b.load-h.load) > 0 {
			best = id
		}
	}
	return best
}

// compareBool returns a positive number if only a is true, and a negative one if only b is.
func compareBool(a, b bool) int {
	switch {
	case a && !b:
		return 1
	case b && !a:
		return -1
	}
	return 0
}

// AssignGateways chooses a host for each NAT gateway that is on one host at a time, and withdraws gateways from hosts
// that can no longer have them. states has every host that the leader knows. A host that has a record in the network
// service and is not in states is neither ready nor lost. AssignGateways does nothing before Follow has read all
// records. It writes nothing if every gateway has the right place.
func (f *Feed) AssignGateways(ctx context.Context, states []HostState) error {
	type choice struct {
		key  recordKey
		from gateway
		to   place
	}
	var choices []choice
	f.mu.Lock()
	if f.index != nil {
		hosts := f.index.gatewayHosts(states)
		for _, key := range slices.SortedFunc(maps.Keys(f.index.gateways), compareKeys) {
			g := f.index.gateways[key]
			if h := f.index.hostFor(g, g.node, hosts); g.former == "" && h.usable && !h.lost {
				continue // the gateway stays
			}
			to := choosePlace(g, f.index.hostsFor(g, hosts))
			if to.node != g.node || to.former != g.former || to.node == "" && (to.reason != g.reason || g.status != cloud.NetworkPending) {
				choices = append(choices, choice{key, g, to})
				if h, known := hosts[to.node]; known {
					h.load++
					hosts[to.node] = h
				}
			}
		}
	}
	f.mu.Unlock()
	var failed error
	for _, c := range choices {
		attempt, cancel := context.WithTimeout(ctx, recordTimeout)
		_, err := f.opts.Store.Update(attempt, func(tx *store.Tx) error { return moveGateway(tx, c.key, c.from, c.to) })
		cancel()
		failed = errors.Join(failed, err)
	}
	return failed
}

// gatewayHosts returns all hosts, with the properties that are the same for all gateways.
func (x *index) gatewayHosts(states []HostState) map[cloud.NodeID]gatewayHost {
	hosts := map[cloud.NodeID]gatewayHost{}
	for id := range x.networks {
		hosts[id] = gatewayHost{}
	}
	for _, s := range states {
		if _, known := hosts[s.ID]; known {
			hosts[s.ID] = gatewayHost{ready: s.State == cloud.NodeReady, lost: s.Unresponsive}
		}
	}
	for _, g := range x.gateways {
		if h, known := hosts[g.node]; known {
			h.load++
			hosts[g.node] = h
		}
	}
	return hosts
}

// hostsFor returns all hosts, with their properties for one gateway.
func (x *index) hostsFor(g gateway, hosts map[cloud.NodeID]gatewayHost) map[cloud.NodeID]gatewayHost {
	out := map[cloud.NodeID]gatewayHost{}
	for id := range x.networks {
		out[id] = x.hostFor(g, id, hosts)
	}
	return out
}

// hostFor returns a host with its properties for one gateway. A host without a network record is not usable.
func (x *index) hostFor(g gateway, id cloud.NodeID, hosts map[cloud.NodeID]gatewayHost) gatewayHost {
	h := hosts[id]
	if v := x.vpcs[g.vpc]; v != nil {
		n := x.networks[id]
		h.usable = n != nil && slices.Contains(n.External, g.external) && n.Shortage(v.mtu) == ""
		h.hasVPC = v.hosts[id] > 0
	}
	return h
}

// setGateway records a NAT gateway that is on one host. record is nil if it was deleted.
func (x *index) setGateway(key recordKey, record any) {
	n, _ := record.(*cloud.NATGateway)
	if n == nil || !n.OnOneHost() {
		delete(x.gateways, key)
		return
	}
	x.gateways[key] = gatewayOf(n)
}

func gatewayOf(n *cloud.NATGateway) gateway {
	return gateway{n.VPC, n.External, n.Node, n.Former, n.BindingGeneration, n.Status, n.StatusReason}
}

// bindingOfGateway returns the binding of a gateway to its host. While the former host must acknowledge the withdrawal,
// bindingOfGateway returns the binding to this host. It returns nil if the gateway has neither.
func bindingOfGateway(n *cloud.NATGateway) *binding {
	b := &binding{vpc: n.VPC, node: n.Node, generation: n.BindingGeneration, status: n.Status, reason: n.StatusReason}
	if n.Former != "" {
		b.node, b.withdrawn, b.status = n.Former, true, cloud.NetworkPending
	}
	if !n.OnOneHost() || b.node == "" {
		return nil
	}
	return b
}

// beginGateway sets the status of a NAT gateway that was created or whose OnOneHost has changed. The gateway has no
// host yet.
func beginGateway(n *cloud.NATGateway) {
	n.Node, n.Former, n.Status, n.StatusReason = "", "", cloud.NetworkActive, ""
	if n.OnOneHost() {
		n.Status, n.StatusReason = cloud.NetworkPending, "waits for a host"
	}
}

// moveGateway sets the place of a gateway in a transaction. It does nothing if the gateway has changed since from was
// read.
func moveGateway(tx *store.Tx, key recordKey, from gateway, to place) error {
	n, err := natGateways.Get(tx, string(key.project), key.id)
	if err != nil || n == nil || !n.OnOneHost() || gatewayOf(n) != from {
		return err
	}
	if to.node != n.Node {
		n.BindingGeneration++
	}
	n.Node, n.Former, n.Status, n.StatusReason, n.UpdatedAt = to.node, to.former, cloud.NetworkPending, to.reason, tx.Now()
	if n.Node != "" && n.VNI == 0 {
		if n.VNI, err = assignVNI(tx, key.id); err != nil {
			return err
		}
	}
	natGateways.Put(tx, n, string(key.project), key.id)
	return nil
}

// setGatewayStatus applies an acknowledgment to a gateway, and reports whether it has changed the record.
func setGatewayStatus(tx *store.Tx, node cloud.NodeID, a bindingStatus) (bool, error) {
	n, err := natGateways.Get(tx, string(a.key.project), a.key.id)
	if err != nil || n == nil || n.BindingGeneration != a.generation {
		return false, err
	}
	switch {
	case a.withdrawn && n.Former == node:
		n.Former, n.StatusReason = "", "waits for a host"
	case !a.withdrawn && n.Node == node && n.Former == "" && (n.Status != a.status || n.StatusReason != a.reason) &&
		(n.Status == cloud.NetworkPending || n.Status == cloud.NetworkError):
		n.Status, n.StatusReason = a.status, a.reason
	default:
		return false, nil
	}
	n.UpdatedAt = tx.Now()
	natGateways.Put(tx, n, string(n.Project), string(n.ID))
	return true, nil
}
