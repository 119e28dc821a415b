package balancer

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// space is a network namespace of a test.
type space struct {
	*testing.T
	name string
	ns   netns.NsHandle
}

func newSpace(t *testing.T) *space {
	testenv.NeedRoot(t)
	if missing := MissingFeatures(t.Context()); len(missing) > 0 {
		testenv.Skip(t, "this host lacks "+strings.Join(missing, "; "))
	}
	s := &space{T: t, name: fmt.Sprintf("tbal%d", os.Getpid())}
	_, err := nsthread.Create(s.name)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, netns.DeleteNamed(s.name)) })
	s.ns, err = netns.GetFromName(s.name)
	require.NoError(t, err)
	t.Cleanup(func() { s.ns.Close() })
	s.run("ip link set lo up")
	return s
}

// run runs a command in the namespace and returns its output.
func (s *space) run(command string) string {
	s.Helper()
	args := append([]string{"netns", "exec", s.name}, strings.Fields(command)...)
	out, err := exec.CommandContext(s.Context(), "ip", args...).CombinedOutput()
	require.NoError(s, err, "%s: %s", command, out)
	return string(out)
}

// set applies the services that lines describe (see TestRules), and returns the changes.
func (s *space) set(lines string) []string {
	s.Helper()
	r, err := Set(s.Context(), s.ns, parseVPC(s.T, lines))
	require.NoError(s, err)
	return r.Changes
}

// setWithoutPorts is set for a VPC without ports on this host.
func (s *space) setWithoutPorts(lines string) []string {
	s.Helper()
	vpc := parseVPC(s.T, lines)
	for i := range vpc.Subnets {
		vpc.Subnets[i].Ports = nil
	}
	r, err := Set(s.Context(), s.ns, vpc)
	require.NoError(s, err)
	return r.Changes
}

const twoServices = `10.0.1.50 ports=80:8080/tcp,53/udp backends=10.0.1.11*2,10.0.2.12,10.0.1.13!
10.0.1.51 ports=443/tcp affinity=client_ip backends=10.0.1.11,10.0.2.12`

// TestSet requires that Set writes nothing if the services did not change, repairs changes that were made by hand, and
// deletes everything of services that were removed.
func TestSet(t *testing.T) {
	s := newSpace(t)
	require.Empty(t, s.set(""), "a VPC without services has nothing")
	require.Equal(t, []string{
		"ip route add local 10.0.1.50 dev lo proto 190", "ip route add local 10.0.1.51 dev lo proto 190",
		"nft replace table bridge trivet-service", "nft replace table ip trivet-service",
	}, s.set(twoServices))
	require.Empty(t, s.set(twoServices))
	s.run("nft flush chain bridge trivet-service reflected")
	require.Equal(t, []string{"nft replace table bridge trivet-service"}, s.set(twoServices))
	before := s.run("nft -s list table ip trivet-service")

	s.run("ip route delete local 10.0.1.51 table local")
	require.Equal(t, []string{"ip route add local 10.0.1.51 dev lo proto 190"}, s.set(twoServices))
	for _, damage := range []string{"nft flush chain ip trivet-service refuse", "nft delete table ip trivet-service",
		"nft add chain ip trivet-service other", "nft add rule ip trivet-service refuse accept"} {
		s.run(damage)
		require.Equal(t, []string{"nft replace table ip trivet-service"}, s.set(twoServices), damage)
		require.Equal(t, before, s.run("nft -s list table ip trivet-service"), damage)
	}

	require.Equal(t, []string{"nft replace table ip trivet-service", "ip route delete local 10.0.1.50 dev lo proto 190"},
		s.set("10.0.1.51 ports=443/tcp"))
	require.Equal(t, []string{"nft delete table ip trivet-service", "ip route delete local 10.0.1.51 dev lo proto 190"},
		s.setWithoutPorts("")[1:])
	require.Empty(t, s.setWithoutPorts(""))
	require.Empty(t, s.run("nft list ruleset"))
	require.Empty(t, s.run("ip route show table local proto 190"))
}

// TestInterruptedRemoval requires that Set completes a removal that was interrupted after the rules were deleted.
func TestInterruptedRemoval(t *testing.T) {
	s := newSpace(t)
	s.set(twoServices)
	s.run("nft delete table ip trivet-service")
	require.Len(t, s.setWithoutPorts(""), 3)
	require.Empty(t, s.run("ip route show table local proto 190"))
}
