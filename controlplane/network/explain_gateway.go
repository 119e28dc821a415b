package network

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// leaveByGateway adds the step for a packet that a NAT gateway translates. begin is the first part of the step's
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
		if floating != nil && e.address.Is4() {
			return e.leave(decides, rule, kindFloating, string(*floating), text+", the VPC's default, so the packet leaves with the address of %s.")
		}
	}
	if reason := obstacle(n, e.address.Is6()); reason != "" {
		return e.add(false, "route", decides, rule, "%s, %s.", text, reason), nil
	}
	return e.add(true, "route", decides, rule, "%s. %s.", text, translation(n)), nil
}

// obstacle returns the reason why a gateway translates no packets at present, or "" if it translates them.
func obstacle(n *cloud.NATGateway, ipv6 bool) string {
	switch {
	case ipv6:
		return "which translates IPv4 only"
	case n.Status == cloud.NetworkError:
		return fmt.Sprintf("which has failed on host %s: %s", n.Node, n.StatusReason)
	case n.Status != cloud.NetworkActive:
		return "which is not ready: it " + n.StatusReason
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
