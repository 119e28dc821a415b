package firewall

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// update applies the wanted state without reading the kernel's.
func (l *lab) update(t *testing.T) Result {
	t.Helper()
	r, err := l.firewall.Update(t.Context(), l.ns, l.vpc)
	require.NoError(t, err)
	return r
}

// TestUpdateFromEveryState updates a namespace to random VPCs, one after the other, without reading the kernel's state.
// Another Firewall, which reads the state, then finds nothing to change.
func TestUpdateFromEveryState(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	l := newLab(t)
	reader, err := New(testOptions)
	require.NoError(t, err)
	check := func(what string) {
		t.Helper()
		l.update(t)
		require.Zero(t, l.update(t).Writes, what)
		r, err := reader.Set(t.Context(), l.ns, l.vpc)
		require.NoError(t, err)
		require.Equal(t, Result{}, r, what)
	}
	for i := range 25 {
		l.vpc = randomVPC(random)
		l.vpc.LooseTCP = i%3 == 0
		check(fmt.Sprintf("VPC %d", i))
		shuffle(random, &l.vpc)
		check(fmt.Sprintf("VPC %d in another order", i))
		// The changes are made within the slices of the last call.
		m := &l.vpc.Members[random.IntN(len(l.vpc.Members))]
		m.Addresses = append(m.Addresses, parseAddr("10.0.0.200"), parseAddr("fd00::200"), parseAddr("10.0.0.200"))
		check(fmt.Sprintf("VPC %d with another member", i))
		other := &l.vpc.Members[random.IntN(len(l.vpc.Members))]
		other.Addresses = append(other.Addresses, m.Addresses[0])
		m.Addresses = slices.Delete(m.Addresses, 0, 1)
		check(fmt.Sprintf("VPC %d with a member in another group", i))
		m.Addresses = slices.Delete(m.Addresses, 0, 2)
		check(fmt.Sprintf("VPC %d with a member less", i))
		s := &l.vpc.Subnets[0]
		s.Remotes = append(s.Remotes, cloud.RemotePort{MAC: cloud.MAC{2, 1}, IP: parseAddr("10.0.0.201")})
		check(fmt.Sprintf("VPC %d with another port on another host", i))
		if len(s.Ports) > 0 {
			s.Ports[0].Secured = !s.Ports[0].Secured
			check(fmt.Sprintf("VPC %d with another port security", i))
		}
	}
}

// TestUpdateRunsFewPrograms counts the programs that one change runs and the writes that it makes, in a small VPC and
// in a large one.
func TestUpdateRunsFewPrograms(t *testing.T) {
	take := nettest.CountPrograms(t)
	f, err := New(testOptions)
	require.NoError(t, err)
	for _, size := range []struct{ ports, members int }{{100, 10}, {1000, 10_000}} {
		t.Run(fmt.Sprintf("%d ports and %d members", size.ports, size.members), func(t *testing.T) {
			ns, vpc := newNamespace(t, "big"), bigVPC(size.ports)
			members := &vpc.Members[0]
			for ip := parseAddr("10.0.64.0"); len(members.Addresses) < size.members; ip = ip.Next() {
				members.Addresses = append(members.Addresses, ip)
			}
			update := func() Result {
				t.Helper()
				r, err := f.Update(t.Context(), ns, vpc)
				require.NoError(t, err)
				return r
			}
			update() // reads the kernel's state
			require.Contains(t, take(), "iptables-nft-save")
			require.Equal(t, Result{}, update())
			require.Empty(t, take(), "without a change")

			members.Addresses = append(members.Addresses, parseAddr("10.0.200.1"))
			require.Equal(t, Result{Writes: 1}, update())
			require.Empty(t, take(), "a member joins")
			members.Addresses = members.Addresses[:len(members.Addresses)-1]
			require.Equal(t, Result{Writes: 1}, update())
			require.Empty(t, take(), "a member leaves")

			web := &vpc.Groups[1]
			web.Rules = append(web.Rules, cloud.Rule{Direction: cloud.Egress, Protocol: cloud.ProtocolTCP})
			require.Equal(t, Result{Writes: 1, Restores: 1}, update())
			require.Equal(t, []string{"iptables-nft-restore"}, take(), "a rule of a group of half of the ports")

			port := vpc.Subnets[0].Ports[0]
			port.ID, port.Device, port.MAC = "new", "new", cloud.MAC{2, 1}
			port.IP, port.IP6 = parseAddr("10.0.200.2"), netip.Addr{}
			vpc.Subnets[0].Ports = append(vpc.Subnets[0].Ports, port)
			require.Equal(t, Result{Writes: 2, Transactions: 1}, update())
			require.Equal(t, []string{"nft"}, take(), "a port with a known list of groups")

			r, err := f.Set(t.Context(), ns, vpc)
			require.NoError(t, err)
			require.Equal(t, Result{}, r, "the kernel's state is the wanted one")
			require.NotEmpty(t, take(), "Set reads the kernel's state")
		})
	}
}

