package netdev

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// plan returns the changes that turn the state have into want, and the names of the devices of ports that do not exist.
// While it plans, it updates the parameter have to the state that the kernel will have after the changes so far.
//
// The order avoids gaps: what a device needs is set before the device is set up, an entry that moves is replaced in one
// step, and what is no longer wanted is removed last. Only devices that are in the way of others are deleted first.
func plan(want, have *state) (changes []Change, missing []string) {
	p := &planner{want: want, have: have}
	p.deleteConflicts()
	p.settings(want.settings)
	for _, name := range want.linksInOrder() {
		p.link(name)
	}
	p.addAddresses()
	p.addEntries()
	p.addRoutes()
	p.deleteRoutes()
	p.deleteEntries()
	p.deleteObsolete()
	return p.changes, p.missing
}

// planActivation returns the changes that set the devices of ports up, and the names of devices that do not exist.
func planActivation(want, have *state) (changes []Change, missing []string) {
	for _, name := range want.linksInOrder() {
		w, h := want.links[name], have.links[name]
		switch {
		case w.kind != portLink:
		case h.alias != w.alias || h.master != w.master:
			missing = append(missing, name)
		case !h.up:
			changes = append(changes, setUp{name})
		}
	}
	return changes, missing
}

type planner struct {
	want, have *state
	changes    []Change
	missing    []string
}

func (p *planner) add(c ...Change) { p.changes = append(p.changes, c...) }

// linksInOrder returns the names of the devices in the order in which they are created.
func (s *state) linksInOrder() []string {
	return slices.SortedFunc(maps.Keys(s.links), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.links[a].kind, s.links[b].kind), cmp.Compare(a, b))
	})
}

func (p *planner) settings(settings []sysctl) {
	for _, s := range settings {
		if value, known := p.have.sysctls[s.path]; !known || value != s.value {
			p.add(writeSetting{s})
		}
	}
}

// deleteConflicts deletes devices that have a wanted name but another kind, attributes that cannot be changed, or
// belong to another port.
func (p *planner) deleteConflicts() {
	var names []string
	for _, name := range p.want.linksInOrder() {
		w := p.want.links[name]
		h, exists := p.have.links[name]
		if exists && (h.kind != w.kind || h.vxlan != w.vxlan || h.alias != "" && h.alias != w.alias) {
			names = append(names, name)
			p.forget(name)
		}
	}
	if len(names) > 0 {
		p.add(deleteLinks{names})
	}
}

// forget removes a device from have.
func (p *planner) forget(name string) {
	h := p.have
	delete(h.links, name)
	h.forgetLimiter(name)
	for port, l := range h.links {
		if l.master == name {
			l.master = ""
			h.links[port] = l
		}
	}
	maps.DeleteFunc(h.sysctls, func(path, _ string) bool { return strings.Contains(path, "/"+name+"/") })
	maps.DeleteFunc(h.addresses, func(a address, _ bool) bool { return a.bridge == name })
	maps.DeleteFunc(h.routes, func(a address, _ netip.Addr) bool { return a.bridge == name })
	maps.DeleteFunc(h.neighbours, func(n neighbour, _ cloud.MAC) bool { return n.bridge == name })
	maps.DeleteFunc(h.tables, func(_ tableRoute, hop nextHop) bool { return hop.bridge == name })
	maps.DeleteFunc(h.tunnels, func(s station, _ netip.Addr) bool { return s.device == name })
	maps.DeleteFunc(h.fdb, func(s station, e fdbEntry) bool { return s.device == name || e.device == name })
}

// link creates or changes a device. Devices of ports are not created, and neither created nor existing ones are set up.
func (p *planner) link(name string) {
	w := p.want.links[name]
	h, exists := p.have.links[name]
	if !exists {
		switch w.kind {
		case bridgeLink:
			p.add(addBridge{name, w.mac, w.mtu})
		case vxlanLink, transitLink:
			p.add(addVXLAN{name, w.mtu, w.underlay, w.vxlan})
		case limiterLink:
			p.add(addLimiter{name})
		case portLink:
			p.missing = append(p.missing, name)
			return
		}
		h = w
		h.up, h.master, h.alias, h.bucket = false, "", "", bucket{}
		if w.kind == transitLink {
			h.mac = cloud.MAC{} // the kernel chooses one
		}
		p.have.links[name] = h
	}
	if h.alias != w.alias {
		p.add(setAlias{name, w.alias})
	}
	if h.mtu != w.mtu && w.mtu != 0 {
		p.add(setMTU{name, w.mtu})
	}
	if h.mac != w.mac && (w.kind == bridgeLink || w.kind == transitLink) {
		p.add(setMAC{name, w.mac})
		if w.kind == transitLink {
			// The kernel deletes the neighbours of a device whose MAC address changes.
			maps.DeleteFunc(p.have.neighbours, func(n neighbour, _ cloud.MAC) bool { return n.bridge == name })
		}
	}
	if w.kind == bridgeLink && h.snooping {
		p.add(setSnoopingOff{name})
	}
	p.settings(w.settings)
	p.limit(name, w, h)
	if h.master != w.master {
		p.add(setMaster{name, w.master}, setFlags{name, w.flags})
		// Leaving a bridge removes the port's entries from its FDB.
		maps.DeleteFunc(p.have.fdb, func(_ station, e fdbEntry) bool { return e.device == name })
	} else if h.flags != w.flags {
		p.add(setFlags{name, w.flags})
	}
	if (w.up || w.kind == portLink && mutant.On(mutant.UnfilteredPort)) && !h.up {
		p.add(setUp{name})
	}
}

