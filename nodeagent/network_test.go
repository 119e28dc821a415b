package main

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestNetworkSettings(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		want   string // part of the error; empty if the settings are valid
	}{
		"none":         {func(*Config) {}, ""},
		"address":      {func(c *Config) { c.Underlay = "192.0.2.1" }, ""},
		"IPv6 address": {func(c *Config) { c.Underlay, c.UnderlayMTU = "fd99::1", 9000 }, ""},
		"interface":    {func(c *Config) { c.Underlay = "bond0.100" }, ""},
		"external": {func(c *Config) {
			c.External = map[string]External{"office": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}, "internet": {Interface: "eth2", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}}
		}, ""},
		"multicast":    {func(c *Config) { c.Underlay = "239.0.0.1" }, "underlay"},
		"unspecified":  {func(c *Config) { c.Underlay = "0.0.0.0" }, "underlay"},
		"zone":         {func(c *Config) { c.Underlay = "fe80::1%eth0" }, "underlay"},
		"no interface": {func(c *Config) { c.Underlay = "../eth0" }, "underlay"},
		"small MTU":    {func(c *Config) { c.UnderlayMTU = 500 }, "underlay_mtu"},
		"encryption":   {func(c *Config) { c.Network.Encrypt = true }, ""},
		"external name": {func(c *Config) {
			c.External = map[string]External{"Office!": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}}
		}, "external"},
		"external interface": {func(c *Config) {
			c.External = map[string]External{"office": {Interface: "an interface", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}}
		}, "external.office"},
		"one interface for 2": {func(c *Config) {
			c.External = map[string]External{"a": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}, "b": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}}
		}, "already the interface of a"},
		"external address": {func(c *Config) { c.External = map[string]External{"a": {Interface: "eth1", Address: "203.0.113.2"}} }, "external.a: address"},
		"external gateway": {func(c *Config) {
			c.External = map[string]External{"a": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "198.51.100.1"}}
		}, "external.a: gateway"},
		"external without one": {func(c *Config) {
			c.External = map[string]External{"office": {Interface: "", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}}
		}, "external.office"},
	} {
		c := Default()
		test.change(&c)
		if err := c.validateNetwork(); test.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, test.want, name)
		}
	}
}

func TestExternalFlag(t *testing.T) {
	got, err := parseExternal("a=eth1:203.0.113.2/24:203.0.113.1,b=eth2:198.51.100.2/28")
	require.NoError(t, err)
	require.Equal(t, map[string]External{
		"a": {Interface: "eth1", Address: "203.0.113.2/24", Gateway: "203.0.113.1"}, "b": {Interface: "eth2", Address: "198.51.100.2/28"},
	}, got)
	for _, text := range []string{"a", "a=eth1", "a=eth1:1.2.3.4/8:1.2.3.5:x", "a=e:1.2.3.4/8,a=f:1.2.3.4/8"} {
		_, err := parseExternal(text)
		require.Error(t, err, text)
	}
}

func TestFindUnderlay(t *testing.T) {
	loopback := netip.MustParseAddr("127.0.0.1")
	for _, c := range []Config{
		{ControlPlane: []string{"127.0.0.1:7443"}}, {ControlPlane: []string{"name.invalid:1", "127.0.0.1:7443"}}, {Underlay: "127.0.0.1"},
		{Underlay: "lo"},
	} {
		u, err := findUnderlay(t.Context(), &c)
		require.NoError(t, err, "%v", c)
		require.Equal(t, loopback, u.vtep)
		require.NotZero(t, u.mtu)
		require.Equal(t, c.Underlay == "lo", u.device == "lo")
	}
	u, err := findUnderlay(t.Context(), &Config{Underlay: "127.0.0.1", UnderlayMTU: 1400})
	require.NoError(t, err)
	require.EqualValues(t, 1400, u.mtu)
	for _, c := range []Config{{Underlay: "192.0.2.99"}, {Underlay: "none0"}, {ControlPlane: []string{"name.invalid:1"}}} {
		_, err := findUnderlay(t.Context(), &c)
		require.ErrorContains(t, err, "underlay")
	}
}

// TestMemberAddresses requires that memberAddresses returns the addresses of the other members if one name cannot be
// resolved.
func TestMemberAddresses(t *testing.T) {
	found, err := memberAddresses(t.Context(), []string{"192.0.2.1:7443", "[2001:db8::1]:7443", "192.0.2.1:8443", "name.invalid:1", "[::ffff:192.0.2.2]:1"})
	require.ErrorContains(t, err, "name.invalid")
	require.Equal(t, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("192.0.2.2")}, found)
}

// TestHostWithoutVPCs requires that a host that cannot have VPCs reports those that it gets as failed.
func TestHostWithoutVPCs(t *testing.T) {
	var acks []cloud.NetworkAck
	n := openNetworks(t.Context(), &Config{Underlay: "none0"}, networkCalls{ack: func(a cloud.NetworkAck) { acks = append(acks, a) }}, slog.New(slog.DiscardHandler))
	defer n.close()
	require.Nil(t, n.description)
	n.Apply(cloud.NetworkUpdate{Stream: 1, Revision: 5, VPCs: []cloud.VPCOnHost{{VPC: cloud.VPC{ID: "a"}}}})
	require.EqualValues(t, 5, acks[0].Revision)
	require.EqualValues(t, "a", acks[0].Failures[0].VPC)
	n.Apply(cloud.NetworkUpdate{Stream: 1, Revision: 6, Ports: []cloud.PortOnHost{{Port: cloud.Port{ID: "p", VPC: "a"}}}})
	require.Len(t, acks[1].Failures, 1, "an update of a port does not make its VPC succeed")
	n.Apply(cloud.NetworkUpdate{Stream: 1, Revision: 7, Deleted: []string{"a"}})
	require.Empty(t, acks[2].Failures)
	require.Empty(t, n.metrics().VPCs)
}

func TestHostResolvers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	require.NoError(t, os.WriteFile(path, []byte("search x\nnameserver 192.0.2.53\nnameserver fd00::53\n"), 0o600))
	r := &hostResolvers{path: path}
	want := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddrPort("[fd00::53]:53")}
	require.Equal(t, want, r.list())
	require.NoError(t, os.Remove(path))
	r.read = time.Time{}
	require.Equal(t, want, r.list(), "the list is kept while the file is missing")
}
