package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// cutOff drops all packets between a host and the control plane until the host's lease has ended, while ports and
// rules of its VPC change. The guests of the host keep their traffic with each other and with a guest on another host.
// After the host has reached the control plane again, the changes take effect there. Traffic that was permitted all the
// time loses no packet.
func (c *networkCloud) cutOff(r *rawVPC, d *machine) {
	t, ctx := c.t, c.context(2*time.Minute)
	guest, near, far := r.attacker, r.near, r.far // guest and near are on the host
	g, err := c.networks.CreateSecurityGroup(ctx, &networkv1.CreateSecurityGroupRequest{
		Name: "near", Rules: []*networkv1.SecurityGroupRule{ingress("icmp", 0), ingress("tcp", 80)},
	})
	require.NoError(t, err)
	near.update(&networkv1.UpdatePortRequest{SecurityGroups: &networkv1.GroupIds{Ids: []string{g.GetId()}}})
	page := func(n *nic) string { return fmt.Sprintf("timeout 5 nc -w 1 %v 80 </dev/null", n.ip) }
	guest.eventually("the page of the other guest is reachable", page(near))
	var pings []*continuousPing
	for _, pair := range [][2]*nic{{guest, near}, {guest, far}, {far, near}} {
		// Forged ARP entries of the test spoof may still be in the guests' neighbour tables.
		pair[0].eventually("the guests reach each other", "ping -c 1 -W 1 "+pair[1].ip.String())
		pings = append(pings, pair[0].startPing(pair[1]))
	}

	host := c.hosts[guest.host]
	require.NoError(t, c.lease(ctx, host, func(seconds float64) bool { return seconds > 0 }))
	heal := c.cutControlPlane(guest.host)
	require.NoError(t, c.lease(ctx, host, func(seconds float64) bool { return seconds == 0 }))
	late := c.plug(d, "raw", r.subnet, r.group) // a port that the host does not know
	for _, rule := range g.GetRules() {
		if rule.GetProtocol() == "tcp" {
			_, err := c.networks.RemoveSecurityGroupRule(ctx, &networkv1.RemoveSecurityGroupRuleRequest{
				SecurityGroupId: g.GetId(), RuleId: rule.GetId(),
			})
			require.NoError(t, err)
		}
	}
	guest.run(page(near))
	guest.run("ping -c 2 -W 2 " + far.ip.String())
	late.run("ping -c 2 -W 2 " + far.ip.String())

	heal()
	guest.eventually("the host has the new port", "ping -c 1 -W 1 "+late.ip.String())
	guest.eventually("the host has the new rules", "! "+page(near))
	late.run("ping -c 2 -W 2 " + near.ip.String())
	require.NoError(t, c.lease(ctx, host, func(seconds float64) bool { return seconds > 0 }))
	for _, p := range pings {
		p.stop()
	}
}

// lease waits until want returns true for the remaining time of a host's lease, in seconds, which the host's agent
// reports as a metric.
func (c *networkCloud) lease(ctx context.Context, host *lab.Agent, want func(seconds float64) bool) error {
	return lab.Until(ctx, "the lease of "+host.Name+" has changed", func(ctx context.Context) error {
		seconds, ok, err := lab.Metric(ctx, host.Metrics, "trivet_agent_lease_seconds")
		switch {
		case err != nil:
			return err
		case !ok:
			return errors.New("the agent does not report its lease")
		case !want(seconds):
			return fmt.Errorf("it is %v s", seconds)
		}
		return nil
	})
}

// cutControlPlane drops the packets between a host's agent and the members, without an error to either side. The
// returned function removes the rules that drop them, and may be called more than once.
func (c *networkCloud) cutControlPlane(host int) (heal func()) {
	t := c.t
	change := func(action string) {
		for _, port := range []string{"--dport", "--sport"} {
			out, err := exec.Command("ip", "netns", "exec", fmt.Sprintf("m%d", host+1),
				"iptables", "-w", action, "OUTPUT", "-o", "lo", "-p", "tcp", port, "7443", "-j", "DROP").CombinedOutput()
			require.NoError(t, err, "%s", out)
		}
	}
	cut := true
	change("-I")
	heal = func() {
		if cut {
			cut = false
			change("-D")
		}
	}
	t.Cleanup(heal)
	return heal
}

// continuousPing is a running ping in a guest, with ten requests a second.
type continuousPing struct {
	from, to *nic
	file     string // of the guest, with the output
}

// startPing starts a ping from the NIC's guest to the address of another NIC.
func (n *nic) startPing(to *nic) *continuousPing {
	p := &continuousPing{from: n, to: to, file: "/tmp/ping-" + to.ip.String()}
	n.run(fmt.Sprintf("ping -q -i 0.1 %v >%s 2>&1 </dev/null &\necho $! >%s.pid", to.ip, p.file, p.file))
	return p
}

var pingSummary = regexp.MustCompile(`(\d+) packets transmitted, (\d+) packets received`)

// stop ends the ping and requires that each request has got a reply. The reply to the last one may be missing,
// because the ping did not wait for it.
func (p *continuousPing) stop() {
	t := p.from.c.t
	wait := "for i in $(seq 50); do grep received %s && break; sleep 0.1; done"
	out := p.from.run(fmt.Sprintf("kill -INT $(cat %s.pid)\n"+wait, p.file, p.file))
	match := pingSummary.FindStringSubmatch(out)
	require.NotNil(t, match, out)
	sent, err := strconv.Atoi(match[1])
	require.NoError(t, err)
	received, err := strconv.Atoi(match[2])
	require.NoError(t, err)
	t.Logf("ping from %s to %s: %s", p.from.vm.GetName(), p.to.vm.GetName(), out)
	require.Greater(t, sent, 100)
	require.GreaterOrEqual(t, received, sent-1, "packets were lost")
}
