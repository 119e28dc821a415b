package cloud

import "slices"

// Equal reports whether two ports have the same wanted state.
func (p *HostPort) Equal(o *HostPort) bool {
	return p.ID == o.ID && p.Device == o.Device && p.HostName == o.HostName && p.MAC == o.MAC && p.IP == o.IP &&
		p.IP6 == o.IP6 && p.Secured == o.Secured && p.Mbps == o.Mbps && p.Hairpin == o.Hairpin &&
		slices.Equal(p.Groups, o.Groups) && slices.Equal(p.Pairs, o.Pairs)
}

// Equal reports whether two ports on other hosts have the same state.
func (p *RemotePort) Equal(o *RemotePort) bool {
	return p.MAC == o.MAC && p.IP == o.IP && p.IP6 == o.IP6 && p.HostName == o.HostName && p.VTEP == o.VTEP &&
		slices.Equal(p.Pairs, o.Pairs)
}
