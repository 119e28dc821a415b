// Package steps is ring (a) of the simulation: three members (consensus, mvcc and store as they are), the network between
// them, their disks and their clients, all driven by one goroutine. A seed decides everything, so a run replays byte for
// byte. It knows no service of the platform: see package sim for the whole.
//
// # What happens
//
// Members crash (one, all, in the middle of a write to disk; with or without what was not synced), stop in order, freeze,
// get an empty disk in place of theirs, suffer slow disks and clocks that jump, are away for long. Packets are lost,
// repeated, late and out of order; the network is cut, one way too. Leaders are transferred, history is compacted and
// scrubbed. Each seed has a weather of its own, in which only some of this happens. Then comes peace, in which everything
// must come right.
//
// # What must hold
//
//   - Every member applies the same entry at an index, with the same answer, in every life; states at one index are equal.
//   - What was acknowledged is in the log; an operation happens at most once however often it was proposed, and not at
//     all when its client was told so.
//   - Reads and writes are linearizable: each tells the revision it saw or made, what it saw is what the history has at
//     that revision, and it is not older than anything that anybody was told before the call began.
//   - Watches, over crashes, restores and compactions, show every revision whole, once and in order.
//   - After every commit the laws of the records hold: sums, names claimed once, lists that only grow, places not
//     overbooked, one order for an idempotency key. Revisions and stamped times only grow.
//   - No term has two leaders, nobody votes twice in a term, who comes with an empty disk says nothing and is refused.
//   - A disk that a crash left opens, at or after what was flushed.
//
// # How
//
// A client is a coroutine (iter.Pull) in which package store runs as it is: its Proposer gives the goroutine back to the
// world until the answer is there. Operations tell the truth about themselves: each writes ops/<its name> without looking,
// so that doing it twice shows. A crash in the middle of work is a picture of the disk taken by a hook of the file system
// before some write; what the member does after it, until it is ended, counts for nothing.
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

// members is how many there are.
const members = 3

// ids is the first configuration.
var ids = []uint64{1, 2, 3}

// world is ring (a): three members, the network between them and their clients, all driven by one goroutine.
type world struct {
	seed    uint64
	rng     *rand.Rand
	chance  *rand.ChaCha8 // for data-directory IDs, read requests and raft's election time-outs
	step    int
	weather weather
	trio    [members]*member
	network network
	clients []*client
	check   *check
	trace   *sim.Trace
	counts  map[string]int
	wiped   map[*member]bool // since all had their disks
	healing bool             // faults are over
	broken  string
}

// Outcome is what a schedule came to.
type Outcome struct {
	// Counts of what happened, by name.
	Counts map[string]int
	Trace  string
}

// Schedule runs one schedule of ring (a) in this goroutine and returns what it came to, or a *sim.Violation. For its
// duration it replaces crypto/rand.Reader, from which raft draws its election time-outs: nothing else in the process may
// depend on that meanwhile, and no two schedules run at a time.
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
	w.weather = forecast(w.rng)
	w.trace.Add("weather %+v", w.weather)
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

// seedOf makes a seed for one of several sources.
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

// now is the true time, which no member knows.
func (w *world) now() time.Time { return time.UnixMilli(1_000_000_000 + int64(w.step)*10) }

func (w *world) member(id uint64) *member { return w.trio[id-1] }

func (w *world) count(what string) { w.counts[what]++ }

// fail notes the first broken promise.
func (w *world) fail(format string, args ...any) {
	if w.broken == "" {
		w.broken = fmt.Sprintf(format, args...)
		w.trace.Add("BROKEN: %s", w.broken)
	}
}

// run is the whole schedule: trouble, then peace, in which everything must come right.
func (w *world) run() {
	for _, m := range w.trio {
		m.start(&tripwire{})
	}
	for ; w.step < w.weather.steps && w.broken == ""; w.step++ {
		if !w.weather.calm || len(w.check.history.ops) > 0 {
			w.trouble()
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

// once is one step.
func (w *world) once() {
	w.restart()
	for _, m := range w.shuffled() {
		// Clocks of members do not run alike.
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
			c.turn()
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

// restart brings members back whose time has come.
func (w *world) restart() {
	for _, m := range w.trio {
		if m.up || w.step < m.backAt || w.broken != "" {
			continue
		}
		trip := &tripwire{}
		if w.weather.torn > 0 && !w.healing && w.rng.IntN(4) == 0 {
			trip.arm(1+w.rng.IntN(12), w.rng.IntN(2) == 0)
		}
		m.start(trip)
	}
}

// settled says that every client is done and every member has applied the same.
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