// TestUpdateReadsBackAfterAnError changes the kernel's state by hand, so that the next Update fails. The Update after
// it must not rely on the remembered state, and repairs everything.
func TestUpdateReadsBackAfterAnError(t *testing.T) {
	l := newLab(t)
	l.add(t, 0, 5, "a")
	l.group("a", cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: "b"})
	l.members("b", parseAddr("10.0.0.6"))
	l.update(t)
	l.members("b", parseAddr("10.0.0.6"), parseAddr("10.0.0.7"))
	l.update(t)
	wanted := l.dump(t)

	l.members("b", parseAddr("10.0.0.6"))
	l.update(t)
	for _, command := range []string{
		"iptables-nft -P FORWARD ACCEPT", "iptables-nft -F", "nft add element bridge trivet open { p0-5 }",
		"ipset destroy " + groupSet("b", false),
	} {
		runIn(t, l.ns, "", strings.Fields(command)...)
	}
	require.Equal(t, Result{}, l.update(t), "without a change, nothing is read and nothing can fail")
	l.members("b", parseAddr("10.0.0.6"), parseAddr("10.0.0.7"))
	r, err := l.firewall.Update(t.Context(), l.ns, l.vpc)
	require.ErrorContains(t, err, "change the set")
	require.Equal(t, Result{}, r)
	_, err = l.firewall.Update(t.Context(), l.ns, l.vpc)
	require.NoError(t, err, "the state was not read after an error")
	require.Equal(t, wanted, l.dump(t), "the state was not repaired after an error")
}

// TestUpdateAfterBadInput checks that a VPC that cannot be applied changes nothing, and that the next one is applied.
func TestUpdateAfterBadInput(t *testing.T) {
	l := newLab(t)
	e := l.add(t, 0, 5, "a")
	l.group("a", allowAll(cloud.Ingress)...)
	l.update(t)
	before := l.dump(t)
	l.change(e, func(p *cloud.HostPort) { p.Device = "vx1" })
	_, err := l.firewall.Update(t.Context(), l.ns, l.vpc)
	require.ErrorContains(t, err, "trusted device")
	require.Equal(t, before, l.dump(t))
	l.change(e, func(p *cloud.HostPort) { p.Device = "p0-5" })
	require.Equal(t, Result{}, l.update(t))
}

// TestUpdateInANewNamespace makes the namespace of a VPC again. The new namespace gets all rules, because the
// remembered state is that of the old one.
func TestUpdateInANewNamespace(t *testing.T) {
	l := newLab(t)
	l.add(t, 0, 5, "a")
	l.group("a", allowAll(cloud.Ingress)...)
	l.update(t)
	wanted := l.dump(t)
	l.ns = newNamespace(t, "again")
	require.NotZero(t, l.update(t).Writes)
	require.Equal(t, wanted, l.dump(t))
	require.Equal(t, Result{}, l.update(t))
	l.firewall.Forget(l.vpc.ID)
	runIn(t, l.ns, "", "iptables-nft", "-F")
	require.NotZero(t, l.update(t).Writes, "a forgotten VPC is read")
}

// TestUpdateRevokes revokes the permission of a stream of datagrams in each way by an Update.
func TestUpdateRevokes(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%t", ipv6), func(t *testing.T) {
			t.Parallel()
			testRevokeUDP(t, 0, ipv6, (*lab).update)
		})
	}
}

