package vpc

import (
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addExternal adds the NAT gateway of the VPC and the floating IPs of the ports on this host.
func (w *wanted) addExternal(t *tables, one *vpcTable) {
	for _, key := range slices.Sorted(maps.Keys(one.nats)) {
		if n := one.nats[key]; isHostNAT(n) && w.NAT == nil && w.hasPorts() {
			w.NAT = &cloud.HostNAT{External: n.External}
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

// isHostNAT reports whether hosts support a NAT gateway: it is the VPC's default, and each host uses its own address. An
// address of the gateway's own would have to be on one host, which is not supported yet.
func isHostNAT(n *cloud.NATGateway) bool { return n.Default && !n.Address.IsValid() }
