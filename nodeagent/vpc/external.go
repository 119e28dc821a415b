package vpc

import (
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addExternal adds the NAT gateways of the VPC, the floating IPs of its service IPs, and the floating IPs of the ports
// on this host.
func (w *wanted) addExternal(t *tables, one *vpcTable) {
	for _, key := range slices.Sorted(maps.Keys(one.nats)) {
		switch n := one.nats[key]; {
		case !n.OnOneHost() && w.NAT == nil && w.hasPorts():
			w.NAT = &cloud.HostNAT{External: n.External}
		case n.OnOneHost():
			w.addGateway(t, n)
		}
	}
	for i := range w.Subnets {
		for _, p := range w.Subnets[i].Ports {
			f := t.floating[t.floatingAt[p.ID]]
			if f != nil && f.Fixed == p.IP {
				w.Floating = append(w.Floating, cloud.HostFloating{Address: f.Address, External: f.External, Fixed: f.Fixed})
			}
		}
	}
	slices.SortFunc(w.Floating, func(a, b cloud.HostFloating) int { return a.Address.Compare(b.Address) })
}
