package main

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"

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
	case c.Network.Encrypt:
		return errors.New("network.encrypt: encryption of traffic between hosts is not supported yet: " +
			"set it to false, and use an underlay that only hosts can read")
	}
	users := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(c.External)) {
		device := c.External[name]
		switch {
		case !validExternal.MatchString(name):
			return fmt.Errorf("external: %q is not the name of an external network", name)
		case !validInterface.MatchString(device):
			return fmt.Errorf("external.%s: %q is not the name of an interface", name, device)
		case users[device] != "":
			return fmt.Errorf("external.%s: %s is already the interface of %s", name, device, users[device])
		}
		users[device] = name
	}
	return nil
}
