package guest

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ErrNotNIC means that a line does not say that an interface got its address.
var ErrNotNIC = errors.New("not a line about an interface's address")

// NIC is a network interface of the guest that got an address.
type NIC struct {
	Name    string // such as eth0
	MAC     string // such as 02:00:5e:10:00:01
	Address netip.Prefix
	Gateway netip.Addr // of the default route; invalid if there is none
	Host    string     // the guest's host name; empty if the DHCP server gave none
	MTU     int        // of IPv4, or of IPv6 if the line is NIC6
}

// ParseNIC parses the line that the guest prints when an interface got its IPv4 address by DHCP. The error wraps
// ErrNotNIC if line is any other line.
func ParseNIC(line string) (NIC, error) {
	return parseNIC(line, "NIC ")
}

// ParseNIC6 parses the line that the guest prints when an interface got an IPv6 address. The result has no host name.
// The error wraps ErrNotNIC if line is any other line.
func ParseNIC6(line string) (NIC, error) {
	return parseNIC(line, "NIC6 ")
}

// parseNIC parses a line that begins with Prefix and words.
func parseNIC(line, words string) (NIC, error) {
	_, rest, ok := strings.Cut(strings.TrimSpace(line), Prefix+words)
	if !ok || strings.HasSuffix(rest, " removed") {
		return NIC{}, ErrNotNIC
	}
	fields := map[string]string{}
	for _, field := range strings.Fields(rest) {
		key, value, _ := strings.Cut(field, "=")
		fields[key] = value
	}
	n := NIC{Name: fields["name"], Host: fields["host"], MAC: fields["mac"]}
	var errs [4]error
	if n.Name == "" || len(n.MAC) != len("02:00:5e:10:00:01") {
		errs[0] = errors.New("no name or MAC address")
	}
	n.Address, errs[1] = netip.ParsePrefix(fields["addr"])
	n.MTU, errs[2] = strconv.Atoi(fields["mtu"])
	if fields["gw"] != "" {
		n.Gateway, errs[3] = netip.ParseAddr(fields["gw"])
	}
	if err := errors.Join(errs[:]...); err != nil {
		return NIC{}, fmt.Errorf("%w: %w", ErrNotNIC, err)
	}
	return n, nil
}
