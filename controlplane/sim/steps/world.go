// Package steps is ring (a) of the simulation: three members with the production code of consensus, mvcc and store, the
// network between them, their disks and their clients. One goroutine drives everything, and all random numbers come
// from the seed, so that a run can be repeated exactly. The package must not import services of the platform. See
// package sim for both rings.
//
// # Faults
//
// Members crash: one, all, or one in the middle of a write to disk; with or without losing unsynced data. Members stop
// properly, freeze, start with an empty disk, have slow disks and clocks that jump, and stay down for long. Packets are
// lost, repeated, delayed and reordered. The network is partitioned, also in one direction. Leadership is transferred,
// history is compacted and scrubbed. Each seed has its own fault schedule (type faultSchedule) with only some of these
// faults. At the end there are no faults, and the members must converge.
//
// # Checked guarantees
//
//   - Every member applies the same entry at an index, with the same result, also when it applies the entry again after
//     a restart. The states of all members at one index are equal.
//   - An acknowledged operation is in the log. An operation is applied at most once, however often it was proposed, and
//     not at all after its client got an error that excludes it.
//   - Reads and writes are linearizable. Each has the revision that it read or created. Its data equal the history at
//     that revision, and the revision is not older than any that was returned to a client before the call began.
//   - Watches deliver every revision completely, once and in order, across crashes, restores and compactions.
//   - After every commit the invariants of the tables hold: the sum of accounts, names claimed once, lists that only
//     grow, slots not overbooked, one order per idempotency key. Revisions and stored times never decrease.
//   - No term has two leaders, and no member votes twice in a term. A member with an empty disk sends no raft messages
//     and is refused.
//   - The state on a disk after a crash can be opened, and is not older than what was flushed.
//
// # Implementation
//
// A client is a coroutine (iter.Pull) that calls package store. Where the store would wait for other members, its
// Proposer yields to the type world until the result is there. Each operation also writes a row of the table ops
// without reading it first, so that applying it twice is detected. A crash in the middle of work uses a copy of the
// disk that a hook of the file system takes before some sync or rename. Actions of the member after the copy are
// ignored until the member is ended.
package steps

import (
	cryptorand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/sim"
)

// members is the number of members of the cluster.
const members = 3

// ids lists the IDs of the members.
var ids = []uint64{1, 2, 3}

// world is the state of one run of ring (a). One goroutine drives it.
type world struct {
	seed    uint64
	rng     *rand.Rand
	chance  *rand.ChaCha8 // random source of data-directory IDs, read requests and raft's election timeouts
	step    int
	faults  faultSchedule
	trio    [members]*member
	network network
	clients []*client
	check   *check
	trace   *sim.Trace
	counts  map[string]int
	wiped   map[*member]bool // members whose disk was wiped since all members last had their own disks
	healing bool             // no more faults are injected
	broken  string           // text of the first violation; empty: none
}

// Outcome holds the counts and the trace of the events of a run.
type Outcome struct {
	// Counts maps the name of each kind of event to the number of such events.
	Counts map[string]int
	Trace  string
}

// Schedule runs ring (a) with one seed in the calling goroutine. Its error is a *sim.Violation. While it runs, it
// replaces crypto/rand.Reader, from which raft draws its election timeouts. So nothing else in the process may use
// crypto/rand, and only one Schedule may run at a time.
func Schedule(seed uint64) (out Outcome, err error) {
	w := &world{seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), chance: rand.NewChaCha8(seedOf(seed, 2)), counts: map[string]int{}, wiped: map[*member]bool{}}
	real := cryptorand.Reader
	cryptorand.Reader = w.chance
	defer func() { cryptorand.Reader = real }()
	defer func() {
		if r := recover(); r != nil {
			w.fail("panic: %v\n%s", r, debug.Stack())
		}
		out = Outcome{Counts: w.counts, Trace: w.trace.String()}
		if w.broken != "" {
			err = &sim.Violation{Ring: "a", Seed: seed, Says: w.broken, Trace: w.trace}
		}
	}()
	w.trace = sim.NewTrace(func() string { return fmt.Sprintf("%4d", w.step) })
	w.faults = newFaultSchedule(w.rng)
	w.trace.Add("faults %+v", w.faults)
	w.network.w = w
	w.check = newCheck(w)
	for i, id := range ids {
		w.trio[i] = &member{w: w, id: id, disk: vfs.NewCrashableMem(), seen: 2}
	}
	for i := range 5 {
		w.clients = append(w.clients, newClient(w, i))
	}
	defer w.close()
	w.run()
	return out, nil
}

