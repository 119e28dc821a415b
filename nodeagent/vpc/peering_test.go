package vpc

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// peered are the records of two peered VPCs of one project, each with a port on either host. The group web permits port
// 80 from ports of the group web in both VPCs.
const peered = `
	vpc a n=1
	vpc b n=2
	subnet s1 vpc=a n=1 net=1
	subnet s2 vpc=b n=2 net=1 vni=201
	port p5 vpc=a subnet=s1 at=10.1.1.5 node=n1 groups=web gen=1
	port p6 vpc=b subnet=s2 at=10.2.1.6 node=n2 groups=web gen=1
	port p7 vpc=b subnet=s2 at=10.2.1.7 node=n1 groups=web gen=1
	port p8 vpc=a subnet=s1 at=10.1.1.8 node=n1 groups=other gen=1
	group web any-> tcp/80<-web
	group other any->
	peering ab of=a,b
	table r1 vpc=a subnets=s1 10.2.0.0/16=peering:ab
	table r2 vpc=b subnets=s2 10.1.0.0/16=peering:ab
`

// TestPeering follows a peering on two hosts, one of which has ports of one VPC only: traffic with stateful groups and
// group references, a restart of the agent, a change by hand, the end of the peering, and its return.
func TestPeering(t *testing.T) {
	l := newLab(t, 2)
	one, two := l.hosts[0], l.hosts[1]
	for _, h := range l.hosts {
		h.snapshot(1, peered)
	}
	client, near, far, other := one.endpoint("p5"), one.endpoint("p7"), two.endpoint("p6"), one.endpoint("p8")
	l.listen(near, 80)
	l.listen(far, 80)
	reaches := func(from, to string) {
		t.Helper()
		require.Eventually(t, func() bool { return l.connects(from, to, 80, 5*time.Second) }, wait, time.Millisecond)
	}
	reaches(client, "10.2.1.6")
	reaches(client, "10.2.1.7")
	require.False(t, l.connects(other, "10.2.1.6", 80, time.Second), "a port without the group reached the peer")

	t.Log("a restarted agent writes nothing")
	open := l.dial(client, "10.2.1.6:80")
	requireEcho(t, open)
	one.stop()
	requireEcho(t, open)
	one.start()
	one.snapshot(2, peered)
	require.Zero(t, one.Counts().Writes, "%s", one.log)
	requireEcho(t, open)

	t.Log("a device that was deleted is made again, with the routes of both VPCs")
	device := cloud.PeeringID("ab").Device()
	l.ip(one.vpcName("b"), "link delete %s", device)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Contains(c, l.ip(one.vpcName("a"), "route show table all"), device)
		require.Contains(c, l.ip(one.vpcName("b"), "route show table all"), device)
	}, wait, 50*time.Millisecond)
	require.Eventually(t, func() bool { return one.Counts().Repairs > 0 }, wait, 10*time.Millisecond)
	reaches(client, "10.2.1.6")

	t.Log("the end of the peering ends connections, and removes a VPC that the host has for it only")
	requireEcho(t, open)
	end := "delete ab\ntable r1 vpc=a subnets=s1\ntable r2 vpc=b subnets=s2"
	one.change(3, end)
	two.change(3, end+"\ndelete a")
	require.Error(t, echo(open, 2*time.Second))
	require.False(t, l.connects(client, "10.2.1.7", 80, time.Second))
	require.NoFileExists(t, l.path(two.vpcName("a")))
	for _, vpc := range []string{"a", "b"} {
		require.NotContains(t, l.ip(one.vpcName(vpc), "-br link"), cloud.PeeringDevices)
	}

	t.Log("the peering returns")
	one.change(4, strings.TrimSpace(peered))
	two.change(4, strings.TrimSpace(peered))
	reaches(client, "10.2.1.6")
}
