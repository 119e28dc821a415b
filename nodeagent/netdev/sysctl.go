package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// namespaceSettings are the sysctls of the namespace of each VPC. ip_forward is first, because writing it resets
// others. Settings below conf/all and conf/default are written before the devices are created, which then start with
// them.
var namespaceSettings = []sysctl{
	{"net/ipv4/ip_forward", "1"},
	{"net/ipv6/conf/all/forwarding", "1"},

	// See the package comment.
	{"net/ipv4/conf/all/rp_filter", "0"},
	{"net/ipv4/conf/default/rp_filter", "0"},

	// Guests with a common gateway are not redirected to each other: the packet filter of the gateway's host would not
	// see their packets. send_redirects is on if either the setting of the device or that of all devices is on.
	{"net/ipv4/conf/all/send_redirects", "0"},
	{"net/ipv4/conf/default/send_redirects", "0"},
	{"net/ipv4/conf/all/accept_redirects", "0"},
	{"net/ipv4/conf/default/accept_redirects", "0"},
	{"net/ipv6/conf/default/accept_redirects", "0"},
	{"net/ipv4/conf/all/accept_source_route", "0"},
	{"net/ipv4/conf/default/accept_source_route", "0"},

	// The gateway asks for the MAC address of a guest only with its address in the guest's subnet, as guests may drop
	// requests from others.
	{"net/ipv4/conf/all/arp_announce", "2"},
	// The gateway answers ARP requests for all its addresses on all bridges, among them those on the loopback device:
	// guests with a route for 169.254.0.0/16 to their network device resolve the metadata address.
	{"net/ipv4/conf/all/arp_ignore", "0"},
	{"net/ipv4/conf/all/proxy_arp", "0"},

	// If the gateway of a subnet changes, the new address is at first a secondary one of the same prefix. It takes over
	// when the old one is deleted; otherwise it would be deleted too.
	{"net/ipv4/conf/all/promote_secondaries", "1"},

	// The settings for iptables and ip6tables are those of package firewall.
	{"net/bridge/bridge-nf-call-arptables", "0"},
}

// bridgeSettings returns the sysctls of a bridge. resolve is true if the gateway resolves addresses that have no
// permanent neighbour entry.
func bridgeSettings(name string, ipv6, resolve bool) []sysctl {
	v4, v6 := "net/ipv4/conf/"+name, "net/ipv6/conf/"+name
	solicitations := "0"
	if resolve {
		solicitations = "3" // the default of Linux
	}
	disabled := "1"
	if ipv6 {
		disabled = "0"
	}
	return []sysctl{
		{v4 + "/forwarding", "1"},
		{v4 + "/rp_filter", "0"},
		{v4 + "/send_redirects", "0"},
		{v4 + "/accept_redirects", "0"},
		{v4 + "/proxy_arp", "0"},
		{"net/ipv4/neigh/" + name + "/mcast_solicit", solicitations},

		{v6 + "/addr_gen_mode", "1"}, // none: the addresses are those of the gateway
		// All hosts have the gateway's addresses, so there is nothing to detect. A guest could disable the gateway by
		// claiming its address.
		{v6 + "/accept_dad", "0"},
		{v6 + "/dad_transmits", "0"},
		{v6 + "/accept_ra", "0"},
		{v6 + "/autoconf", "0"},
		{v6 + "/accept_redirects", "0"},
		{v6 + "/forwarding", "1"},
		{v6 + "/proxy_ndp", "0"},
		{"net/ipv6/neigh/" + name + "/mcast_solicit", solicitations},
		{v6 + "/disable_ipv6", disabled}, // last: the others are in effect before the bridge has IPv6
	}
}

// portSettings returns the sysctls of a port of a bridge. Without IPv6 a port has no link-local address and sends no
// multicast reports of its own. Bridged IPv6 packets do not depend on the setting.
func portSettings(name string) []sysctl {
	return []sysctl{{"net/ipv6/conf/" + name + "/disable_ipv6", "1"}}
}

const procSys = "/proc/sys"

// readSysctl returns the value of a setting in the network namespace of the thread, and false if the kernel has no such
// setting.
func readSysctl(path string) (string, bool, error) {
	text, err := os.ReadFile(filepath.Join(procSys, path))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read sysctl: %w", err)
	}
	return strings.TrimSpace(string(text)), true, nil
}

// writeSysctl changes a setting in the network namespace of the thread.
func writeSysctl(s sysctl) error {
	file, err := os.OpenFile(filepath.Join(procSys, s.path), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(s.value)
	return errors.Join(err, file.Close())
}
