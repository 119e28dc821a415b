package cloudinit

import (
	"fmt"
	"net/netip"
)

// networkConfig is the file network-config in version 2 of cloud-init's format.
type networkConfig struct {
	Version   int                 `yaml:"version"`
	Ethernets map[string]ethernet `yaml:"ethernets"` // the encoder sorts the names
}

type ethernet struct {
	Match          match          `yaml:"match"`
	SetName        string         `yaml:"set-name"`
	MTU            uint16         `yaml:"mtu,omitempty"`
	DHCP4          bool           `yaml:"dhcp4"`
	DHCP4Overrides *dhcpOverrides `yaml:"dhcp4-overrides,omitempty"`
	DHCP6          bool           `yaml:"dhcp6"`
	DHCP6Overrides *dhcpOverrides `yaml:"dhcp6-overrides,omitempty"`
	AcceptRA       bool           `yaml:"accept-ra,omitempty"`
	Addresses      []netip.Prefix `yaml:"addresses,omitempty"`
	Gateway4       string         `yaml:"gateway4,omitempty"`
	Gateway6       string         `yaml:"gateway6,omitempty"`
	Routes         []route        `yaml:"routes,omitempty"`
	Nameservers    *nameservers   `yaml:"nameservers,omitempty"`
}

type match struct {
	MACAddress string `yaml:"macaddress"`
}

type dhcpOverrides struct {
	RouteMetric int `yaml:"route-metric"`
}

type route struct {
	To  netip.Prefix `yaml:"to"`
	Via netip.Addr   `yaml:"via"`
}

type nameservers struct {
	Addresses []netip.Addr `yaml:"addresses,omitempty"`
	Search    []string     `yaml:"search,omitempty"`
}

// metricStep is the difference between the metrics of the default routes that two successive interfaces get from DHCP.
// The first interface has the metric metricStep.
const metricStep = 100

// newNetworkConfig describes the interfaces eth0, eth1 and so on. If there are several, their default routes from DHCP
// get ascending metrics, so that the first interface is used for destinations outside of the subnets.
func newNetworkConfig(nics []NIC) networkConfig {
	c := networkConfig{Version: 2, Ethernets: map[string]ethernet{}}
	for i, n := range nics {
		metric := 0
		if len(nics) > 1 {
			metric = metricStep * (i + 1)
		}
		name := fmt.Sprintf("eth%d", i)
		e := ethernet{
			Match: match{n.MAC.String()}, SetName: name, MTU: n.MTU,
			DHCP4: n.DHCP4, DHCP6: n.DHCP6, AcceptRA: n.DHCP6, Addresses: n.Addresses,
		}
		if n.DHCP4 && metric > 0 {
			e.DHCP4Overrides = &dhcpOverrides{metric}
		}
		if n.DHCP6 && metric > 0 {
			e.DHCP6Overrides = &dhcpOverrides{metric}
		}
		if n.Gateway4.IsValid() {
			e.Gateway4 = n.Gateway4.String()
		}
		if n.Gateway6.IsValid() {
			e.Gateway6 = n.Gateway6.String()
		}
		for _, r := range n.Routes {
			e.Routes = append(e.Routes, route(r))
		}
		if len(n.DNS) > 0 || len(n.Search) > 0 {
			e.Nameservers = &nameservers{n.DNS, n.Search}
		}
		c.Ethernets[name] = e
	}
	return c
}
