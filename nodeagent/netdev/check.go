package netdev

import (
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// check returns an error for a state that the kernel would refuse, or in which two ports claim the same name or
// address.
func check(vpc *cloud.HostVPC, u *underlay) error {
	if vpc.MTU < minMTU {
		return fmt.Errorf("MTU %d is below %d", vpc.MTU, minMTU)
	}
	if need := int(vpc.MTU) + u.overhead(); u.mtu != 0 && need > u.mtu {
		return fmt.Errorf("the VPC's MTU of %d needs an MTU of %d on the underlay of this host, which has %d",
			vpc.MTU, need, u.mtu)
	}
	seen := uses{}
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		if err := checkSubnet(s, u, seen); err != nil {
			return fmt.Errorf("subnet %s: %w", s.ID, err)
		}
		if err := checkRoutes(vpc, s); err != nil {
			return fmt.Errorf("subnet %s: %w", s.ID, err)
		}
	}
	return checkGateways(vpc, u, seen)
}

// uses holds names and addresses that must be unique, and what has them.
type uses map[any]string

func (u uses) add(key any, user string) error {
	if other, used := u[key]; used {
		return fmt.Errorf("%s and %s both have %v", other, user, key)
	}
	u[key] = user
	return nil
}

func checkSubnet(s *cloud.HostSubnet, u *underlay, seen uses) error {
	switch {
	case s.VNI == 0 || s.VNI > maxVNI:
		return fmt.Errorf("VNI %d is not between 1 and %d", s.VNI, maxVNI)
	case !s.CIDR.IsValid() || !s.CIDR.Contains(s.Gateway):
		return fmt.Errorf("gateway %s is not in %s", s.Gateway, s.CIDR)
	}
	if err := seen.add(Bridge(s.VNI), "subnet "+string(s.ID)); err != nil {
		return err
	}
	// The addresses are those of one subnet; the names of devices are unique in the VPC.
	local, remote := uses{}, uses{}
	for i := range s.Ports {
		p := &s.Ports[i]
		if err := checkPort(p, seen); err != nil {
			return fmt.Errorf("port %s: %w", p.ID, err)
		}
		if err := addStation(local, "port "+string(p.ID), p.MAC, p.IP, p.IP6); err != nil {
			return err
		}
	}
	for i := range s.Remotes {
		r := &s.Remotes[i]
		if err := checkRemote(r, u); err != nil {
			return err
		}
		if err := addStation(remote, "remote port "+r.MAC.String(), r.MAC, r.IP, r.IP6); err != nil {
			return err
		}
	}
	return nil
}

func checkRemote(r *cloud.RemotePort, u *underlay) error {
	if r.VTEP.Is4() != u.vtep.Is4() || r.VTEP.Is6() != u.vtep.Is6() || r.VTEP == u.vtep {
		return fmt.Errorf("remote port %s: VTEP %s cannot be reached from VTEP %s", r.MAC, r.VTEP, u.vtep)
	}
	return nil
}

func checkPort(p *cloud.HostPort, seen uses) error {
	if !validDevice.MatchString(p.Device) || bridgeName.MatchString(p.Device) || vxlanName.MatchString(p.Device) ||
		transitName.MatchString(p.Device) || limiterName.MatchString(p.Device) ||
		p.Device == loopback || p.Device == "all" || p.Device == "default" { // the names of directories in /proc/sys/net
		return fmt.Errorf("%q cannot be the name of a port's device", p.Device)
	}
	if p.ID == "" || len(aliasPrefix)+len(p.ID) > maxAlias {
		return fmt.Errorf("the ID has %d bytes; it needs 1 to %d", len(p.ID), maxAlias-len(aliasPrefix))
	}
	if p.Mbps > maxMbps {
		return fmt.Errorf("the bandwidth of %d Mbit/s is above %d Mbit/s", p.Mbps, maxMbps)
	}
	if p.Mbps > 0 {
		if err := seen.add(limiterOf(p), "port "+string(p.ID)); err != nil {
			return err
		}
	}
	return seen.add(p.Device, "port "+string(p.ID))
}

func addStation(seen uses, user string, mac cloud.MAC, addrs ...netip.Addr) error {
	if !usable(mac) {
		return fmt.Errorf("%s: %s cannot be the MAC address of a port", user, mac)
	}
	if err := seen.add(mac, user); err != nil {
		return err
	}
	for _, a := range addrs {
		if a.IsValid() {
			if err := seen.add(a, user); err != nil {
				return err
			}
		}
	}
	return nil
}
