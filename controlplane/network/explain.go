package network

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Packet is the packet whose path ExplainPath evaluates. Exactly one of FromPort and FromVM is set, and exactly one of
// ToPort, ToVM and To.
type Packet struct {
	FromPort cloud.PortID
	FromVM   cloud.VMID
	ToPort   cloud.PortID
	ToVM     cloud.VMID
	To       netip.Addr
	// Protocol is the number of an IP protocol, and Port the destination port of TCP, UDP and SCTP. A packet to ToPort
	// or ToVM is sent to the IPv4 address of the port, except that ICMPv6 is sent to its IPv6 address. An ICMP or
	// ICMPv6 packet is an echo request (ping).
	Protocol uint8
	Port     uint16
}

// Step is one decision on the path of a packet.
type Step struct {
	// Stage is source, egress, route, ingress or destination.
	Stage string
	// Resource is the ID of the resource that decides, and Rule that of its rule or the destination of its route.
	Resource, Rule string
	// Text describes the decision in a sentence.
	Text   string
	Passes bool
}

// ExplainPath returns the decisions on the path of a packet, up to the first that drops it. It evaluates the records
// and sends no packet.
func (s *Service) ExplainPath(ctx context.Context, t cloud.Tenant, p Packet) (steps []Step, err error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		e := &explanation{r: v, t: t, packet: p}
		err := e.run()
		steps = e.steps
		return err
	})
	return steps, err
}