// seedOf returns the seed of a random source in a run with the given seed. The parameter source is the number of the
// random source; each source has a number of its own.
func seedOf(seed uint64, source byte) (b [32]byte) {
	b[0] = source
	for i := range 8 {
		b[i+1] = byte(seed >> (8 * i))
	}
	return b
}

func (w *world) close() {
	for _, c := range w.clients {
		c.stop()
	}
	for _, m := range w.trio {
		m.end("the end")
	}
}

// now returns the simulated true time: 10 ms for each step. The clocks of members differ from it by member.skew.
func (w *world) now() time.Time { return time.UnixMilli(1_000_000_000 + int64(w.step)*10) }

func (w *world) member(id uint64) *member { return w.trio[id-1] }

func (w *world) count(what string) { w.counts[what]++ }

// fail stores the first violation of the run, which ends the run. It ignores later ones.
func (w *world) fail(format string, args ...any) {
	if w.broken == "" {
		w.broken = fmt.Sprintf(format, args...)
		w.trace.Add("BROKEN: %s", w.broken)
	}
}

// run runs the simulation: steps with faults, then steps without faults until the members have converged, then the
// final check.
func (w *world) run() {
	for _, m := range w.trio {
		m.start(&crashTrigger{})
	}
	for ; w.step < w.faults.steps && w.broken == ""; w.step++ {
		if !w.faults.calm || len(w.check.history.ops) > 0 {
			w.injectFaults()
		}
		w.once()
	}
	w.heal()
	const patience = 1500
	for end := w.step + patience; w.broken == ""; w.step++ {
		if w.settled() {
			break
		}
		if w.step == end {
			w.fail("%d steps after the last fault the members still do not agree: %s", patience, w.state())
		}
		w.once()
	}
	if w.broken == "" {
		w.check.final()
	}
	for name, n := range map[string]int{"schedules": 1, "steps": w.step} {
		w.counts[name] += n
	}
}

// once runs one step of the simulation: restarts that are due, clock ticks, deliveries of packets, and the work of
// members and clients.
func (w *world) once() {
	w.restart()
	for _, m := range w.shuffled() {
		// In each step a member's clock advances with probability 3/5, so that clocks run at different speeds.
		if w.rng.IntN(5) < 3 {
			m.tick()
		}
	}
	w.network.deliver()
	for _, m := range w.shuffled() {
		m.work()
	}
	for _, c := range w.clients {
		if w.broken == "" {
			c.advance()
		}
	}
	for _, m := range w.shuffled() {
		m.work()
	}
}

func (w *world) shuffled() [members]*member {
	order := w.trio
	w.rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// restart starts the stopped members whose field backAt is the current step or an earlier one.
func (w *world) restart() {
	for _, m := range w.trio {
		if m.up || w.step < m.backAt || w.broken != "" {
			continue
		}
		trip := &crashTrigger{}
		if w.faults.torn > 0 && !w.healing && w.rng.IntN(4) == 0 {
			trip.arm(1+w.rng.IntN(12), w.rng.IntN(2) == 0)
		}
		m.start(trip)
	}
}

// settled reports whether all clients are done and all members have applied the same log to its end.
func (w *world) settled() bool {
	for _, c := range w.clients {
		if !c.done {
			return false
		}
	}
	var first []consensus.GroupStatus
	for _, m := range w.trio {
		if !m.up || !m.host.Idle() {
			return false
		}
		groups := m.host.Status().Groups
		if first == nil {
			first = groups
		}
		for i, g := range groups {
			if g.Leader == 0 || g.Applied == 0 || g.Applied != g.Last || g.Applied != first[i].Applied {
				return false
			}
		}
	}
	return true
}

func (w *world) state() (s string) {
	for _, m := range w.trio {
		if m.up {
			s += fmt.Sprintf("\n%d: %+v", m.id, m.host.Status())
		} else {
			s += fmt.Sprintf("\n%d: down", m.id)
		}
	}
	for _, c := range w.clients {
		s += fmt.Sprintf("\nclient %d: done %v, %s", c.id, c.done, c.doing)
	}
	return s
}

func itoa(n int) string { return strconv.Itoa(n) }
