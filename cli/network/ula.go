package network

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// Lengths of the IPv6 prefixes of VPCs that --ipv6 creates, and of all subnets.
const (
	vpcBits6    = 48
	subnetBits6 = 64
)

// randomULA returns a random unique local prefix of /48 (RFC 4193 section 3.2): fd and 40 random bits.
func randomULA() netip.Prefix {
	a := [16]byte{0xfd}
	_, _ = rand.Read(a[1 : vpcBits6/8]) // never fails
	return netip.PrefixFrom(netip.AddrFrom16(a), vpcBits6)
}

// freeSubnet6 returns the first /64 of a VPC's prefix that is not in used, the prefixes of the VPC's subnets. It
// returns false if all are in use.
func freeSubnet6(vpc netip.Prefix, used map[netip.Prefix]bool) (netip.Prefix, bool) {
	a := vpc.Masked().Addr().As16()
	for {
		p := netip.PrefixFrom(netip.AddrFrom16(a), subnetBits6)
		if !vpc.Contains(p.Addr()) {
			return netip.Prefix{}, false
		}
		if !used[p] {
			return p, true
		}
		for i := subnetBits6/8 - 1; i >= 0; i-- { // the next /64
			if a[i]++; a[i] != 0 {
				break
			}
		}
	}
}

// chooseSubnet6 returns the first free /64 of the VPC with an ID. A concurrent call may choose the same prefix: the
// control plane then refuses the subnet that is created second.
func chooseSubnet6(ctx context.Context, t *target, id string) (string, error) {
	v, err := vpcs().get(ctx, t, id)
	if err != nil {
		return "", err
	}
	if v.GetIpv6CidrBlock() == "" {
		return "", session.Usagef("--ipv6: VPC %s has no IPv6 prefix, and gets one only when it is created", nameOf(v))
	}
	prefix, err := netip.ParsePrefix(v.GetIpv6CidrBlock())
	if err != nil {
		return "", fmt.Errorf("IPv6 prefix of VPC %s: %w", nameOf(v), err)
	}
	q := t.query()
	q.vpc = id
	all, err := subnets().all(ctx, t, q)
	if err != nil {
		return "", err
	}
	free, ok := freeSubnet6(prefix, prefixes6(all))
	if !ok {
		return "", fmt.Errorf("VPC %s has no free /64: its subnets use all of %s", nameOf(v), prefix)
	}
	return free.String(), nil
}

// prefixes6 returns the IPv6 prefixes of subnets.
func prefixes6(all []*networkv1.Subnet) map[netip.Prefix]bool {
	used := map[netip.Prefix]bool{}
	for _, n := range all {
		if p, err := netip.ParsePrefix(n.GetIpv6CidrBlock()); err == nil {
			used[p.Masked()] = true
		}
	}
	return used
}
