package steps

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// member is one of the three members with its disk. It implements the Transport of its consensus.Host.
type member struct {
	w    *world
	id   uint64
	disk *vfs.MemFS
	// aside is the original disk of the member while an empty disk replaces it; otherwise it is nil.
	aside *vfs.MemFS

	// life is the number of starts and ends of the member's process. The fields from up to arrivals belong to the
	// current process.
	life     int
	up       bool
	fs       vfs.FS // disk, with trip as a hook
	trip     *crashTrigger
	host     *consensus.Host
	group    *consensus.Group
	engine   *mvcc.Engine
	machine  *store.StateMachine
	observer *observer
	calls    []*call
	arrivals int

	backAt     int           // step in which the member starts again
	slowUntil  int           // step until which the disk is slow
	frozeUntil int           // step until which the process is frozen
	skew       time.Duration // difference of the member's clock from the true time
	flushed    uint64        // highest index that its state machine has returned from Flush
	seen       int64         // next revision that its observer expects; not reset by restarts
	refusals   int           // how often the member was refused because its disk was empty
}

const group = 1

// crashTrigger simulates a crash in the middle of work. Before one of the next syncs or renames, it makes a copy of the
// disk as a crash would leave it. The member later continues with this copy.
type crashTrigger struct {
	mu      sync.Mutex
	disk    *vfs.MemFS
	left    int  // number of syncs and renames until the copy is taken; 0: none is planned
	all     bool // whether unsynced data survives the crash
	picture *vfs.MemFS
}

// String implements errorfs.Injector.
func (t *crashTrigger) String() string { return "tripwire" }

// MaybeError implements errorfs.Injector. It is called before each operation on the disk and never returns an error. It
// counts the syncs and renames, and makes the copy when t.left of them have been counted.
func (t *crashTrigger) MaybeError(op errorfs.Op) error {
	switch op.Kind {
	case errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo, errorfs.OpRename:
	default:
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.left > 0 {
		if t.left--; t.left == 0 {
			t.picture = crashImage(t.disk, t.all)
		}
	}
	return nil
}

func (t *crashTrigger) arm(left int, all bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left, t.all = left, all
}

func (t *crashTrigger) taken() *vfs.MemFS {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.picture
}

// crashImage returns a copy of the disk as it is after a crash. If all is true, the copy has all unsynced data,
// otherwise none. Keeping a random part of it would make the run unrepeatable.
func crashImage(disk *vfs.MemFS, all bool) *vfs.MemFS {
	if all {
		return disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(0, 0))})
	}
	return disk.CrashClone(vfs.CrashCloneCfg{})
}

// dying reports whether the crashTrigger has copied the disk. The member then counts as crashed, and its further
// actions are ignored.
func (m *member) dying() bool { return m.trip != nil && m.trip.taken() != nil }

func (m *member) frozen() bool { return m.up && m.w.step < m.frozeUntil }

// clock returns the time of the member's clock.
func (m *member) clock() time.Time { return m.w.now().Add(m.skew) }

// Send implements consensus.Transport.
func (m *member) Send(e message.Envelope) { m.w.network.carry(m, e, "") }

// SendSnapshot implements consensus.Transport.
func (m *member) SendSnapshot(e message.Envelope, dir string) { m.w.network.carry(m, e, dir) }

// start starts the member's process on its disk. If the state on the disk cannot be opened, that is a violation.
func (m *member) start(trip *crashTrigger) {
	w := m.w
	w.trace.Add("%d starts, life %d", m.id, m.life+1)
	trip.disk = m.disk
	m.life++
	m.trip, m.fs = trip, errorfs.Wrap(m.disk, trip)
	m.calls, m.arrivals, m.slowUntil, m.frozeUntil = nil, 0, 0, 0
	if err := m.open(); err != nil {
		w.fail("member %d cannot start on its disk: %v", m.id, err)
		return
	}
	m.up = true
	if at := m.engine.Applied().Index; at < m.flushed && m.aside == nil {
		w.fail("member %d has flushed entry %d and came back at %d", m.id, m.flushed, at)
	}
	m.observer = m.observe()
	w.check.state(m)
	m.checkRunning()
}

func (m *member) open() (err error) {
	m.engine, err = mvcc.Open(m.fs, "state", mvcc.Options{
		Quiet: true, CacheBytes: 256 << 10, MemTableBytes: 512 << 10, RecentBytes: m.w.faults.recent,
	})
	if err != nil {
		return err
	}
	m.machine = store.NewStateMachine(m.engine, store.StateMachineOptions{Inline: true})
	m.host, err = consensus.Open(consensus.Options{
		ID: m.id, Members: ids, Dir: "raft", FS: m.fs, Transport: m, Rand: m.w.chance, QuietLog: true,
		Log: slog.New(slog.DiscardHandler), OnLeader: func(l consensus.Leadership) { m.w.check.leads(m, l) },
		ElectionTicks: 6, Limits: m.w.faults.limits,
	})
	if err == nil {
		m.group, err = m.host.AddGroup(consensus.GroupOptions{ID: group, Name: "system", Machine: &witness{m}, Forward: m.w.faults.forward})
		if err == nil && m.w.faults.second {
			_, err = m.host.AddGroup(consensus.GroupOptions{ID: second, Name: "second", Machine: &ledger{m: m}, Forward: m.w.faults.forward})
		}
		if err != nil {
			err = errors.Join(err, m.host.Close())
		}
	}
	if err != nil {
		return errors.Join(err, m.engine.Close())
	}
	return nil
}

