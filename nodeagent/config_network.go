package main

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// validInterface matches the name of a network interface.
var validInterface = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}$`)

// validPrefix matches the start of the names of network namespaces.
var validPrefix = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,18})-$`)

// validExternal matches the name of an external network.
var validExternal = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// validateNetwork returns an error that names the invalid setting of the host's network. It does not look at the host's
// interfaces.
func (c *Config) validateNetwork() error {
	if _, err := netip.ParseAddr(c.Underlay); err == nil {
		if _, err := convert.VTEPFrom(c.Underlay); err != nil {
			return fmt.Errorf("underlay: %q is not the address of a host", c.Underlay)
		}
	} else if c.Underlay != "" && !validInterface.MatchString(c.Underlay) {
		return fmt.Errorf("underlay: %q is neither an IP address nor the name of an interface", c.Underlay)
	}
	switch {
	case !validPrefix.MatchString(c.Network.Prefix):
		return fmt.Errorf("network.prefix: %q is not 2 to 20 characters of a-z, 0-9 and -, ending in -", c.Network.Prefix)
	case c.UnderlayMTU != 0 && (c.UnderlayMTU < 1280 || c.UnderlayMTU > 65535):
		return fmt.Errorf("underlay_mtu: %d is not between 1280 and 65535", c.UnderlayMTU)
	}
	users := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(c.External)) {
		device := c.External[name].Interface
		switch {
		case !validExternal.MatchString(name):
			return fmt.Errorf("external: %q is not the name of an external network", name)
		case !validInterface.MatchString(device):
			return fmt.Errorf("external.%s: %q is not the name of an interface", name, device)
		case users[device] != "":
			return fmt.Errorf("external.%s: %s is already the interface of %s", name, device, users[device])
		}
		users[device] = name
		if _, err := c.External[name].connection(); err != nil {
			return fmt.Errorf("external.%s: %w", name, err)
		}
	}
	return nil
}

// connection parses the setting.
func (e External) connection() (edge.External, error) {
	out := edge.External{Interface: e.Interface}
	var err error
	if out.Address, err = netip.ParsePrefix(e.Address); err != nil || !out.Address.Addr().Is4() {
		return out, fmt.Errorf("address: %q is not an IPv4 address with a prefix length, such as 203.0.113.2/24", e.Address)
	}
	if e.Gateway == "" {
		return out, nil
	}
	if out.Gateway, err = netip.ParseAddr(e.Gateway); err != nil || !out.Address.Contains(out.Gateway) || out.Gateway == out.Address.Addr() {
		return out, fmt.Errorf("gateway: %q is not another address in %s", e.Gateway, out.Address.Masked())
	}
	return out, nil
}

// parseExternal parses the flag form of the setting: name=interface:address/length[:gateway], comma-separated.
func parseExternal(s string) (map[string]External, error) {
	out := map[string]External{}
	if s == "" {
		return out, nil
	}
	for text := range strings.SplitSeq(s, ",") {
		name, rest, ok := strings.Cut(text, "=")
		parts := strings.Split(rest, ":")
		if !ok || len(parts) < 2 || len(parts) > 3 {
			return nil, fmt.Errorf("%q is not name=interface:address/length[:gateway]", text)
		}
		if _, twice := out[name]; twice {
			return nil, fmt.Errorf("%q is given twice", name)
		}
		e := External{Interface: parts[0], Address: parts[1]}
		if len(parts) == 3 {
			e.Gateway = parts[2]
		}
		out[name] = e
	}
	return out, nil
}