// TestMayForbid lists changes after which tracked connections are compared with the rules, and changes after which this
// is not necessary.
func TestMayForbid(t *testing.T) {
	for _, c := range []struct {
		change  string
		forbids bool
		apply   func(*cloud.HostVPC)
	}{
		{"none", false, func(*cloud.HostVPC) {}},
		{"a further rule", false, func(v *cloud.HostVPC) { v.Groups[0].Rules = append(v.Groups[0].Rules, cloud.Rule{}) }},
		{"a rule of a further group", false, func(v *cloud.HostVPC) {
			v.Groups[0].Rules = append(v.Groups[0].Rules, cloud.Rule{Group: "other"})
			v.Members = append([]cloud.GroupMembers{{ID: "a", Addresses: []netip.Addr{parseAddr("10.0.0.9")}}}, v.Members...)
		}},
		{"an equal rule", false, func(v *cloud.HostVPC) {
			icmp := *v.Groups[0].Rules[0].ICMP
			v.Groups[0].Rules[0].ICMP = &icmp
		}},
		{"a rule less", true, func(v *cloud.HostVPC) { v.Groups[0].Rules = v.Groups[0].Rules[1:] }},
		{"another ICMP type", true, func(v *cloud.HostVPC) { v.Groups[0].Rules[0].ICMP.Type++ }},
		{"all ICMP types", true, func(v *cloud.HostVPC) { v.Groups[0].Rules[0].ICMP = nil }},
		{"a further member", false, func(v *cloud.HostVPC) {
			v.Members[0].Addresses = append(v.Members[0].Addresses, parseAddr("10.0.0.9"))
		}},
		{"a member less", true, func(v *cloud.HostVPC) { v.Members[0].Addresses = v.Members[0].Addresses[1:] }},
		{"a group without members", true, func(v *cloud.HostVPC) { v.Members = nil }},
		{"a group less", true, func(v *cloud.HostVPC) { v.Groups = nil }},
		{"a denied address", true, func(v *cloud.HostVPC) { v.Denied = []netip.Addr{parseAddr("192.0.2.1")} }},
		{"a port in another group", true, func(v *cloud.HostVPC) { v.Subnets[0].Ports[0].Groups = nil }},
		{"a port less", true, func(v *cloud.HostVPC) { v.Subnets[0].Ports = nil }},
	} {
		before, after := exampleVPC(), exampleVPC()
		c.apply(&after)
		require.Equal(t, c.forbids, mayForbid(&before, &after), c.change)
	}
}

// ignored are the fields of the input on which the packet filter does not depend.
var ignored = []string{
	"HostVPC.MTU", "HostVPC.NAT", "HostVPC.Gateways", "HostVPC.Floating", "HostVPC.Services",
	"HostSubnet.VNI", "HostSubnet.DHCP", "HostSubnet.DNS", "HostSubnet.Routes",
	"RemotePort.HostName", "RemotePort.Pairs", "RemotePort.VTEP",
	"HostVPC.Members", // memberEdits compares them
}

// TestEveryFieldIsCompared changes each field of the input, and requires that the change is noticed unless the field is
// in the list of ignored ones. It fails for a new field that the comparison does not know.
func TestEveryFieldIsCompared(t *testing.T) {
	example := func() *cloud.HostVPC {
		v := exampleVPC()
		v.Subnets[0].Remotes = []cloud.RemotePort{{}}
		v.Peerings = []cloud.HostPeering{{}}
		return &v
	}
	for name, part := range map[string]func(*cloud.HostVPC) any{
		"HostVPC":     func(v *cloud.HostVPC) any { return v },
		"HostSubnet":  func(v *cloud.HostVPC) any { return &v.Subnets[0] },
		"HostPort":    func(v *cloud.HostVPC) any { return &v.Subnets[0].Ports[0] },
		"RemotePort":  func(v *cloud.HostVPC) any { return &v.Subnets[0].Remotes[0] },
		"HostGroup":   func(v *cloud.HostVPC) any { return &v.Groups[0] },
		"Rule":        func(v *cloud.HostVPC) any { return &v.Groups[0].Rules[0] },
		"HostPeering": func(v *cloud.HostVPC) any { return &v.Peerings[0] },
	} {
		fields := reflect.TypeOf(part(example())).Elem()
		for i := range fields.NumField() {
			field := name + "." + fields.Field(i).Name
			v := example()
			value := reflect.ValueOf(part(v)).Elem().Field(i)
			changeValue(value)
			before := copyVPC(example())
			require.Equal(t, slices.Contains(ignored, field), equalRules(&before, v), field)
		}
	}
}

// changeValue gives a field another value.
func changeValue(v reflect.Value) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(parseAddr("192.0.2.99")))
		return
	case netip.Prefix:
		v.Set(reflect.ValueOf(parsePrefix("192.0.2.99/32")))
		return
	}
	switch v.Kind() {
	case reflect.Slice:
		v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Array:
		changeValue(v.Index(0))
	case reflect.Struct:
		changeValue(v.Field(0))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		v.SetUint(v.Uint() + 1)
	default:
		panic("a field of an unknown kind: " + v.String())
	}
}
