package machine

import (
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

const (
	// defaultMaxDowntime is the maximum time for which the rest of the memory is sent while the guest is stopped.
	defaultMaxDowntime = 300 * time.Millisecond
	// firstDowntime is the limit at the beginning of a transfer. It grows by firstDowntime every downtimeStep, up to the
	// maximum. With the default maximum, this takes 25 seconds.
	firstDowntime = 50 * time.Millisecond
	downtimeStep  = 5 * time.Second
	// rateDecay is the factor by which memory.rate shrinks at each observation with a smaller rate.
	rateDecay = 0.95
)

// memory is the progress of a source that sends the guest's memory while the guest runs. The zero value is the state
// before the first observation.
type memory struct {
	now qemu.Memory
	// passFor is the time since the present pass was first observed. known is false if the agent has not observed the
	// beginning of the pass.
	passFor time.Duration
	known   bool
	passAt  time.Time
	// rate is the number of bytes per second that QEMU can send: the greatest observed rate, less 5 % for each later
	// observation. The last interval alone is not enough, because QEMU sends less when little is left to send.
	rate uint64
}

// observe adds an observation.
func (m *memory) observe(q qemu.Memory, now time.Time) {
	m.rate = max(q.Rate, uint64(float64(m.rate)*rateDecay))
	switch {
	case m.passAt.IsZero():
		m.passAt, m.known = now, q.Pass <= 1
	case q.Pass != m.now.Pass:
		m.passAt, m.known = now, true
	}
	m.now, m.passFor = q, now.Sub(m.passAt)
}

// mustStop reports whether the source must stop the guest now, so that QEMU can send the rest of the memory. The rest is
// what remains of the present pass, and what the guest has written since the pass began. mustStop returns true if QEMU
// can send the rest within the present downtime limit (see downtimeLimit).
//
// In the first pass, the rate at which the guest writes is not known yet. mustStop then returns false as long as
// anything remains. It also returns false if the agent has not observed the beginning of the pass.
func (m memory) mustStop(maximum time.Duration) bool {
	q := m.now
	switch {
	case q.Pass == 0 || q.Pass == 1 && q.Remaining > 0 || !m.known:
		return false
	case q.Remaining == 0:
		return true
	}
	rest := float64(q.Remaining) + float64(q.DirtyRate)*m.passFor.Seconds()
	return rest <= float64(m.rate)*downtimeLimit(q.Elapsed, maximum).Seconds()
}

// downtimeLimit returns the time for which the rest of the memory may be sent while the guest is stopped, if the transfer
// began elapsed ago. The limit grows in steps, so that a guest that writes little is stopped only for a short time.
// QEMU slows a guest that writes too much for the maximum (auto-converge). If that is not enough, the migration is
// cancelled at its deadline.
func downtimeLimit(elapsed, maximum time.Duration) time.Duration {
	return min(maximum, firstDowntime*(1+elapsed/downtimeStep))
}

// maxDowntime returns the maximum of downtimeLimit: that of the assigned migration, or the host's setting.
func maxDowntime(m *agentv1.AssignedMigration, t Transfer) time.Duration {
	switch {
	case m.GetMaxDowntimeMs() > 0:
		return time.Duration(m.GetMaxDowntimeMs()) * time.Millisecond
	case t.MaxDowntime > 0:
		return t.MaxDowntime
	}
	return defaultMaxDowntime
}
