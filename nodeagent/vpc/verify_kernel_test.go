package vpc

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
)

// TestUpdatesRunFewPrograms counts the programs that an update runs. They must not depend on the number of ports.
func TestUpdatesRunFewPrograms(t *testing.T) {
	take := nettest.CountPrograms(t)
	for _, ports := range []int{2, 150} {
		t.Run(fmt.Sprintf("%d ports on another host", ports), func(t *testing.T) {
			l := newLab(t, 0)
			l.resync = time.Hour
			h := l.addHost(1)
			records := "vpc a\nsubnet s1 vpc=a net=1\ngroup g any-> tcp/80<-far\n" +
				"port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\n"
			for i := range ports {
				records += fmt.Sprintf("port r%d vpc=a subnet=s1 at=10.0.1.%d node=n2 groups=far\n", i, 10+i)
			}
			h.snapshot(1, records)
			h.endpoint("p5")
			// The counters of the packet filter are read once after the first application.
			require.Eventually(t, func() bool { return h.Status()[0].Counters != nil }, wait, time.Millisecond)
			require.Contains(t, take(), "iptables-nft-save")
			writes := h.Counts().Writes

			h.change(2, "port new vpc=a subnet=s1 at=10.0.1.200 node=n2 groups=far")
			require.Empty(t, take(), "a port joins a group on another host")
			require.EqualValues(t, 3, h.Counts().Writes-writes, "an FDB entry, a neighbour, and a change of the packet filter")
			h.change(3, "delete new")
			require.Empty(t, take(), "a port leaves a group on another host")
			h.change(4, "group g any-> tcp/80<-far tcp/81<-far")
			require.Equal(t, []string{"iptables-nft-restore"}, take(), "a rule is added")
			h.change(5, "group other any->")
			h.change(6, "vpc a")
			require.Empty(t, take(), "nothing changes")
		})
	}
}
