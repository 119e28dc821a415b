package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pollIPv6 is the time between two reads of the IPv6 state of an interface from the kernel.
const pollIPv6 = 500 * time.Millisecond

// address6 is an IPv6 address of an interface.
type address6 struct {
	prefix netip.Prefix
	flags  uint64 // IFA_F_… of the kernel
}

// usable reports whether the kernel has finished duplicate address detection and found no other owner.
func (a address6) usable() bool { return a.flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 }

// runIPv6 prints a line for each IPv6 address that an interface gets, from a router advertisement or by DHCPv6, until
// ctx ends. The kernel evaluates the advertisements: default route, MTU, and the addresses of autonomous
// configuration.
func (m *machine) runIPv6(ctx context.Context, name string) {
	go m.runDHCPv6(ctx, name)
	printed := map[netip.Prefix]bool{}
	for wait(ctx, pollIPv6) {
		now := map[netip.Prefix]bool{}
		for _, a := range parseAddresses6(readText("/proc/net/if_inet6"), name) {
			if a.prefix.Addr().IsLinkLocalUnicast() || !a.usable() {
				continue
			}
			now[a.prefix] = true
			if !printed[a.prefix] {
				m.say("NIC6 name=%s mac=%s addr=%s gw=%s mtu=%s", name, readText("/sys/class/net/"+name+"/address"),
					a.prefix, router6(name), readText("/proc/sys/net/ipv6/conf/"+name+"/mtu"))
			}
		}
		printed = now
	}
}

// router6 returns the router of an interface's default route as text, or "" if there is none.
func router6(name string) string {
	if a := parseRouter6(readText("/proc/net/ipv6_route"), name); a.IsValid() {
		return a.String()
	}
	return ""
}

// parseAddresses6 returns the addresses of an interface in the text of /proc/net/if_inet6. Its fields are the address,
// the interface's index, the prefix length, the scope and the flags, all in hex, and the interface's name.
func parseAddresses6(text, name string) (out []address6) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 6 || f[5] != name {
			continue
		}
		address, ok := parseHex6(f[0])
		bits, err := strconv.ParseUint(f[2], 16, 8)
		flags, err2 := strconv.ParseUint(f[4], 16, 32)
		if ok && err == nil && err2 == nil {
			out = append(out, address6{netip.PrefixFrom(address, int(bits)), flags})
		}
	}
	return out
}

// parseRouter6 returns the router of an interface's first default route in the text of /proc/net/ipv6_route. The fields
// that are used are the destination with its prefix length (first and second), the next hop (fifth) and the interface's
// name (last).
func parseRouter6(text, name string) netip.Addr {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 10 || f[9] != name || f[1] != "00" {
			continue
		}
		if a, ok := parseHex6(f[4]); ok && !a.IsUnspecified() {
			return a
		}
	}
	return netip.Addr{}
}

// parseHex6 parses an address of 32 hexadecimal digits without colons.
func parseHex6(text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 16 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte(b)), true
}

// managed reports whether a router on the link of an interface advertises that addresses come from DHCPv6 (flag M of
// RFC 4861).
func managed(name string) (bool, error) {
	const inet6Flags, raManaged = 1, 0x40 // IFLA_INET6_FLAGS and IF_RA_MANAGED of the kernel
	dump, err := syscall.NetlinkRIB(syscall.RTM_GETLINK, syscall.AF_INET6)
	if err != nil {
		return false, fmt.Errorf("list interfaces: %w", err)
	}
	messages, err := syscall.ParseNetlinkMessage(dump)
	if err != nil {
		return false, fmt.Errorf("list interfaces: %w", err)
	}
	for i := range messages {
		if messages[i].Header.Type != syscall.RTM_NEWLINK {
			continue
		}
		attributes, err := syscall.ParseNetlinkRouteAttr(&messages[i])
		if err != nil {
			return false, fmt.Errorf("list interfaces: %w", err)
		}
		found, flags := false, uint32(0)
		for _, a := range attributes {
			switch a.Attr.Type &^ unix.NLA_F_NESTED {
			case unix.IFLA_IFNAME:
				found = strings.TrimRight(string(a.Value), "\x00") == name
			case unix.IFLA_PROTINFO:
				if v := attribute(a.Value, inet6Flags); len(v) == 4 {
					flags = binary.NativeEndian.Uint32(v)
				}
			}
		}
		if found {
			return flags&raManaged != 0, nil
		}
	}
	return false, nil
}

// attribute returns the value of a netlink attribute in a list of attributes, or nil. Each has a header of its length
// and type, 2 bytes each, and is padded to a multiple of 4 bytes.
func attribute(list []byte, kind uint16) []byte {
	for len(list) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(list))
		if n < unix.SizeofRtAttr || n > len(list) {
			return nil
		}
		if binary.NativeEndian.Uint16(list[2:])&^unix.NLA_F_NESTED == kind {
			return list[unix.SizeofRtAttr:n]
		}
		list = list[min((n+3)&^3, len(list)):]
	}
	return nil
}

// wait returns false if ctx ended before the time has passed.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
