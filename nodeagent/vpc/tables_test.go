package vpc

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// self is the host of the tests, and selfVTEP is its underlay address. Host n2 has the address 192.0.2.2, and so on.
const self = cloud.NodeID("n1")

var selfVTEP = vtepOf(self)

func vtepOf(node cloud.NodeID) netip.Addr {
	return netip.MustParseAddr("192.0.2." + strings.TrimPrefix(string(node), "n"))
}

// TestHostVPC runs the scripts in testdata/hostvpc. An update consists of lines such as
//
//	vpc a
//	subnet s1 vpc=a net=1
//	port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g,h pairs=10.0.1.50/32 gen=1
//	port p6 vpc=a subnet=s1 at=10.0.1.6 node=n1 moves=n2
//	group g tcp/80<-h any->
//	service web vpc=a at=10.0.1.50 ports=80:8080/tcp,53/udp to=p5*2,p6!,10.0.1.9 check=tcp
//	table r vpc=a subnets=s1,s2 10.1.0.0/16=peering:ab 192.0.2.0/24=nat:g
//	peering ab of=a,b
//	nat g vpc=a node=n2 vni=200 address=203.0.113.9 default gen=1
//	delete p5
//	invalid p5 vpc=a
//	protected 192.0.2.1 192.0.2.2
//
// `snapshot` and `change` apply their lines and print the VPCs whose state may have changed. `show` prints the wanted
// state of a VPC.
func TestHostVPC(t *testing.T) {
	datadriven.Walk(t, "testdata/hostvpc", func(t *testing.T, path string) {
		var tab tables
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "snapshot", "change":
				u := parseUpdate(t, d.Input)
				u.Snapshot = d.Cmd == "snapshot"
				return fmt.Sprintf("touched %v", slices.Sorted(maps.Keys(tab.apply(&u))))
			case "show":
				w, ok := tab.hostVPC(cloud.VPCID(d.CmdArgs[0].Key), selfVTEP)
				if !ok {
					return "none"
				}
				return show(&w)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

func parseUpdate(t *testing.T, input string) cloud.NetworkUpdate {
	u := cloud.NetworkUpdate{Node: self}
	for line := range strings.Lines(input) {
		words := strings.Fields(line)
		args := map[string]string{}
		for _, word := range words[2:] {
			key, value, _ := strings.Cut(word, "=")
			args[key] = value
		}
		vpc := cloud.VPCID(args["vpc"])
		switch id := words[1]; words[0] {
		case "vpc":
			v := testVPC(id)
			if n := args["n"]; n != "" { // another prefix, and another project
				v.CIDR, v.CIDR6 = netip.MustParsePrefix("10."+n+".0.0/16"), netip.MustParsePrefix("fd00:"+n+"::/48")
			}
			v.Project = cloud.ProjectID(args["project"])
			if text := args["services"]; text != "" {
				v.ServiceCIDR = netip.MustParsePrefix(text)
			}
			u.VPCs = append(u.VPCs, v)
		case "table":
			u.RouteTables = append(u.RouteTables, parseTable(id, vpc, words[3:]))
		case "peering":
			a, b, _ := strings.Cut(args["of"], ",")
			u.Peerings = append(u.Peerings, cloud.Peering{
				ID: cloud.PeeringID(id), VPC: cloud.VPCID(a), PeerVPC: cloud.VPCID(b), PeerProject: cloud.ProjectID(args["with"]),
			})
		case "subnet":
			var net, vni int
			fmt.Sscan(args["net"], &net)
			vni = 100 + net
			fmt.Sscan(args["vni"], &vni)
			s := testSubnet(id, vpc, net, uint32(vni))
			if n := args["n"]; n != "" {
				s.CIDR = netip.MustParsePrefix(fmt.Sprintf("10.%s.%d.0/24", n, net))
				s.Gateway = s.CIDR.Addr().Next()
				s.CIDR6 = netip.MustParsePrefix(fmt.Sprintf("fd00:%s:0:%d::/64", n, net))
			}
			u.Subnets = append(u.Subnets, s)
		case "port":
			u.Ports = append(u.Ports, parsePort(t, id, args))
		case "group":
			u.Groups = append(u.Groups, cloud.SecurityGroup{ID: cloud.SecurityGroupID(id), Rules: parseRules(words[2:])})
		case "service":
			u.ServiceIPs = append(u.ServiceIPs, parseService(t, id, args))
		case "nat":
			u.NATGateways = append(u.NATGateways, parseNAT(id, args))
		case "floating":
			u.FloatingIPs = append(u.FloatingIPs, cloud.FloatingIP{
				ID: cloud.FloatingIPID(id), External: "internet", Port: cloud.PortID(args["port"]),
				Address: netip.MustParseAddr(args["address"]), Fixed: netip.MustParseAddr(args["fixed"]),
			})
		case "delete":
			u.Deleted = append(u.Deleted, id)
		case "protected":
			for _, word := range words[1:] {
				u.Protected = append(u.Protected, netip.MustParseAddr(word))
			}
		case "invalid":
			u.Invalid = append(u.Invalid, cloud.InvalidRecord{ID: id, VPC: vpc, Err: errors.New("is invalid")})
		default:
			t.Fatalf("unknown record %s", line)
		}
	}
	return u
}

func testVPC(id string) cloud.VPCOnHost {
	return cloud.VPCOnHost{VPC: cloud.VPC{
		ID: cloud.VPCID(id), CIDR: netip.MustParsePrefix("10.0.0.0/16"), CIDR6: netip.MustParsePrefix("fd00::/48"), MTU: 1400,
	}, Domain: "web.internal"}
}

// testSubnet returns the subnet 10.0.net.0/24 and fd00:0:0:net::/64.
func testSubnet(id string, vpc cloud.VPCID, net int, vni uint32) cloud.Subnet {
	return cloud.Subnet{
		ID: cloud.SubnetID(id), VPC: vpc, CIDR: netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", net)), DHCP: true, VNI: vni,
		Gateway: netip.MustParseAddr(fmt.Sprintf("10.0.%d.1", net)), CIDR6: netip.MustParsePrefix(fmt.Sprintf("fd00:0:0:%d::/64", net)),
	}
}

func parsePort(t *testing.T, id string, args map[string]string) cloud.PortOnHost {
	ip, err := netip.ParseAddr(args["at"])
	require.NoError(t, err)
	p := cloud.PortOnHost{Port: cloud.Port{
		ID: cloud.PortID(id), VPC: cloud.VPCID(args["vpc"]), Subnet: cloud.SubnetID(args["subnet"]), IP: ip, Node: cloud.NodeID(args["node"]),
		Secured: true, MigrationNode: cloud.NodeID(args["moves"]),
	}, HostName: args["name"]}
	four := ip.As4()
	p.MAC = cloud.MAC{2, 0, four[0], four[1], four[2], four[3]}
	if p.Node != "" && args["vtep"] != "none" {
		p.VTEP = vtepOf(p.Node)
	}
	if args["vtep"] != "" && args["vtep"] != "none" {
		p.VTEP = netip.MustParseAddr(args["vtep"])
	}
	for _, g := range strings.FieldsFunc(args["groups"], comma) {
		p.Groups = append(p.Groups, cloud.SecurityGroupID(g))
	}
	for _, pair := range strings.FieldsFunc(args["pairs"], comma) {
		p.Pairs = append(p.Pairs, cloud.AddressPair{CIDR: netip.MustParsePrefix(pair)})
	}
	fmt.Sscan(args["gen"], &p.BindingGeneration)
	p.Labels = parseLabels(args["labels"])
	return p
}

// parseTable parses the subnets and routes of a route table.
func parseTable(id string, vpc cloud.VPCID, words []string) cloud.RouteTable {
	table := cloud.RouteTable{ID: cloud.RouteTableID(id), VPC: vpc}
	for _, word := range words {
		key, value, _ := strings.Cut(word, "=")
		if key == "subnets" {
			for _, s := range strings.FieldsFunc(value, comma) {
				table.Subnets = append(table.Subnets, cloud.SubnetID(s))
			}
			continue
		}
		r := cloud.Route{Destination: netip.MustParsePrefix(key), Target: cloud.RouteNAT}
		kind, target, _ := strings.Cut(value, ":")
		if r.ID = target; kind == "peering" {
			r.Target = cloud.RoutePeering
		}
		table.Routes = append(table.Routes, r)
	}
	return table
}

func comma(r rune) bool { return r == ',' }

// parseRules parses rules such as tcp/80<-g, which permits TCP port 80 from group g, any<- and any->.
func parseRules(words []string) []cloud.Rule {
	var out []cloud.Rule
	for _, word := range words {
		r := cloud.Rule{Direction: cloud.Ingress}
		left, group, in := strings.Cut(word, "<-")
		if !in {
			left, group, _ = strings.Cut(word, "->")
			r.Direction = cloud.Egress
		}
		r.Group = cloud.SecurityGroupID(group)
		switch protocol, port, _ := strings.Cut(left, "/"); protocol {
		case "tcp":
			r.Protocol = cloud.ProtocolTCP
			fmt.Sscan(port, &r.Ports.First)
			r.Ports.Last = r.Ports.First
		case "icmp":
			r.Protocol = cloud.ProtocolICMP
		default:
			r.AnyProtocol = true
		}
		out = append(out, r)
	}
	return out
}

func show(w *wanted) string {
	var b strings.Builder
	for _, s := range w.Subnets {
		fmt.Fprintf(&b, "subnet %s %s vni %d\n", s.ID, s.CIDR, s.VNI)
		for _, p := range s.Ports {
			fmt.Fprintf(&b, "  port %s %s %s groups %v pairs %v\n", p.ID, p.Device, p.IP, p.Groups, p.Pairs)
		}
		for _, r := range s.Routes {
			fmt.Fprintf(&b, "  route %s target %d gateway %q peering %q\n", r.Destination, r.Target, r.Gateway, r.Peering)
		}
		for _, r := range s.Remotes {
			fmt.Fprintf(&b, "  remote %s %s at %s\n", r.MAC, r.IP, r.VTEP)
		}
	}
	showGateways(&b, w)
	for _, g := range w.Groups {
		fmt.Fprintf(&b, "group %s with %d rules\n", g.ID, len(g.Rules))
	}
	showServices(&b, w.Services)
	for _, m := range w.Members {
		fmt.Fprintf(&b, "members of %s: %v\n", m.ID, m.Addresses)
	}
	if len(w.Denied) > 0 {
		fmt.Fprintf(&b, "denied %v\n", w.Denied)
	}
	for _, p := range w.Peerings {
		fmt.Fprintf(&b, "peering %s with %s %s %s mtu %d\n", p.ID, p.Peer, p.CIDR, p.CIDR6, p.MTU)
	}
	for _, p := range w.Problems {
		fmt.Fprintf(&b, "problem: %s\n", p)
	}
	return b.String()
}

// TestAnyOrder applies random changes in random parts and requires the same state as that of a snapshot with the final
// records.
func TestAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		vpcs, groups := []string{"a", "b"}, []string{"g", "h", "i"}
		final := map[string]string{}
		base := []string{"vpc a", "vpc b"}
		for _, vpc := range vpcs {
			for n := 1; n <= 2; n++ {
				base = append(base, fmt.Sprintf("subnet s%s%d vpc=%s net=%d", vpc, n, vpc, n))
			}
		}
		for _, line := range base {
			final[strings.Fields(line)[1]] = line
		}
		var changed tables
		first := parseUpdate(t, strings.Join(base, "\n"))
		first.Snapshot = true
		changed.apply(&first)
		generation := 0
		for range 60 {
			var lines []string
			for range 1 + random.IntN(3) {
				line := randomChange(random, vpcs, groups, &generation)
				id := strings.Fields(line)[1]
				if slices.ContainsFunc(lines, func(l string) bool { return strings.Fields(l)[1] == id }) {
					continue // one record is not twice in an update
				}
				lines = append(lines, line)
				delete(final, id)
				if !strings.HasPrefix(line, "delete") {
					final[id] = line
				}
			}
			before := map[string]string{}
			for _, vpc := range vpcs {
				w, _ := changed.hostVPC(cloud.VPCID(vpc), selfVTEP)
				before[vpc] = show(&w)
			}
			u := parseUpdate(t, strings.Join(lines, "\n"))
			touched := changed.apply(&u)
			for _, vpc := range vpcs {
				w, _ := changed.hostVPC(cloud.VPCID(vpc), selfVTEP)
				require.True(t, touched[cloud.VPCID(vpc)] || show(&w) == before[vpc], "VPC %s changed but is not touched by %v", vpc, lines)
			}
		}
		records := slices.Collect(maps.Values(final))
		random.Shuffle(len(records), func(i, j int) { records[i], records[j] = records[j], records[i] })
		u := parseUpdate(t, strings.Join(records, "\n"))
		u.Snapshot = true
		var fresh tables
		fresh.apply(&u)
		for _, vpc := range vpcs {
			want, _ := fresh.hostVPC(cloud.VPCID(vpc), selfVTEP)
			got, _ := changed.hostVPC(cloud.VPCID(vpc), selfVTEP)
			require.Equal(t, want, got, "seed %d", seed)
			require.Equal(t, fresh.vpcs[cloud.VPCID(vpc)].uses, changed.vpcs[cloud.VPCID(vpc)].uses, "seed %d", seed)
		}
	}
}

func randomChange(random *rand.Rand, vpcs, groups []string, generation *int) string {
	pick := func(from []string) string { return from[random.IntN(len(from))] }
	n := 10 + random.IntN(10)
	switch random.IntN(7) {
	case 5:
		return fmt.Sprintf("delete v%d", random.IntN(3))
	case 6:
		vpc, n := pick(vpcs), random.IntN(3)
		return fmt.Sprintf("service v%d vpc=%s at=10.0.1.%d ports=80/tcp to=p%d,p%d!,10.0.1.%d check=tcp",
			n, vpc, 200+n, 10+random.IntN(10), 10+random.IntN(10), 10+random.IntN(10))
	case 0:
		return "group " + pick(groups) + " any-> tcp/80<-" + pick(groups)
	case 1:
		return fmt.Sprintf("delete p%d", n)
	case 2:
		return "delete " + pick(groups)
	}
	*generation++
	vpc, subnet := pick(vpcs), 1+random.IntN(2)
	return fmt.Sprintf("port p%d vpc=%s subnet=s%s%d at=10.0.%d.%d node=%s groups=%s pairs=10.9.0.%d/32 gen=%d",
		n, vpc, vpc, subnet, subnet, n, pick([]string{"n1", "n2", "n3", ""}), pick(groups), n, *generation)
}

// announcesTwice applies an earlier binding of a port to another host after a later one to this host. It reports
// whether the earlier one is in force.
func announcesTwice() bool {
	var tab tables
	record := func(node cloud.NodeID, generation uint64) cloud.PortOnHost {
		return cloud.PortOnHost{Port: cloud.Port{
			ID: "p", VPC: "a", Subnet: "s", Node: node, IP: netip.MustParseAddr("10.0.1.5"), MAC: cloud.MAC{2, 0, 0, 0, 0, 5},
		}, VTEP: vtepOf(node), BindingGeneration: generation}
	}
	tab.apply(&cloud.NetworkUpdate{
		Node: self, Snapshot: true, VPCs: []cloud.VPCOnHost{testVPC("a")}, Subnets: []cloud.Subnet{testSubnet("s", "a", 1, 101)},
		Ports: []cloud.PortOnHost{record("n2", 2)},
	})
	tab.apply(&cloud.NetworkUpdate{Node: self, Ports: []cloud.PortOnHost{record(self, 1)}})
	w, _ := tab.hostVPC("a", selfVTEP)
	return len(w.Subnets[0].Ports) > 0
}

func TestEarlierBindingIsIgnored(t *testing.T) { require.False(t, announcesTwice()) }

// TestDeviceNames requires that names of ports that were made at the same time, whose IDs begin with the same digits,
// differ.
func TestDeviceNames(t *testing.T) {
	seen := map[string]bool{}
	for i := range 10_000 {
		name := DeviceName(cloud.PortID(fmt.Sprintf("0190a6b2-0000-7000-8000-%012d", i)))
		require.LessOrEqual(t, len(name), 15)
		require.False(t, seen[name])
		seen[name] = true
	}
}
