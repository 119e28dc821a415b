package firewall

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// chains returns the text of each chain with the handles and counters of its rules, by table and name.
func (l *lab) chains(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	table, chain := "", ""
	for line := range strings.Lines(runIn(t, l.ns, "", "nft", "--handle", "list", "ruleset")) {
		fields := strings.Fields(line)
		switch {
		case len(fields) > 2 && fields[0] == "table":
			table, chain = fields[1], ""
		case len(fields) > 1 && fields[0] == "chain":
			chain = table + " " + fields[1]
		case len(fields) > 0 && fields[0] == "}":
			chain = ""
		}
		if chain != "" {
			all[chain] += line
		}
	}
	return all
}

// TestRepairChangesOnlyTheDrift damages one part of the rules at a time. The handles and counters of all other chains
// show that Set does not replace them.
func TestRepairChangesOnlyTheDrift(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	s.group("in", cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Group: "out"})
	client, server := s.add(t, 0, 5, "out"), s.add(t, 0, 6, "in")
	s.members("out", client.port.IP)
	s.set(t)
	forge := func(source, destination netip.Addr, tag string) []byte {
		return udp(at(parseAddr("10.0.0.99"), 1), at(destination, 2), tag)
	}
	require.Equal(t, "spoof", s.verdict(t, call{client, server, false, forge}))
	require.Equal(t, "group", s.verdict(t, call{client, server, false, udpTo(1)}))
	require.Equal(t, "group", s.verdict(t, call{client, server, true, udpTo(1)}))
	drops := s.drops(t)
	in := newGroupList([]cloud.SecurityGroupID{"in"}).id().String()
	for _, c := range []struct{ command, chain string }{
		{"iptables-nft -A trivet-i-" + in + " -j ACCEPT", "ip trivet-i-" + in},
		{"iptables-nft -D trivet-i-" + in + " 1", "ip trivet-i-" + in},
		{"ip6tables-nft -D trivet-egress 1", "ip6 trivet-egress"},
		{"iptables-nft -D FORWARD 1", "ip FORWARD"},
		{"ip6tables-nft -P FORWARD ACCEPT", "ip6 FORWARD"},
		{"iptables-nft -N trivet-foreign", "ip trivet-foreign"},
		{"ipset del trivet-group4-" + hash("out") + " 10.0.0.5", ""},
		{"ipset add trivet-group4-" + hash("out") + " 10.0.0.250", ""},
		{`nft delete element bridge trivet mac { "p0-5" . 02:00:00:00:00:05 }`, ""},
		{`nft add element bridge trivet source4 { "p0-5" . 02:00:00:00:00:05 . 10.0.0.99 }`, ""},
		{"sysctl -w net.bridge.bridge-nf-call-iptables=0", ""},
	} {
		want := s.chains(t)
		runIn(t, s.ns, "", strings.Fields(c.command)...)
		require.NotZero(t, s.set(t).Writes, c.command)
		require.Equal(t, Result{}, s.set(t), c.command)
		have := s.chains(t)
		require.Greater(t, len(want), 20, "the chains of all tables are listed")
		delete(want, c.chain)
		delete(have, c.chain)
		require.Equal(t, want, have, c.command)
		require.Equal(t, drops, s.drops(t), c.command)
	}
}
