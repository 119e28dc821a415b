package machine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// TestMustStop checks when a source stops a guest whose memory it sends while the guest runs.
func TestMustStop(t *testing.T) {
	const mib = 1 << 20
	for name, c := range map[string]struct {
		m    memory
		stop bool
	}{
		"before the first pass": {m: memory{known: true, rate: 1000 * mib}},
		"in the first pass, how much the guest writes is not known": {
			m: memory{known: true, rate: 1000 * mib, now: qemu.Memory{Pass: 1, Remaining: mib}},
		},
		"nothing remains": {
			m: memory{known: true, now: qemu.Memory{Pass: 1}}, stop: true,
		},
		"the rest takes 50 ms": {
			m: memory{known: true, rate: 1000 * mib, now: qemu.Memory{Pass: 2, Remaining: 50 * mib}}, stop: true,
		},
		"the rest takes more than 50 ms": {
			m: memory{known: true, rate: 1000 * mib, now: qemu.Memory{Pass: 2, Remaining: 51 * mib}},
		},
		"the limit grows with time": {
			m: memory{known: true, rate: 1000 * mib, now: qemu.Memory{Pass: 9, Remaining: 100 * mib, Elapsed: 5 * time.Second}}, stop: true,
		},
		"the limit grows up to its maximum": {
			m: memory{known: true, rate: 1000 * mib, now: qemu.Memory{Pass: 9, Remaining: 301 * mib, Elapsed: time.Hour}},
		},
		"pages written during the pass count": {
			m: memory{known: true, rate: 1000 * mib, passFor: time.Second, now: qemu.Memory{Pass: 2, Remaining: mib, DirtyRate: 50 * mib}},
		},
		"few pages are written during the pass": {
			m: memory{known: true, rate: 1000 * mib, passFor: time.Second, now: qemu.Memory{Pass: 2, Remaining: mib, DirtyRate: 49 * mib}}, stop: true,
		},
		"the beginning of the pass is not known": {
			m: memory{rate: 1000 * mib, now: qemu.Memory{Pass: 2, Remaining: mib}},
		},
		"the rate is not known": {
			m: memory{known: true, now: qemu.Memory{Pass: 2, Remaining: mib}},
		},
	} {
		require.Equal(t, c.stop, c.m.mustStop(defaultMaxDowntime), name)
	}
}

// TestObserveMemory checks what an agent knows after several observations of a transfer.
func TestObserveMemory(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	var m memory
	m.observe(qemu.Memory{Pass: 1, Remaining: 900, Rate: 1000}, at(0))
	m.observe(qemu.Memory{Pass: 2, Remaining: 100, Rate: 500}, at(50))
	require.True(t, m.known)
	require.Equal(t, time.Duration(0), m.passFor)
	require.Equal(t, uint64(950), m.rate, "a pass with little to send does not show the rate of the link")
	m.observe(qemu.Memory{Pass: 2, Remaining: 10, Rate: 2000}, at(150))
	require.Equal(t, 100*time.Millisecond, m.passFor)
	require.Equal(t, uint64(2000), m.rate)

	var restarted memory
	restarted.observe(qemu.Memory{Pass: 5}, at(0))
	require.False(t, restarted.known)
	restarted.observe(qemu.Memory{Pass: 6}, at(50))
	require.True(t, restarted.known)
}

// TestMaxDowntime checks which setting limits the downtime.
func TestMaxDowntime(t *testing.T) {
	require.Equal(t, 300*time.Millisecond, maxDowntime(nil, Transfer{}))
	require.Equal(t, time.Second, maxDowntime(nil, Transfer{MaxDowntime: time.Second}))
	require.Equal(t, 2*time.Second, maxDowntime(&agentv1.AssignedMigration{MaxDowntimeMs: 2000}, Transfer{MaxDowntime: time.Second}))
	require.Equal(t, 10*time.Millisecond, downtimeLimit(time.Minute, 10*time.Millisecond))
}