// end ends the member's process. Closing it may still write to the disk, so a simulated crash replaces the disk
// afterwards by a copy that was made before.
func (m *member) end(why string) {
	if !m.up {
		return
	}
	m.w.trace.Add("%d ends: %s", m.id, why)
	m.up = false
	calls := m.calls
	m.calls = nil
	for _, c := range calls {
		c.finish(nil, errGone)
	}
	m.observer.close()
	m.life++ // so that later callbacks are ignored
	if err := errors.Join(m.host.Close(), m.engine.Close()); err != nil {
		m.w.fail("member %d cannot close: %v", m.id, err)
	}
}

// stop ends the process as a proper shutdown does. The disk keeps all data.
func (m *member) stop() { m.end("stopped") }

// crash simulates a crash. If all is true, the disk keeps all data, otherwise only the synced data.
func (m *member) crash(all bool) {
	picture := crashImage(m.disk, all)
	m.end("crashed")
	m.disk = picture
}

// wipe crashes the member and replaces its disk by an empty one.
func (m *member) wipe() {
	m.crash(false)
	m.w.trace.Add("%d gets an empty disk", m.id)
	m.aside, m.disk = m.disk, vfs.NewCrashableMem()
}

// unwipe gives a wiped member its original disk back.
func (m *member) unwipe() {
	if m.aside != nil {
		m.w.trace.Add("%d gets its disk back", m.id)
		m.disk, m.aside = m.aside, nil
	}
}

// work calls Host.Process until the host is idle, but at most three times. A member with a slow disk works only in
// every seventh step.
func (m *member) work() {
	if !m.up || m.frozen() || m.w.step < m.slowUntil && m.w.step%7 != 0 {
		return
	}
	for range 3 {
		if !m.up || m.host.Idle() {
			break
		}
		_ = m.host.Process() // checkRunning checks Host.Err
		m.checkRunning()
	}
}

// tick advances raft's time on the member by one tick.
func (m *member) tick() {
	if m.up && !m.frozen() {
		_ = m.host.Tick() // checkRunning checks Host.Err
		m.checkRunning()
	}
}

// checkRunning is called after each call of the member's host. It carries out the crash of a crashTrigger. It accepts
// that a member with an empty disk is refused, and reports any other error as a violation.
func (m *member) checkRunning() {
	if !m.up {
		return
	}
	switch err := m.host.Err(); {
	case m.dying():
		picture := m.trip.taken()
		m.w.count("crashes during work")
		m.end("crashed in the middle of work")
		m.disk = picture
		m.backAt = m.w.step + 1 + m.w.rng.IntN(40)
	case wiped(err) && m.aside != nil:
		m.w.count("wiped members refused")
		m.refusals++
		m.end("refused: " + err.Error())
		if m.refusals%2 == 0 {
			m.unwipe()
		}
		m.backAt = m.w.step + 1 + m.w.rng.IntN(20)
	case err != nil:
		m.w.fail("member %d has stopped: %v", m.id, err)
	}
}

// witness wraps the member's state machine and passes all applied entries and their results to check.applied.
type witness struct{ m *member }

// Apply implements consensus.StateMachine.
func (t *witness) Apply(entries []consensus.Entry) ([]any, error) {
	for i := range entries {
		entries[i].Wanted = true // all results are compared
	}
	answers, err := t.m.machine.Apply(entries)
	if err == nil {
		t.m.w.check.applied(t.m, entries, answers)
		t.m.observer.poll()
	}
	return answers, err
}

// Applied implements consensus.StateMachine.
func (t *witness) Applied() (index, term uint64) { return t.m.machine.Applied() }

// Flush implements consensus.StateMachine. It stores the returned index in member.flushed.
func (t *witness) Flush() (uint64, error) {
	index, err := t.m.machine.Flush()
	if err == nil && !t.m.dying() && t.m.aside == nil {
		t.m.flushed = max(t.m.flushed, index)
	}
	return index, err
}

// Checkpoint implements consensus.StateMachine.
func (t *witness) Checkpoint(dir string) (index, term uint64, err error) {
	return t.m.machine.Checkpoint(dir)
}

// Restore implements consensus.StateMachine. With some probability, it arms the crashTrigger, so that the member
// crashes meanwhile.
func (t *witness) Restore(dir string) error {
	if w := t.m.w; w.faults.torn > 0 && !w.healing && w.rng.IntN(3) == 0 {
		// Without this, crashes during the installation of a snapshot would be rare.
		t.m.trip.arm(1+w.rng.IntN(25), w.rng.IntN(2) == 0)
	}
	if err := t.m.machine.Restore(dir); err != nil {
		return err
	}
	if t.m.dying() {
		t.m.w.count("crashes while a snapshot is installed")
		return nil
	}
	t.m.w.count("snapshots installed")
	t.m.w.trace.Add("%d restored to revision %d", t.m.id, t.m.engine.Revision())
	t.m.w.check.state(t.m)
	t.m.observer.poll()
	return nil
}