// addAddresses adds addresses, and routes that were deleted although their address exists. Otherwise the kernel makes
// the routes with the address.
func (p *planner) addAddresses() {
	for _, a := range slices.SortedFunc(maps.Keys(p.want.addresses), compareAddresses) {
		connected := address{a.bridge, a.prefix.Masked()}
		_, routed := p.have.routes[connected]
		if !p.have.addresses[a] {
			p.add(addAddress{a})
		} else if !routed && p.have.links[a.bridge].up {
			p.add(addRoute{connected, p.want.routes[connected]})
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(p.have.addresses), compareAddresses) {
		if _, kept := p.want.links[a.bridge]; kept && !p.want.addresses[a] {
			p.add(deleteAddress{a})
		}
	}
}

// wanted returns the wanted FDB entry of a station if the entry's device exists.
func (p *planner) wanted(s station) (fdbEntry, bool) {
	e, wanted := p.want.fdb[s]
	_, exists := p.have.links[e.device]
	return e, wanted && exists
}

// addEntries adds and replaces entries of FDBs and neighbour tables. The entry of a remote port in the bridge and that
// in the VXLAN device are written by one request if both differ.
func (p *planner) addEntries() {
	for _, s := range slices.SortedFunc(maps.Keys(p.want.fdb), compareStations) {
		e, ok := p.wanted(s)
		if !ok {
			continue
		}
		c := replaceFDB{device: e.device, mac: s.mac, bridge: p.have.fdb[s] != e}
		tunnel := station{e.device, s.mac}
		if vtep, remote := p.want.tunnels[tunnel]; remote {
			old, exists := p.have.tunnels[tunnel]
			if exists && !old.IsValid() {
				p.add(deleteFDB{device: e.device, mac: s.mac, overlay: true})
			}
			if old != vtep {
				c.vtep = vtep
			}
		}
		if c.bridge || c.vtep.IsValid() {
			p.add(c)
		}
	}
	p.addTransitEntries()
	for _, n := range slices.SortedFunc(maps.Keys(p.want.neighbours), compareNeighbours) {
		if mac := p.want.neighbours[n]; p.have.neighbours[n] != mac {
			p.add(replaceNeighbour{n, mac})
		}
	}
}

// deleteEntries deletes entries of devices that are kept. The entries of other devices are deleted with the device.
func (p *planner) deleteEntries() {
	kept := func(device string) bool {
		_, ok := p.want.links[device]
		return ok
	}
	for _, s := range slices.SortedFunc(maps.Keys(p.have.fdb), compareStations) {
		e := p.have.fdb[s]
		if _, wanted := p.wanted(s); !wanted && kept(s.device) && kept(e.device) {
			p.add(deleteFDB{device: e.device, mac: s.mac})
		}
	}
	for _, s := range slices.SortedFunc(maps.Keys(p.have.tunnels), compareStations) {
		if _, wanted := p.want.tunnels[s]; !wanted && kept(s.device) {
			p.add(deleteFDB{device: s.device, mac: s.mac, overlay: true})
		}
	}
	for _, n := range slices.SortedFunc(maps.Keys(p.have.neighbours), compareNeighbours) {
		if _, wanted := p.want.neighbours[n]; !wanted && kept(n.bridge) {
			p.add(deleteNeighbour{n})
		}
	}
}

// deleteObsolete deletes devices that are no longer wanted.
func (p *planner) deleteObsolete() {
	var names []string
	for _, name := range p.have.linksInOrder() {
		if _, wanted := p.want.links[name]; !wanted {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		p.add(deleteLinks{names})
	}
}
