package firewall

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestText compares the wanted states of the VPCs in testdata with the texts there. The commands are
//
//	vpc          sets the VPC, one line for each part of it; see parseVPC
//	show PART    prints one part of the wanted state: sysctl, ipset, iptables, ip6tables or nft
//	permits      prints for each line of its input whether the connection may begin; see parseFlowText
//
// The command show nft prints elements of sets only, because the chains do not depend on the VPC. The command show
// nft-chains prints the rest, without the hashes of rules.
func TestText(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var vpc cloud.HostVPC
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "vpc":
				vpc = parseVPC(t, d.Input)
				return "ok"
			case "show":
				return show(t, vpc, d.CmdArgs[0].Key)
			case "permits":
				want, err := render(&vpc, &testOptions)
				require.NoError(t, err)
				var b strings.Builder
				for line := range strings.Lines(d.Input) {
					f := parseFlowText(t, strings.Fields(line))
					fmt.Fprintf(&b, "%s: %t\n", strings.TrimSpace(line), want.policy.permits(&f))
				}
				return b.String()
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

var ruleHash = regexp.MustCompile(` comment "[0-9a-f]{16}"`)

func show(t *testing.T, vpc cloud.HostVPC, part string) string {
	t.Helper()
	text, err := Text(vpc, testOptions)
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	title, _, _ := strings.Cut(part, "-")
	_, text, _ = strings.Cut(text, "# "+title+"\n")
	text, _, _ = strings.Cut(text, "\n# ")
	var b strings.Builder
	for line := range strings.Lines(ruleHash.ReplaceAllString(text, "")) {
		element := strings.HasPrefix(line, "add element")
		if part == "nft" && !element || part == "nft-chains" && element {
			continue
		}
		b.WriteString(line)
	}
	return b.String()
}

// parseVPC parses lines such as these. Each line but the last two belongs to the subnet above it.
//
//	subnet 10.0.0.0/24 10.0.0.1 fd00::/64
//	port tap1 02:00:00:00:00:05 10.0.0.5 fd00::5 groups=web,ssh pair=10.9.0.0/16 pair=10.0.0.9/32@00:00:5e:00:01:01
//	open tap2 02:00:00:00:00:06 10.0.0.6
//	remote 02:00:00:00:00:07 10.0.0.7
//	rule web ingress tcp 80-90 from=10.0.0.0/8
//	members ssh 10.0.0.5 fd00::5
//
// A rule's fields are: group, direction, protocol with 6 at its end for IPv6, optionally ports or type/code, and
// optionally from= or to= with a prefix or the name of a group. "rule web" alone defines a group without rules.
func parseVPC(t *testing.T, input string) cloud.HostVPC {
	t.Helper()
	vpc := cloud.HostVPC{ID: "vpc", CIDR: parsePrefix("10.0.0.0/16"), CIDR6: parsePrefix("fd00::/56")}
	for line := range strings.Lines(input) {
		fields := strings.Fields(line)
		last := len(vpc.Subnets) - 1
		switch fields[0] {
		case "subnet":
			s := cloud.HostSubnet{CIDR: parsePrefix(fields[1]), Gateway: parseAddr(fields[2])}
			if len(fields) > 3 {
				s.CIDR6 = parsePrefix(fields[3])
			}
			vpc.Subnets = append(vpc.Subnets, s)
		case "port", "open":
			p := parsePort(t, fields)
			vpc.Subnets[last].Ports = append(vpc.Subnets[last].Ports, p)
		case "remote":
			r := cloud.RemotePort{MAC: parseMAC(t, fields[1]), IP: parseAddr(fields[2])}
			vpc.Subnets[last].Remotes = append(vpc.Subnets[last].Remotes, r)
		case "rule":
			addRule(t, &vpc, fields)
		case "members":
			m := cloud.GroupMembers{ID: cloud.SecurityGroupID(fields[1])}
			for _, a := range fields[2:] {
				m.Addresses = append(m.Addresses, parseAddr(a))
			}
			vpc.Members = append(vpc.Members, m)
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	return vpc
}

func parsePort(t *testing.T, fields []string) cloud.HostPort {
	t.Helper()
	p := cloud.HostPort{ID: cloud.PortID("port-" + fields[1]), Device: fields[1], MAC: parseMAC(t, fields[2]),
		IP: parseAddr(fields[3]), Secured: fields[0] == "port"}
	for _, field := range fields[4:] {
		name, value, assigned := strings.Cut(field, "=")
		switch {
		case !assigned:
			p.IP6 = parseAddr(field)
		case name == "groups":
			for id := range strings.SplitSeq(value, ",") {
				p.Groups = append(p.Groups, cloud.SecurityGroupID(id))
			}
		case name == "pair":
			cidr, mac, ok := strings.Cut(value, "@")
			pair := cloud.AddressPair{CIDR: parsePrefix(cidr)}
			if ok {
				pair.MAC = parseMAC(t, mac)
			}
			p.Pairs = append(p.Pairs, pair)
		}
	}
	return p
}

func parseMAC(t *testing.T, text string) cloud.MAC {
	t.Helper()
	mac, err := net.ParseMAC(text)
	require.NoError(t, err)
	return cloud.MAC(mac)
}

var protocols = map[string]uint8{"icmp": 1, "tcp": 6, "udp": 17, "icmp6": cloud.ProtocolICMPv6, "sctp": 132}

func addRule(t *testing.T, vpc *cloud.HostVPC, fields []string) {
	t.Helper()
	var rules []cloud.Rule
	if len(fields) > 2 {
		rule := cloud.Rule{Direction: map[string]cloud.Direction{"ingress": cloud.Ingress, "egress": cloud.Egress}[fields[2]]}
		if number, err := strconv.Atoi(fields[3]); err == nil {
			rule.Protocol = uint8(number)
		} else {
			name := strings.TrimSuffix(fields[3], "6")
			rule.IPv6, rule.AnyProtocol, rule.Protocol = name != fields[3], name == "any", protocols[name]
			if rule.IPv6 && name == "icmp" {
				rule.Protocol = cloud.ProtocolICMPv6
			}
		}
		for _, field := range fields[4:] {
			parseCondition(t, &rule, field)
		}
		rules = append(rules, rule)
	}
	id := cloud.SecurityGroupID(fields[1])
	for i := range vpc.Groups {
		if vpc.Groups[i].ID == id {
			vpc.Groups[i].Rules = append(vpc.Groups[i].Rules, rules...)
			return
		}
	}
	vpc.Groups = append(vpc.Groups, cloud.HostGroup{ID: id, Rules: rules})
}

func parseCondition(t *testing.T, rule *cloud.Rule, field string) {
	t.Helper()
	number := func(text string) uint64 {
		n, err := strconv.ParseUint(text, 10, 16)
		require.NoError(t, err)
		return n
	}
	_, peer, remote := strings.Cut(field, "=")
	switch {
	case remote:
		if prefix, err := netip.ParsePrefix(peer); err == nil {
			rule.CIDR = prefix
		} else {
			rule.Group = cloud.SecurityGroupID(peer)
		}
	case rule.Protocol == cloud.ProtocolICMP || rule.Protocol == cloud.ProtocolICMPv6:
		typ, code, exact := strings.Cut(field, "/")
		rule.ICMP = &cloud.ICMP{Type: uint8(number(typ)), AnyCode: !exact}
		if exact {
			rule.ICMP.Code = uint8(number(code))
		}
	default:
		first, last, isRange := strings.Cut(field, "-")
		if !isRange {
			last = first
		}
		rule.Ports = cloud.PortRange{First: uint16(number(first)), Last: uint16(number(last))}
	}
}

// parseFlowText parses fields such as "10.0.0.5 10.0.0.6 tcp/80" or "fd00::5 fd00::6 icmp6/128/0". A fourth field means
// that the flow began at a port with port security.
func parseFlowText(t *testing.T, fields []string) flow {
	t.Helper()
	parts := strings.Split(fields[2], "/")
	f := flow{source: parseAddr(fields[0]), destination: parseAddr(fields[1]), fromPort: len(fields) > 3}
	f.protocol = protocols[parts[0]]
	numbers := make([]uint64, 2)
	for i, part := range parts[1:] {
		var err error
		numbers[i], err = strconv.ParseUint(part, 10, 16)
		require.NoError(t, err)
	}
	if f.protocol == cloud.ProtocolICMP || f.protocol == cloud.ProtocolICMPv6 {
		f.icmpType, f.icmpCode = uint8(numbers[0]), uint8(numbers[1])
	} else {
		f.port = uint16(numbers[0])
	}
	return f
}
