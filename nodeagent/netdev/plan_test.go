package netdev

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPlan reads testdata/plan. Each "state" is applied to what the states and "damage" before it left, and prints the
// changes. The input of state has one line per subnet, port and remote port:
//
//	vpc mtu=1450 [cidr=10.0.0.0/16]
//	subnet 100 10.0.0.0/24 gateway=10.0.0.1 cidr6=fd00::/64
//	port ID device=tap1 mac=02:… ip=10.0.0.5 ip6=fd00::5 [unsecured] [pair] [mbps=8]
//	remote mac=02:… ip=10.0.0.6 vtep=192.0.2.2 [pair=10.0.0.99/32]
//	route 192.0.2.0/24 via=10.0.0.5, or peering, or, without both, to a blackhole
//
// With quiet, sysctls are not printed. The devices of ports exist from the state on that follows the first one with the
// port.
func TestPlan(t *testing.T) {
	datadriven.Walk(t, "testdata/plan", func(t *testing.T, path string) {
		have := newState()
		have.links[loopback] = link{kind: loopbackLink}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "state":
				vpc := parseVPC(t, d.Input)
				want, err := render(&vpc, underlay{vtep: netip.MustParseAddr("192.0.2.1"), port: 4789, device: 2, deviceName: "eth0", mtu: 1500})
				if err != nil {
					return fmt.Sprintf("error: %v\n", err)
				}
				changes, missing := plan(want, have)
				have = want.observed(missing)
				return printPlan(changes, missing, d.HasArg("quiet"))
			case "attach":
				for _, arg := range d.CmdArgs {
					have.links[arg.Key] = link{kind: portLink, mtu: 1500, flags: unknownMACsFlags}
				}
				return ""
			case "damage":
				damage(t, have, strings.Fields(d.Input))
				return ""
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

// observed returns the state that kernel.read returns after the changes of plan.
func (s *state) observed(missing []string) *state {
	all := append([]sysctl{}, s.settings...)
	for name, l := range s.links {
		all = append(all, l.settings...)
		l.settings, l.underlay = nil, ""
		s.links[name] = l
	}
	for _, one := range all {
		s.sysctls[one.path] = one.value
	}
	s.settings = nil
	for _, name := range missing {
		(&planner{have: s}).forget(name)
	}
	return s
}

func printPlan(changes []Change, missing []string, quiet bool) string {
	var out strings.Builder
	for _, c := range changes {
		if _, setting := c.(writeSetting); !setting || !quiet {
			fmt.Fprintln(&out, c)
		}
	}
	for _, name := range missing {
		fmt.Fprintln(&out, "missing:", name)
	}
	if out.Len() == 0 {
		return "no changes\n"
	}
	return out.String()
}

// damage changes what the kernel has: "delete DEVICE", "down DEVICE", or "learning DEVICE", which turns learning of a
// VXLAN device on.
func damage(t *testing.T, have *state, words []string) {
	t.Helper()
	name := words[1]
	l := have.links[name]
	switch words[0] {
	case "delete":
		(&planner{have: have}).forget(name)
		return
	case "down":
		l.up = false
	case "learning":
		l.vxlan.learning = true
	default:
		t.Fatalf("unknown damage %s", words[0])
	}
	have.links[name] = l
}

func parseVPC(t *testing.T, input string) cloud.HostVPC {
	t.Helper()
	vpc := cloud.HostVPC{ID: "a", MTU: 1450}
	for line := range strings.Lines(input) {
		words := strings.Fields(line)
		last := len(vpc.Subnets) - 1
		switch words[0] {
		case "vpc":
			_, err := fmt.Sscanf(words[1], "mtu=%d", &vpc.MTU)
			require.NoError(t, err)
			if text := parseWords(t, words[2:]).text["cidr"]; text != "" {
				vpc.CIDR = netip.MustParsePrefix(text)
			}
		case "subnet":
			s := cloud.HostSubnet{ID: cloud.SubnetID(words[1]), CIDR: netip.MustParsePrefix(words[2])}
			_, err := fmt.Sscan(words[1], &s.VNI)
			require.NoError(t, err)
			options := parseWords(t, words[3:])
			s.Gateway = options.addr("gateway")
			if text := options.text["cidr6"]; text != "" {
				s.CIDR6 = netip.MustParsePrefix(text)
			}
			vpc.Subnets = append(vpc.Subnets, s)
		case "port":
			options := parseWords(t, words[2:])
			p := cloud.HostPort{
				ID: cloud.PortID(words[1]), Device: options.text["device"], MAC: options.mac(), IP: options.addr("ip"), IP6: options.addr("ip6"),
				Secured: options.text["unsecured"] == "",
			}
			if options.text["mbps"] != "" {
				_, err := fmt.Sscan(options.text["mbps"], &p.Mbps)
				require.NoError(t, err)
			}
			if options.text["pair"] != "" {
				p.Pairs = []cloud.AddressPair{{CIDR: netip.MustParsePrefix("10.0.0.99/32")}}
			}
			vpc.Subnets[last].Ports = append(vpc.Subnets[last].Ports, p)
		case "remote":
			options := parseWords(t, words[1:])
			r := cloud.RemotePort{
				MAC: options.mac(), IP: options.addr("ip"), IP6: options.addr("ip6"), VTEP: options.addr("vtep"),
			}
			if text := options.text["pair"]; text != "" {
				r.Pairs = []cloud.AddressPair{{CIDR: netip.MustParsePrefix(text)}}
			}
			vpc.Subnets[last].Remotes = append(vpc.Subnets[last].Remotes, r)
		case "route":
			r := cloud.HostRoute{Destination: netip.MustParsePrefix(words[1]), Target: cloud.RouteBlackhole}
			options := parseWords(t, words[2:])
			if r.Via = options.addr("via"); r.Via.IsValid() {
				r.Target = cloud.RoutePort
			} else if options.text["peering"] != "" {
				r.Target = cloud.RoutePeering
			}
			vpc.Subnets[last].Routes = append(vpc.Subnets[last].Routes, r)
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	return vpc
}

// words are the options of a line: name=value, or a name, whose value then is "on".
type words struct {
	t    *testing.T
	text map[string]string
}

func parseWords(t *testing.T, list []string) words {
	w := words{t, map[string]string{}}
	for _, word := range list {
		name, value, ok := strings.Cut(word, "=")
		if !ok {
			value = "on"
		}
		w.text[name] = value
	}
	return w
}

func (w words) addr(name string) netip.Addr {
	if w.text[name] == "" {
		return netip.Addr{}
	}
	return netip.MustParseAddr(w.text[name])
}

func (w words) mac() (mac cloud.MAC) {
	_, err := fmt.Sscanf(w.text["mac"], "%x:%x:%x:%x:%x:%x", &mac[0], &mac[1], &mac[2], &mac[3], &mac[4], &mac[5])
	require.NoError(w.t, err)
	return mac
}
