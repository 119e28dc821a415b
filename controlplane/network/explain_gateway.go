package network

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// leaveByGateway adds the step for an IPv4 packet that a NAT gateway translates. begin is the first part of the step's
// sentence: the route that leads to the gateway.
func (e *explanation) leaveByGateway(decides, rule, id, begin string) (bool, error) {
	e.to = nil
	n, err := find(e.r, natGateways, kindNAT, e.t, id)
	if err != nil {
		return false, err
	}
	text := begin + " leads to " + label(kindNAT, n.Name, id)
	if n.Default {
		// For hosts, a route to the default gateway is the same as no route. So a floating IP of the port takes
		// precedence.
		floating, err := floatingAt.Get(e.r, string(e.from.ID))
		if err != nil {
			return false, err
		}
		if floating != nil {
			return e.leaveByFloating(decides, rule, *floating,
				text+", the VPC's default, so the packet leaves with the address of %s.")
		}
	}
	if reason := obstacle(n); reason != "" {
		return e.add(false, "route", decides, rule, "%s, %s.", text, reason), nil
	}
	e.add(true, "route", decides, rule, "%s. %s.", text, translation(n))
	return e.floatingDestination()
}

// obstacle returns the reason why a gateway translates no packets at present, or "" if it translates them.
func obstacle(n *cloud.NATGateway) string {
	switch {
	case n.Status == cloud.NetworkError:
		return fmt.Sprintf("which has failed on host %s: %s", n.Node, n.StatusReason)
	case n.Status != cloud.NetworkActive:
		return "which is not ready: " + n.StatusReason
	}
	return ""
}

// translation returns a sentence with the host that sends the packet and the source address that the packet gets.
func translation(n *cloud.NATGateway) string {
	switch {
	case !n.OnOneHost():
		return fmt.Sprintf("The port's host sends the packet with the host's own address in external network %s", n.External)
	case n.Address.IsValid():
		return fmt.Sprintf("Host %s sends the packet with the address %s", n.Node, n.Address)
	}
	return fmt.Sprintf("Host %s sends the packet with the host's own address in external network %s", n.Node, n.External)
}

// leaveByFloating adds the step for an IPv4 packet that leaves with the address of a floating IP. format has one %s,
// for the floating IP's label.
func (e *explanation) leaveByFloating(decides, rule string, id cloud.FloatingIPID, format string) (bool, error) {
	if passes, err := e.leave(decides, rule, kindFloating, string(id), format); err != nil || !passes {
		return passes, err
	}
	return e.floatingDestination()
}

// floatingDestination adds the step for a packet that has left its VPC for a floating IP of the project. It adds no
// step if no floating IP of the project has the destination address. The security groups of the floating IP's port are
// not evaluated: the packet has another source address by then.
func (e *explanation) floatingDestination() (bool, error) {
	all, _, err := floatingIPs.List(e.r, 0, string(e.t.Project))
	if err != nil {
		return false, err
	}
	for _, r := range all {
		f := r.Value
		if f.Address != e.address {
			continue
		}
		kind, target := kindPort, string(f.Port)
		if f.ServiceIP != "" {
			kind, target = kindService, string(f.ServiceIP)
		}
		name := upperFirst(label(kindFloating, f.Name, string(f.ID)))
		if target == "" {
			return e.add(false, "destination", string(f.ID), "", "%s leads to no port and no service IP.", name), nil
		}
		text, err := labelOf(e.r, e.t.Project, kind, target)
		if err != nil {
			return false, err
		}
		switch f.Status {
		case cloud.NetworkActive:
		case cloud.NetworkError:
			return e.add(false, "destination", string(f.ID), "", "%s leads to %s, but has failed: %s.",
				name, text, f.StatusReason), nil
		default:
			return e.add(false, "destination", string(f.ID), "", "%s leads to %s, but is not ready: %s.",
				name, text, f.StatusReason), nil
		}
		return e.add(true, "destination", string(f.ID), "", "%s leads to %s. Its security groups are not evaluated.",
			name, text), nil
	}
	return true, nil
}