func (p *Packet) check() error {
	if (p.FromPort == "") == (p.FromVM == "") {
		return fault.Invalid("from_port_id", "either this or from_vm_id is required").With("constraint", "required")
	}
	targets := 0
	for _, set := range []bool{p.ToPort != "", p.ToVM != "", p.To.IsValid()} {
		if set {
			targets++
		}
	}
	if targets != 1 {
		return fault.Invalid("to_address", "exactly one of this, to_port_id and to_vm_id is required").With("constraint", "required")
	}
	if p.To.IsValid() && (p.Protocol == cloud.ProtocolICMP && p.To.Is6() || p.Protocol == cloud.ProtocolICMPv6 && p.To.Is4()) {
		return fault.Invalid("protocol", "icmp is for IPv4 and icmpv6 is for IPv6, and to_address is %s", p.To).With("constraint", "protocol")
	}
	for field, id := range map[string]string{
		"from_port_id": string(p.FromPort), "from_vm_id": string(p.FromVM), "to_port_id": string(p.ToPort),
		"to_vm_id": string(p.ToVM),
	} {
		if id != "" {
			if err := cloud.CheckUUID(field, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// explanation is the evaluation of a packet's path.
type explanation struct {
	r      store.Reader
	t      cloud.Tenant
	packet Packet
	steps  []Step
	from   *cloud.Port
	// to is the port with the destination address. It is nil if no port of the VPC has the address, or of a peered VPC of
	// the project.
	to      *cloud.Port
	address netip.Addr // the destination
	// serviceIP is the service IP of the source's VPC that has the destination address, or "".
	serviceIP cloud.ServiceIPID
}

func (e *explanation) add(passes bool, stage, resource, rule, format string, args ...any) bool {
	e.steps = append(e.steps, Step{stage, resource, rule, fmt.Sprintf(format, args...), passes})
	return passes
}

// run evaluates the path. A packet that is dropped is no error.
func (e *explanation) run() (err error) {
	if e.from, err = e.portOf(e.packet.FromPort, e.packet.FromVM); err != nil {
		return err
	}
	if err := e.findDestination(); err != nil {
		return err
	}
	if !e.address.IsValid() {
		e.add(false, "destination", string(e.to.ID), "", "%s has no IPv6 address.", upperFirst(portLabel(e.to)))
		return nil
	}
	if e.address.Is6() && !e.from.IP6.IsValid() {
		e.add(false, "source", string(e.from.ID), "", "%s has no IPv6 address.", upperFirst(portLabel(e.from)))
		return nil
	}
	e.add(true, "source", string(e.from.ID), "", "%s sends from its own address %s.", upperFirst(portLabel(e.from)), e.sourceAddress())
	if e.serviceIP != "" {
		return e.service()
	}
	if passes, err := e.evaluate("egress", cloud.Egress, e.from, e.address, e.to); err != nil || !passes {
		return err
	}
	passes, err := e.route()
	if err != nil || !passes || e.to == nil {
		return err
	}
	return e.deliver()
}

// deliver evaluates the arrival of the packet at the port e.to.
func (e *explanation) deliver() error {
	if passes, err := e.evaluate("ingress", cloud.Ingress, e.to, e.sourceAddress(), e.from); err != nil || !passes {
		return err
	}
	if e.to.Device.ID == "" {
		e.add(false, "destination", string(e.to.ID), "", "Nothing is attached to %s.", portLabel(e.to))
		return nil
	}
	device, err := labelDevice(e.r, e.to)
	if err != nil {
		return err
	}
	e.add(true, "destination", string(e.to.ID), "", "The packet arrives at %s.", device)
	return nil
}

func portLabel(p *cloud.Port) string { return label(kindPort, p.Name, string(p.ID)) }

func vpcLabel(v *cloud.VPC) string { return label(kindVPC, v.Name, string(v.ID)) }

// upperFirst returns an ASCII text with an upper-case first letter, for the beginning of a sentence.
func upperFirst(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

func (e *explanation) sourceAddress() netip.Addr {
	if e.address.Is6() {
		return e.from.IP6
	}
	return e.from.IP
}

// portOf returns a port of the project, or the first port of a VM.
func (e *explanation) portOf(port cloud.PortID, vm cloud.VMID) (*cloud.Port, error) {
	if port != "" {
		return find(e.r, ports, kindPort, e.t, string(port))
	}
	all, _, err := devicePorts.List(e.r, 1, string(vm))
	if err != nil {
		return nil, err
	}
	if len(all) > 0 {
		// The VM may belong to another tenant. The error must not reveal that it exists.
		p, err := ports.Get(e.r, string(e.t.Project), all[0].Path[1])
		if p != nil || err != nil {
			return p, err
		}
	}
	return nil, fault.New(fault.NotFound, "VM %s has no port", vm)
}

// findDestination sets e.address, the destination's address, e.to if a port of the VPC has this address, and
// e.serviceIP if a service IP of the VPC has it. e.address is invalid if the packet is for the IPv6 address of a port
// that has none.
func (e *explanation) findDestination() (err error) {
	if e.packet.To.IsValid() {
		e.address = e.packet.To
		e.to, err = e.portAt(e.from.VPC, e.t.Project)
	} else if e.to, err = e.portOf(e.packet.ToPort, e.packet.ToVM); err == nil {
		e.address = e.to.IP
		if e.packet.Protocol == cloud.ProtocolICMPv6 {
			e.address = e.to.IP6
		}
	}
	if err != nil {
		return err
	}
	if e.to != nil {
		if e.to.VPC == e.from.VPC && e.to.Device.Kind == cloud.DeviceServiceIP {
			e.serviceIP = cloud.ServiceIPID(e.to.Device.ID)
		}
		return nil
	}
	id, err := serviceAt.Get(e.r, string(e.from.VPC), e.address.String())
	if id != nil {
		e.serviceIP = *id
	}
	return err
}

// portAt returns the port of a VPC that has the destination address, or nil.
func (e *explanation) portAt(vpc cloud.VPCID, project cloud.ProjectID) (*cloud.Port, error) {
	id, err := portAt.Get(e.r, string(vpc), e.address.String())
	if err != nil || id == nil {
		return nil, err
	}
	return ports.Get(e.r, string(project), string(*id))
}

// evaluate evaluates the security groups of a port for a packet from or to the address remote. remotePort is the port
// with that address, or nil.
func (e *explanation) evaluate(
	stage string, d cloud.Direction, port *cloud.Port, remote netip.Addr, remotePort *cloud.Port,
) (bool, error) {
	if !port.Secured {
		return e.add(true, stage, string(port.ID), "", "%s has no port security, so its security groups do not apply.",
			upperFirst(portLabel(port))), nil
	}
	for _, id := range port.Groups {
		g, err := groups.Get(e.r, string(port.Project), string(id))
		if err != nil {
			return false, err
		}
		if g == nil {
			continue
		}
		for i := range g.Rules {
			if r := &g.Rules[i]; r.Direction == d && e.matches(r, remote, remotePort) {
				return e.add(true, stage, string(g.ID), string(r.ID), "%s permits %s: rule %s.",
					upperFirst(label(kindGroup, g.Name, string(g.ID))), stage, r.ID), nil
			}
		}
	}
	if len(port.Groups) == 0 {
		return e.add(false, stage, string(port.ID), "", "%s has no security group, so it may neither send nor receive.",
			upperFirst(portLabel(port))), nil
	}
	return e.add(false, stage, string(port.ID), "", "No rule of the %d security groups of %s permits %s %s %s.",
		len(port.Groups), portLabel(port), stage, map[cloud.Direction]string{cloud.Ingress: "from", cloud.Egress: "to"}[d], remote), nil
}

// matches reports whether a rule permits the packet.
func (e *explanation) matches(r *cloud.Rule, remote netip.Addr, remotePort *cloud.Port) bool {
	switch {
	case r.IPv6 != remote.Is6(), !r.AnyProtocol && r.Protocol != e.packet.Protocol:
		return false
	case r.Ports != cloud.PortRange{} && (e.packet.Port < r.Ports.First || e.packet.Port > r.Ports.Last):
		return false
	case r.ICMP != nil && (r.ICMP.Type != e.echoRequest() || !r.ICMP.AnyCode && r.ICMP.Code != 0):
		return false
	case r.CIDR.IsValid() && !r.CIDR.Contains(remote):
		return false
	case r.Group != "":
		return remotePort != nil && hasGroup(remotePort, r.Group)
	}
	return true
}

// echoRequest returns the ICMP type of an echo request in the packet's protocol, ICMP or ICMPv6. The ICMP code of an
// echo request is 0.
func (e *explanation) echoRequest() uint8 {
	if e.packet.Protocol == cloud.ProtocolICMPv6 {
		return 128 // RFC 4443, section 4.1
	}
	return 8 // RFC 792
}

// route evaluates how the packet leaves the source's subnet. It sets e.to if the packet goes to a peered VPC.
func (e *explanation) route() (bool, error) {
	vpc, err := find(e.r, vpcs, kindVPC, e.t, string(e.from.VPC))
	if err != nil {
		return false, err
	}
	if vpc.Contains(e.address) {
		if (e.to == nil || e.to.VPC != vpc.ID) && e.serviceIP == "" {
			e.to = nil
			return e.add(false, "route", string(vpc.ID), "", "%s is within %s, but no port has this address.", e.address, vpcLabel(vpc)), nil
		}
		prefix := vpc.CIDR
		if e.address.Is6() {
			prefix = vpc.CIDR6
		}
		return e.add(true, "route", string(vpc.ID), prefix.String(), "The local route of %s applies.", vpcLabel(vpc)), nil
	}
	best, table, err := e.longestRoute(e.from.Subnet, e.address)
	if err != nil {
		return false, err
	}
	if best == nil {
		return e.defaultRoute(vpc)
	}
	destination := best.Destination.String()
	switch best.Target {
	case cloud.RouteBlackhole:
		return e.add(false, "route", string(table), destination, "The route for %s drops the packet.", destination), nil
	case cloud.RoutePeering:
		return e.peer(vpc.ID, table, best)
	case cloud.RoutePort:
		return e.leave(string(table), destination, kindPort, best.ID, "The route for "+destination+" leads to %s, which forwards the packet.")
	}
	if e.address.Is6() {
		return e.dropOutside6(vpc), nil
	}
	return e.leaveByGateway(string(table), destination, best.ID, "The route for "+destination)
}

// leave adds the step for a packet that leaves the VPC by a resource. format has the place of the resource's label.
func (e *explanation) leave(decides, rule, kind, id, format string) (bool, error) {
	e.to = nil
	text, err := labelOf(e.r, e.t.Project, kind, id)
	if err != nil {
		return false, err
	}
	return e.add(true, "route", decides, rule, format, text), nil
}

// longestRoute returns the route of a subnet's route table that applies to an address: the one with the longest prefix
// that contains the address. It also returns the ID of the table. The route is nil if none contains the address.
func (e *explanation) longestRoute(
	subnet cloud.SubnetID, to netip.Addr,
) (best *cloud.Route, id cloud.RouteTableID, err error) {
	table, err := tableOf.Get(e.r, string(subnet))
	if err != nil || table == nil {
		return nil, "", err
	}
	t, err := find(e.r, routeTables, kindTable, e.t, string(*table))
	if err != nil {
		return nil, "", err
	}
	for i := range t.Routes {
		r := &t.Routes[i]
		if r.Destination.Contains(to) && (best == nil || r.Destination.Bits() > best.Destination.Bits()) {
			best = r
		}
	}
	return best, t.ID, nil
}

// defaultRoute evaluates the path of a packet for which no route table has a route.
func (e *explanation) defaultRoute(vpc *cloud.VPC) (bool, error) {
	e.to = nil
	if e.address.Is6() {
		return e.dropOutside6(vpc), nil
	}
	floating, err := floatingAt.Get(e.r, string(e.from.ID))
	if err != nil {
		return false, err
	}
	if floating != nil {
		return e.leaveByFloating(string(*floating), "", *floating, "The packet leaves with the address of %s.")
	}
	gateways, _, err := natIn.List(e.r, 0, string(vpc.ID))
	if err != nil {
		return false, err
	}
	for _, g := range gateways {
		if *g.Value {
			return e.leaveByGateway(g.Path[1], "", g.Path[1], "The VPC's default route")
		}
	}
	return e.add(false, "route", string(vpc.ID), "", "No route leads to %s: %s has neither a default NAT gateway nor a route for it.",
		e.address, vpcLabel(vpc)), nil
}

// dropOutside6 adds the step for an IPv6 packet to an address outside of the VPC, which is dropped.
func (e *explanation) dropOutside6(vpc *cloud.VPC) bool {
	return e.add(false, "route", string(vpc.ID), "", "No route leads to %s: NAT gateways and floating IPs are for IPv4 only.", e.address)
}
