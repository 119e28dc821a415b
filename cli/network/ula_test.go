package network

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRandomULA(t *testing.T) {
	a, b := randomULA(), randomULA()
	require.NotEqual(t, a, b)
	for _, p := range []netip.Prefix{a, b} {
		require.Equal(t, 48, p.Bits())
		require.Equal(t, p.Masked(), p)
		require.True(t, netip.MustParsePrefix("fd00::/8").Contains(p.Addr()))
	}
}

func TestFreeSubnet6(t *testing.T) {
	vpc := netip.MustParsePrefix("fd12:3456:789a:ff00::/56")
	used := map[netip.Prefix]bool{}
	take := func() netip.Prefix {
		p, ok := freeSubnet6(vpc, used)
		require.True(t, ok)
		require.False(t, used[p])
		used[p] = true
		return p
	}
	require.Equal(t, "fd12:3456:789a:ff00::/64", take().String())
	second := take()
	require.Equal(t, "fd12:3456:789a:ff01::/64", second.String())
	for range 254 {
		take()
	}
	_, ok := freeSubnet6(vpc, used)
	require.False(t, ok, "a /56 has 256 subnets")
	delete(used, second)
	require.Equal(t, second, take(), "the prefix of a deleted subnet")
}
