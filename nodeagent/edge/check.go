package edge

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// external is an external network with what follows from its place in the sorted list of names.
type external struct {
	External
	name   string
	device string // in the edge namespace
	mark   int    // of packets that leave to the network
	table  int    // routing table of the network
}

// firstTable is the routing table of the first external network.
const firstTable = 1000

// checkExternals returns the external networks sorted by name.
func checkExternals(all map[string]External) ([]external, error) {
	var list []external
	devices := map[string]string{}
	for i, name := range slices.Sorted(maps.Keys(all)) {
		x := all[name]
		switch {
		case x.Interface == "":
			return nil, fmt.Errorf("external network %s: interface is required", name)
		case !x.Address.IsValid() || !x.Address.Addr().Is4():
			return nil, fmt.Errorf("external network %s: address must be the host's IPv4 address with a prefix length", name)
		case x.Gateway.IsValid() && (!x.Address.Contains(x.Gateway) || x.Gateway == x.Address.Addr()):
			return nil, fmt.Errorf("external network %s: gateway %s is no other address of %s", name, x.Gateway,
				x.Address.Masked())
		}
		device := "x" + hash(name)
		if other, used := devices[device]; used {
			return nil, fmt.Errorf("external networks %s and %s have the same hash: rename one", other, name)
		}
		devices[device] = name
		list = append(list, external{External: x, name: name, device: device, mark: i + 1, table: firstTable + i})
	}
	return list, nil
}

// hash returns eight hexadecimal digits that identify s.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:4])
}

// macOf returns the MAC address of the device for an external network, which is unique among the hosts of the network
// because the interface's address is.
func (x *external) macOf(parent net.HardwareAddr, namespace string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(parent.String() + "\n" + x.name + "\n" + namespace))
	return append(net.HardwareAddr{0x02}, sum[:5]...)
}

func externalOf(all []external, name string) *external {
	i, found := slices.BinarySearchFunc(all, name, func(x external, n string) int { return cmp.Compare(x.name, n) })
	if !found {
		return nil
	}
	return &all[i]
}

// check returns the valid VPCs sorted by ID, and an error for each invalid one. check removes gateways and floating IPs
// from a VPC if they are invalid or if another VPC has their address, and returns an error for each. The VPC stays
// valid, because an address that moves from one VPC to another must not disconnect either VPC.
func (e *Edge) check(s State) ([]VPC, []error) {
	var valid []VPC
	var invalid []error
	users := map[netip.Addr]cloud.VPCID{} // of addresses outside
	for _, x := range e.externals {
		users[x.Address.Addr()] = "this host"
		users[x.Gateway] = "the gateway"
	}
	namespaces := map[string]cloud.VPCID{}
	all := slices.SortedFunc(slices.Values(s.VPCs), func(a, b VPC) int { return cmp.Compare(a.ID, b.ID) })
	for i, v := range all {
		err := v.check()
		switch {
		case i > 0 && all[i-1].ID == v.ID:
			err = errors.New("the VPC occurs twice")
		case err == nil && namespaces[v.Namespace] != "":
			err = fmt.Errorf("VPC %s has the same namespace", namespaces[v.Namespace])
		}
		if err != nil {
			invalid = append(invalid, &VPCError{v.ID, err})
			continue
		}
		for _, err := range e.leaveOutInvalid(&v, users) {
			invalid = append(invalid, &VPCError{v.ID, err})
		}
		namespaces[v.Namespace] = v.ID
		valid = append(valid, v)
	}
	return valid, invalid
}

// check returns an error if the VPC cannot be connected at all.
func (v *VPC) check() error {
	const most = maxAlias - len(aliasPrefix) - len(aliasDevice) - maxDevice
	if v.Namespace == "" || len(v.Namespace) > most {
		return fmt.Errorf("the path of the namespace must have 1 to %d bytes", most)
	}
	return v.checkGateways()
}

// leaveOutInvalid removes gateways and floating IPs from v if they contradict the options or each other, or if users
// contains their address. It returns an error for each. It adds the addresses of the remaining gateways and floating
// IPs to users.
func (e *Edge) leaveOutInvalid(v *VPC, users map[netip.Addr]cloud.VPCID) (invalid []error) {
	use := func(network string, a netip.Addr) error {
		x := externalOf(e.externals, network)
		switch {
		case x == nil:
			return fmt.Errorf("the host is not connected to the external network %s: see external in its configuration", network)
		case !a.Is4() || !x.Address.Contains(a):
			return fmt.Errorf("%s is not an address of the external network %s", a, network)
		case users[a] != "":
			return fmt.Errorf("%s belongs to %s already", a, users[a])
		}
		users[a] = v.ID
		return nil
	}
	translates := func(n *cloud.HostNAT) bool {
		if externalOf(e.externals, n.External) != nil && !n.Address.IsValid() {
			return true
		}
		err := use(n.External, n.Address)
		if err != nil {
			invalid = append(invalid, err)
		}
		return err == nil
	}
	if v.NAT != nil && !translates(v.NAT) {
		v.NAT = nil
	}
	v.Gateways = slices.DeleteFunc(slices.Clone(v.Gateways), func(g Gateway) bool { return !translates(&g.HostNAT) })
	fixed := map[netip.Addr]bool{}
	v.Floating = slices.DeleteFunc(slices.Clone(v.Floating), func(f cloud.HostFloating) bool {
		err := use(f.External, f.Address)
		if err == nil && (!f.Fixed.Is4() || fixed[f.Fixed]) {
			err = fmt.Errorf("floating IP %s: %s is not an IPv4 address, or has another floating IP already", f.Address, f.Fixed)
		}
		if err != nil {
			invalid = append(invalid, err)
			return true
		}
		fixed[f.Fixed] = true
		return false
	})
	return invalid
}

// translations returns the translations of all NAT gateways of the VPC.
func (v *VPC) translations() (list []*cloud.HostNAT) {
	if v.NAT != nil {
		list = append(list, v.NAT)
	}
	for i := range v.Gateways {
		list = append(list, &v.Gateways[i].HostNAT)
	}
	return list
}
