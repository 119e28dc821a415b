package firewall

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// bigVPC returns a VPC with the given number of local ports, in two lists of groups.
func bigVPC(ports int) cloud.HostVPC {
	vpc := exampleVPC()
	subnet := &vpc.Subnets[0]
	subnet.CIDR, subnet.Ports = parsePrefix("10.0.0.0/20"), nil
	ip, ip6 := parseAddr("10.0.1.0"), parseAddr("fd00::100")
	members := cloud.GroupMembers{ID: "example"}
	for i := range ports {
		port := cloud.HostPort{ID: cloud.PortID(fmt.Sprint(i)), Device: fmt.Sprintf("tap%d", i),
			MAC: cloud.MAC{2, 0, 0, 0, byte(i >> 8), byte(i)}, IP: ip, IP6: ip6, Secured: true}
		port.Groups = [][]cloud.SecurityGroupID{{"example"}, {"example", "web"}}[i%2]
		subnet.Ports = append(subnet.Ports, port)
		members.Addresses = append(members.Addresses, ip, ip6)
		ip, ip6 = ip.Next(), ip6.Next()
	}
	vpc.Groups = append(vpc.Groups, cloud.HostGroup{ID: "web", Rules: allowAll(cloud.Ingress)})
	vpc.Members = []cloud.GroupMembers{members}
	return vpc
}

// TestManyPorts counts the writes for a VPC with many local ports (TRIVET_FIREWALL_PORTS, default 200): programs are
// run once for each VPC and not for each port, and a small change has as many writes as in a small VPC.
func TestManyPorts(t *testing.T) {
	f, err := New(testOptions)
	require.NoError(t, err)
	many := 200
	if s := os.Getenv("TRIVET_FIREWALL_PORTS"); s != "" {
		many, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	for _, ports := range []int{10, many} {
		t.Run(fmt.Sprint(ports), func(t *testing.T) {
			ns, vpc := newNamespace(t, "big"), bigVPC(ports)
			set := func() Result {
				r, err := f.Set(t.Context(), ns, vpc)
				require.NoError(t, err)
				return r
			}
			first := set()
			require.Equal(t, 1, first.Transactions)
			require.Equal(t, 2, first.Restores, "one for each IP version")
			require.Equal(t, Result{}, set())
			for _, c := range []struct {
				name   string
				change func()
				want   Result
			}{
				{"a member joins", func() {
					m := &vpc.Members[0]
					m.Addresses = append(m.Addresses, parseAddr("10.0.200.1"))
				}, Result{Writes: 1}},
				{"a member leaves", func() {
					m := &vpc.Members[0]
					m.Addresses = m.Addresses[:len(m.Addresses)-1]
				}, Result{Writes: 1}},
				{"a port with a known list of groups", func() {
					port := vpc.Subnets[0].Ports[0]
					port.ID, port.Device, port.MAC = "new", "new", cloud.MAC{2, 1}
					port.IP, port.IP6 = parseAddr("10.0.200.2"), netip.Addr{}
					vpc.Subnets[0].Ports = append(vpc.Subnets[0].Ports, port)
				}, Result{Writes: 2, Transactions: 1}}, // the address in the set of the list
				{"a rule of a group of half of the ports", func() {
					g := &vpc.Groups[1]
					g.Rules = append(g.Rules, cloud.Rule{Direction: cloud.Egress, Protocol: cloud.ProtocolTCP})
				}, Result{Writes: 1, Restores: 1}},
				{"a port leaves", func() {
					vpc.Subnets[0].Ports = vpc.Subnets[0].Ports[:len(vpc.Subnets[0].Ports)-1]
				}, Result{Writes: 2, Transactions: 1}},
			} {
				c.change()
				require.Equal(t, c.want, set(), c.name)
				require.Equal(t, Result{}, set(), c.name)
			}
		})
	}
}

// TestManyMembers counts the voluntary context switches of the process while Firewall.Set reads the sets of a VPC with
// a large remote group. Their number must be far below one for each member.
func TestManyMembers(t *testing.T) {
	const count = 10_000
	f, err := New(testOptions)
	require.NoError(t, err)
	ns, vpc := newNamespace(t, "members"), bigVPC(2)
	members := cloud.GroupMembers{ID: "many"}
	for ip := parseAddr("10.0.64.0"); len(members.Addresses) < count; ip = ip.Next() {
		members.Addresses = append(members.Addresses, ip)
	}
	vpc.Members = append(vpc.Members, members)
	vpc.Groups[0].Rules = append(vpc.Groups[0].Rules, cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: "many"})
	_, err = f.Set(t.Context(), ns, vpc)
	require.NoError(t, err)

	var before, after unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &before))
	r, err := f.Set(t.Context(), ns, vpc)
	require.NoError(t, err)
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &after))
	require.Equal(t, Result{}, r)
	require.Less(t, after.Nvcsw-before.Nvcsw, int64(count/2))
}
