package vpc

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestCountersAreReadAgain requires that Status has the counters of the packet filter, that they are read at most once
// per resync, however often the VPC changes, and that Status keeps the last counters after an error.
func TestCountersAreReadAgain(t *testing.T) {
	f := newFixture(t)
	connections := func() uint64 {
		for _, s := range f.Status() {
			if s.Counters != nil {
				return s.Counters.Connections
			}
		}
		return 0
	}
	f.update(1, 1, true, "vpc a")
	require.Eventually(t, func() bool { return connections() > 2 }, wait, time.Millisecond)
	f.plane.set(func() { f.plane.failCounters = errors.New("no memory") })
	var failed uint64
	f.plane.set(func() { failed = f.plane.counted })
	require.Eventually(t, func() (more bool) {
		f.plane.set(func() { more = f.plane.counted > failed+1 })
		return more
	}, wait, time.Millisecond)
	require.LessOrEqual(t, connections(), failed)
	require.NotZero(t, connections())

	rare := newFixture(t)
	rare.o.resync = time.Hour
	rare.update(1, 1, true, "vpc a")
	for revision := range int64(20) {
		rare.update(1, revision+2, false, "vpc a")
		rare.until(revision + 2)
	}
	rare.Close()
	require.EqualValues(t, 1, rare.plane.counted)
}

// TestMeasure requires that the counters are those of the kernel: a connection that no rule permits is counted as
// dropped, and its packets are counted as sent by the port.
func TestMeasure(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	h.snapshot(1, `
		vpc a
		subnet s1 vpc=a net=1
		port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g gen=1
		port p6 vpc=a subnet=s1 at=10.0.1.6 node=n1 groups=g gen=1
		group g any->`)
	from := h.endpoint("p5")
	h.endpoint("p6")
	require.False(t, l.connects(from, "10.0.1.6", 80, time.Second))
	require.Eventually(t, func() bool {
		all := h.Status()
		return len(all) == 1 && all[0].Counters != nil && all[0].Counters.Drops.Group > 0 && all[0].Counters.ConnectionLimit > 0
	}, wait, 10*time.Millisecond)
	ports := h.PortCounters(t.Context())
	require.Len(t, ports, 2)
	require.Positive(t, ports["p5"].SentBytes)

	h.snapshot(2, "")
	require.Empty(t, h.PortCounters(t.Context()))
}
