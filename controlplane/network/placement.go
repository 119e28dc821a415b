package network

import (
	"cmp"
	"container/heap"
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// gateway has the fields of a NAT gateway on one host, or of the floating IP of a service IP, that the choice of the
// host depends on.
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
// cloud.Placement.
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
}

// choosePlace returns the place of a gateway. The function host returns the properties of a host; known is false for a
// host that was removed. The function best returns the host for a gateway that leaves its host or has none, or "" if no
// host can have the gateway.
//
//   - A gateway stays on its host while the host is usable. It also stays on a lost host if no other host can have it:
//     the host's kernel may still forward packets although its agent does not run.
//   - A gateway leaves a host that is not lost only after the host has acknowledged the withdrawal.
func choosePlace(
	g gateway, host func(cloud.NodeID) (h gatewayHost, known bool), best func() cloud.NodeID,
) place {
	lost := func(id cloud.NodeID) bool { h, known := host(id); return !known || h.lost }
	if g.former != "" && !lost(g.former) && !mutant.On(mutant.GatewayTwice) {
		return place{former: g.former, reason: withdrawReason(g.former)}
	}
	own, known := host(g.node)
	if g.node != "" && !lost(g.node) {
		if own.usable {
			return place{node: g.node, reason: g.reason}
		}
		if !mutant.On(mutant.GatewayTwice) {
			return place{former: g.node, reason: withdrawReason(g.node)}
		}
	}
	to := best()
	switch {
	case to != "":
		return place{node: to, reason: unconfirmedReason(to)}
	case g.node != "" && known && own.lost:
		return place{node: g.node, reason: g.reason}
	}
	return place{reason: fmt.Sprintf("no host with the external network %s is connected", g.external)}
}

// unconfirmedReason returns the status reason of a gateway or floating IP that was assigned to a host, until the host
// has confirmed that it has the address.
func unconfirmedReason(node cloud.NodeID) string {
	return fmt.Sprintf("host %s has not confirmed yet that it has the address", node)
}

// withdrawReason returns the status reason of a gateway or floating IP that gets no other host until its former host
// has confirmed that it no longer has the address.
func withdrawReason(former cloud.NodeID) string {
	return fmt.Sprintf("its former host %s has not confirmed yet that it has withdrawn the address", former)
}

// hostPool has the hosts that can get another gateway of one external network in VPCs with one MTU. The duration of a
// search does not depend on the number of hosts in the pool, because many gateways can lose their host at once.
type hostPool struct {
	members map[cloud.NodeID]bool
	byLoad  loadHeap
	// loads has the number of gateways on each host. Pools share it. It only grows while a pool is in use.
	loads map[cloud.NodeID]int
}

func newHostPool(loads map[cloud.NodeID]int) *hostPool {
	return &hostPool{members: map[cloud.NodeID]bool{}, loads: loads}
}

func (p *hostPool) add(id cloud.NodeID) {
	p.members[id] = true
	heap.Push(&p.byLoad, loadedHost{id, p.loads[id]})
}

// best returns the host for a gateway that leaves the host with the ID from. from is "" if the gateway has no host. It
// prefers the hosts in withVPC, which need the VPC anyway, and then the host with the fewest gateways. It returns "" if
// there is no host.
func (p *hostPool) best(withVPC map[cloud.NodeID]int, from cloud.NodeID) cloud.NodeID {
	var best *loadedHost
	for id := range withVPC {
		h := loadedHost{id, p.loads[id]}
		if p.members[id] && id != from && (best == nil || h.before(*best)) {
			best = &h
		}
	}
	if best != nil {
		return best.id
	}
	var skipped []loadedHost
	for len(p.byLoad) > 0 && best == nil {
		top := p.byLoad[0]
		switch load := p.loads[top.id]; {
		case load != top.load: // the host got a gateway since it was added
			p.byLoad[0].load = load
			heap.Fix(&p.byLoad, 0)
		case top.id == from:
			skipped = append(skipped, heap.Pop(&p.byLoad).(loadedHost))
		default:
			best = &top
		}
	}
	for _, h := range skipped {
		heap.Push(&p.byLoad, h)
	}
	if best == nil {
		return ""
	}
	return best.id
}

// loadedHost is a host with its number of gateways.
type loadedHost struct {
	id   cloud.NodeID
	load int
}

func (h loadedHost) before(o loadedHost) bool {
	return cmp.Or(h.load-o.load, cmp.Compare(h.id, o.id)) < 0
}

// loadHeap implements heap.Interface. The first host has the fewest gateways.
type loadHeap []loadedHost

func (h loadHeap) Len() int           { return len(h) }
func (h loadHeap) Less(i, j int) bool { return h[i].before(h[j]) }
func (h loadHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *loadHeap) Push(x any)        { *h = append(*h, x.(loadedHost)) }
func (h *loadHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
