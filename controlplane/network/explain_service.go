package network

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// service evaluates the path of a packet to the service IP e.serviceIP. The source's host translates the destination
// before it applies the security groups, so their rules must permit the address and port of a backend. If the path to
// one of the healthy backends drops the packet, service adds the steps of that path. Otherwise it adds the steps of the
// path to the first healthy backend.
func (e *explanation) service() error {
	if passes, err := e.route(); err != nil || !passes {
		return err
	}
	s, err := find(e.r, serviceIPs, kindService, e.t, string(e.serviceIP))
	if err != nil {
		return err
	}
	if err := resolveBackends(e.r, s); err != nil {
		return err
	}
	name := upperFirst(label(kindService, s.Name, string(s.ID)))
	if e.packet.Protocol == cloud.ProtocolICMP {
		e.add(false, "destination", string(s.ID), "", "%s distributes TCP and UDP only, and does not answer pings.", name)
		return nil
	}
	target := uint16(0)
	for _, p := range s.Ports {
		if p.Protocol == e.packet.Protocol && p.Port == e.packet.Port {
			target = p.Target
		}
	}
	if target == 0 {
		e.add(false, "destination", string(s.ID), "", "%s does not have this port, so the connection is refused.", name)
		return nil
	}
	var chosen *explanation
	count := 0
	for _, b := range s.Backends {
		if !b.Healthy {
			continue
		}
		path := *e
		path.steps, path.packet.Port = nil, target
		if err := path.backend(b); err != nil {
			return err
		}
		dropped := !path.steps[len(path.steps)-1].Passes
		if count++; chosen == nil || dropped && chosen.steps[len(chosen.steps)-1].Passes {
			chosen = &path
		}
	}
	if chosen == nil {
		e.add(false, "destination", string(s.ID), "", "%s has no healthy backend, so the connection is refused.", name)
		return nil
	}
	e.add(true, "destination", string(s.ID), "", "%s leads to one of %d healthy backends, for example %s.",
		name, count, chosen.address)
	e.steps = append(e.steps, chosen.steps...)
	return nil
}

// backend evaluates the path to a backend of a service IP.
func (e *explanation) backend(b cloud.Backend) (err error) {
	e.to, e.address, e.serviceIP = nil, b.Address, ""
	if b.Port != "" {
		if e.to, err = find(e.r, ports, kindPort, e.t, string(b.Port)); err != nil {
			return err
		}
		e.address = e.to.IP
	} else if e.to, err = e.portAt(e.from.VPC, e.t.Project); err != nil {
		return err
	}
	if passes, err := e.evaluate("egress", cloud.Egress, e.from, e.address, e.to); err != nil || !passes {
		return err
	}
	if passes, err := e.route(); err != nil || !passes || e.to == nil {
		return err
	}
	return e.deliver()
}
