package loopback

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBoth(t *testing.T) {
	at := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }
	for name, c := range map[string]struct {
		local, remote net.Addr
		want          bool
	}{
		"IPv4":                      {at("127.0.0.1"), at("127.0.0.1"), true},
		"other loopback addresses":  {at("127.0.1.1"), at("127.9.9.9"), true},
		"IPv6":                      {at("::1"), at("::1"), true},
		"IPv4 in IPv6":              {at("::ffff:127.0.0.1"), at("::ffff:127.0.0.1"), true},
		"source bound to loopback":  {at("10.9.9.1"), at("127.0.0.1"), false},
		"the network's own address": {at("10.9.9.1"), at("127.0.0.0"), false},
		"from another host":         {at("127.0.0.1"), at("10.9.9.2"), false},
		"public addresses":          {at("10.9.9.1"), at("10.9.9.1"), false},
		"unknown local address":     {nil, at("127.0.0.1"), false},
		"unknown remote address":    {at("127.0.0.1"), nil, false},
		"UNIX socket":               {&net.UnixAddr{Name: "/s", Net: "unix"}, at("127.0.0.1"), false},
	} {
		require.Equal(t, c.want, Both(c.local, c.remote), name)
	}
}
