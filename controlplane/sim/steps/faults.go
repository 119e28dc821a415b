package steps

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// faultSchedule says which faults a run has, and how often. For the faults without a comment, n means one fault in n
// steps on average, and 0 none. quake is a crash of all members, torn a crash during a write to disk, and faster a
// burst of clock ticks. Few runs have all faults, because one fault may hide the effects of another.
type faultSchedule struct {
	steps       int
	loss, twice int  // percent of packets that are lost or repeated
	late        int  // maximum delay of a packet in steps
	stray       int  // one in so many packets takes up to 80 steps longer; 0: none
	calm        bool // no faults until the accounts are created
	second      bool // whether the members also run the second raft group
	forward     bool // GroupOptions.Forward of both groups

	crash, quake, torn, stop, wipe   int
	cut, oneWay, slow, freeze, jump  int
	transfer, compact, scrub, faster int

	away   int   // maximum number of steps that a crashed member is down
	recent int64 // mvcc.Options.RecentBytes
	limits consensus.Limits
}

func newFaultSchedule(rng *rand.Rand) faultSchedule {
	maybe := func(often int) int {
		if rng.IntN(2) == 0 {
			return 0
		}
		return often/2 + rng.IntN(often)
	}
	w := faultSchedule{
		steps: 300 + rng.IntN(150), late: rng.IntN(4), stray: maybe(100), calm: rng.IntN(4) > 0, second: rng.IntN(2) == 0, forward: rng.IntN(2) == 0,
		crash: maybe(100), quake: maybe(200), torn: maybe(100), stop: maybe(200), wipe: maybe(250),
		cut: maybe(120), oneWay: maybe(120), slow: maybe(80), freeze: maybe(150), jump: maybe(60),
		transfer: maybe(60), compact: maybe(40), scrub: maybe(15), faster: maybe(20),
		away: 20 + rng.IntN(100), recent: 1 << (9 + rng.IntN(8)),
	}
	if rng.IntN(3) > 0 {
		w.loss = rng.IntN(15)
	}
	if rng.IntN(3) > 0 {
		w.twice = rng.IntN(10)
	}
	w.limits = consensus.Limits{
		TailEntries: 4 << rng.IntN(6), MessageBytes: 200 << rng.IntN(6), CacheBytes: 1 << (8 + rng.IntN(6)),
		ProposalTicks: 20, ReadTicks: 20, InflightMessages: 1 << rng.IntN(6),
	}
	return w
}

// injectFaults injects the faults of one step, and ends all partitions when their time is over.
func (w *world) injectFaults() {
	f := w.faults
	happens := func(often int) bool { return often > 0 && w.rng.IntN(often) == 0 }
	m := w.trio[w.rng.IntN(members)]
	all := w.rng.IntN(2) == 0
	for {
		o := w.trio[w.rng.IntN(members)]
		if o == m {
			continue
		}
		if happens(f.cut) {
			w.cut("from all", m.id, 0)
		}
		if happens(f.oneWay) {
			w.cut("one way", m.id, o.id)
		}
		break
	}
	if w.step >= w.network.healAt {
		w.healNetwork()
	}
	if happens(f.crash) && m.up {
		w.count("crashes")
		m.crash(all)
		m.backAt = w.step + 1 + w.rng.IntN(f.away)
	}
	if happens(f.quake) {
		w.count("crashes of all members")
		for _, m := range w.trio {
			if m.up {
				m.crash(all)
			}
			m.backAt = w.step + 1 + w.rng.IntN(20)
		}
	}
	if happens(f.torn) && m.up {
		m.trip.arm(1+w.rng.IntN(8), all)
	}
	if happens(f.stop) && m.up {
		w.count("orderly restarts")
		m.stop()
		m.backAt = w.step + 1 + w.rng.IntN(10)
	}
	if happens(f.wipe) && m.up && m.aside == nil && m.host.Status().Vouched && w.mayWipe(m) {
		w.count("disks wiped")
		m.wipe()
		m.backAt = w.step + 1
	}
	if happens(f.slow) {
		w.count("slow disks")
		m.slowUntil = w.step + w.rng.IntN(60)
		w.trace.Add("%d has a slow disk until %d", m.id, m.slowUntil)
	}
	if happens(f.freeze) {
		w.count("frozen members")
		m.frozeUntil = w.step + w.rng.IntN(60)
		w.trace.Add("%d is frozen until %d", m.id, m.frozeUntil)
	}
	if happens(f.jump) {
		w.count("clock jumps")
		m.skew = time.Duration(w.rng.IntN(7_200_000)-3_600_000) * time.Millisecond
		w.trace.Add("%d believes it is %d", m.id, m.clock().UnixMilli())
	}
	if happens(f.faster) {
		for range w.rng.IntN(8) {
			m.tick()
		}
	}
	if happens(f.transfer) && m.up {
		to := uint64(w.rng.IntN(members + 1))
		w.trace.Add("%d is asked to let %d lead", m.id, to)
		m.group.TransferLeader(to, func(err error) {
			if err == nil && to != m.id {
				w.count("leaders transferred")
			}
		})
	}
	if happens(f.scrub) && m.up {
		done, err := m.engine.Scrub(context.Background(), 1+w.rng.IntN(30))
		w.trace.Add("%d scrubs: %v %v", m.id, done, err)
		w.count("scrubs")
	}
}

// mayWipe reports whether the disk of m may be wiped. If so, it adds m to w.wiped. At least one member must keep its
// disk until the wiped members have theirs back: if all members were wiped, they would rightly form a new cluster.
func (w *world) mayWipe(m *member) bool {
	if w.trio[0].aside == nil && w.trio[1].aside == nil && w.trio[2].aside == nil {
		clear(w.wiped)
	}
	w.wiped[m] = true
	if len(w.wiped) == members {
		delete(w.wiped, m)
		return false
	}
	return true
}

// cut drops packets until the step network.healAt, which it sets to 10 to 69 steps from now. If the parameter to is 0,
// all packets that the member from sends or receives are dropped. Otherwise only those are dropped that the member from
// sends to the member to.
func (w *world) cut(how string, from, to uint64) {
	w.count("network cut " + how)
	w.network.healAt = w.step + 10 + w.rng.IntN(60)
	w.trace.Add("network cut %s: %d %d until %d", how, from, to, w.network.healAt)
	if to != 0 {
		w.network.cut[from][to] = true
		return
	}
	for _, id := range ids {
		w.network.cut[from][id], w.network.cut[id][from] = true, true
	}
}

func (w *world) healNetwork() { w.network.cut = [members + 1][members + 1]bool{} }

// heal ends all faults: it repairs the network, gives wiped members their disks back, and lets stopped members start.
// It makes the clients do their last read.
func (w *world) heal() {
	w.trace.Add("peace")
	w.healing = true
	w.healNetwork()
	w.faults.loss, w.faults.twice, w.faults.stray = 0, 0, 0
	for _, m := range w.trio {
		m.slowUntil, m.frozeUntil, m.backAt = 0, 0, 0
		if m.aside != nil {
			m.end("gets the right disk")
			m.unwipe()
		}
		if m.up {
			m.trip.arm(0, false)
		}
	}
	for _, c := range w.clients {
		c.last = true
	}
}
