package netdev

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// remote returns a port on another host in the subnet 10.0.1.0/24 or fd00:0:0:1::/64.
func remote(mac, ip, host int) cloud.RemotePort {
	return cloud.RemotePort{
		MAC: cloud.MAC{2, 1, 0, 0, 0, byte(mac)}, IP: netip.AddrFrom4([4]byte{10, 0, 1, byte(ip)}),
		IP6:  netip.MustParseAddr(fmt.Sprintf("fd00:0:0:1::%x", ip)),
		VTEP: netip.AddrFrom4([4]byte{192, 0, 2, byte(10 + host)}),
	}
}

func compareMACs(a, b cloud.RemotePort) int { return bytes.Compare(a.MAC[:], b.MAC[:]) }

// withRemotes returns a copy of vpc with these ports on other hosts in the first subnet.
func withRemotes(vpc cloud.HostVPC, remotes ...cloud.RemotePort) cloud.HostVPC {
	vpc.Subnets = slices.Clone(vpc.Subnets)
	vpc.Subnets[0].Remotes = remotes
	return vpc
}

// TestUpdateRemotes changes random ports on other hosts, and requires after each change that the namespace has the
// wanted state.
func TestUpdateRemotes(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	random := rand.New(rand.NewPCG(5, 6))
	base := testVPC(l, "a", 100, place{1, 10, 0}, place{2, 11, 0})[0]
	h.apply(base)
	last := base
	for step := range 60 {
		addresses := random.Perm(8) // an address moves from one port to another
		var remotes []cloud.RemotePort
		for mac := range 6 {
			if random.IntN(3) > 0 {
				r := remote(mac, 100+addresses[mac], random.IntN(2))
				if random.IntN(20) == 0 {
					r.Pairs = []cloud.AddressPair{{CIDR: netip.MustParsePrefix("10.0.1.99/32")}}
				}
				if random.IntN(20) == 0 {
					r.MAC = cloud.MAC{2, 0, 0, 0, 1, 10} // that of the port on this host, which migrates
				}
				if !slices.ContainsFunc(remotes, func(o cloud.RemotePort) bool { return o.MAC == r.MAC }) {
					remotes = append(remotes, r)
				}
			}
		}
		if slices.SortFunc(remotes, compareMACs); step%10 == 9 {
			slices.Reverse(remotes)
		}
		vpc := withRemotes(base, remotes...)
		_, err := h.UpdateRemotes(t.Context(), vpc, last)
		require.NoError(t, err)
		require.Empty(t, texts(h.apply(vpc)), "step %d", step)
		last = vpc
	}
}

// TestUpdateRemotesReadsNothing requires that the changes for one port do not depend on the number of the others, and
// that the entries of the others are not read.
func TestUpdateRemotesReadsNothing(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	base := testVPC(l, "a", 100, place{1, 10, 0})[0]
	for _, count := range []int{2, 100} {
		var remotes []cloud.RemotePort
		for i := range count {
			remotes = append(remotes, remote(i, 100+i, 0))
		}
		last := withRemotes(base, remotes...)
		h.apply(last)
		name := h.vpcName("a")
		l.ip(name, "neighbour delete 10.0.1.100 dev br101")
		vpc := withRemotes(base, append(slices.Clone(remotes[:count-1]), remote(count-1, 220, 1), remote(200, 221, 0))...)
		result, err := h.UpdateRemotes(t.Context(), vpc, last)
		require.NoError(t, err)
		moved, joined := fmt.Sprintf("02:01:00:00:00:%02x", count-1), "02:01:00:00:00:c8"
		require.Equal(t, []string{
			"bridge fdb replace " + moved + " dev vx101 dst 192.0.2.11 self static sticky",
			"bridge fdb replace " + joined + " dev vx101 dst 192.0.2.10 self master static sticky",
			"ip neighbour replace 10.0.1.220 lladdr " + moved + " dev br101 nud permanent",
			"ip neighbour replace 10.0.1.221 lladdr " + joined + " dev br101 nud permanent",
			"ip neighbour replace fd00:0:0:1::dc lladdr " + moved + " dev br101 nud permanent",
			"ip neighbour replace fd00:0:0:1::dd lladdr " + joined + " dev br101 nud permanent",
			fmt.Sprintf("ip neighbour delete 10.0.1.%d dev br101", 99+count),
			fmt.Sprintf("ip neighbour delete fd00:0:0:1::%x dev br101", 99+count),
		}, texts(result.Changes))
		require.Equal(t, []string{
			"ip neighbour replace 10.0.1.100 lladdr 02:01:00:00:00:00 dev br101 nud permanent",
		}, texts(h.apply(vpc)), "Prepare repairs the entry that was deleted by hand")
	}
}

// TestUpdateRemotesRefuses requires that ports that Prepare refuses are refused, and change nothing.
func TestUpdateRemotesRefuses(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	last := withRemotes(testVPC(l, "a", 100, place{1, 10, 0})[0], remote(1, 100, 0))
	h.apply(last)
	own := remote(2, 101, 0)
	own.VTEP = h.vtep
	for _, c := range []struct {
		remote cloud.RemotePort
		text   string
	}{
		{own, "cannot be reached"},
		{remote(2, 100, 0), "both have"},
		{cloud.RemotePort{MAC: cloud.GatewayMAC, IP: remote(2, 101, 0).IP, VTEP: remote(2, 101, 0).VTEP}, "cannot be the MAC address"},
	} {
		vpc := withRemotes(last, remote(1, 100, 0), c.remote)
		_, err := h.UpdateRemotes(t.Context(), vpc, last)
		require.ErrorContains(t, err, c.text)
		_, err = h.Prepare(t.Context(), vpc)
		require.Error(t, err)
	}
	require.Empty(t, texts(h.apply(last)))
}
