package steps

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Errors that a client's calls return besides those of package store.
var (
	errGone      = errors.New("the member is gone; whether the call took effect is not known")
	errDown      = errors.New("the member does not answer")
	errTired     = errors.New("tried often enough")
	errOver      = errors.New("the schedule is over")
	errPointless = errors.New("the operation makes no sense now")
)

// client is one user of the store. It calls package store in a coroutine. Where the store would wait for other members,
// the coroutine yields, so that the type world can run the next step.
type client struct {
	w      *world
	id     int
	rng    *rand.Rand
	chance *rand.ChaCha8 // random source of proposal IDs

	resume func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool

	call  *call // call whose result the client waits for; nil: none
	wake  int   // step in which the client stops waiting
	last  bool  // the client begins no new operations but a last read
	done  bool
	doing string
	made  int // number of operations begun

	follow follower
}

// call is a proposal or read request of a client on a member. Its result is valid once call.over is true.
type call struct {
	over   bool
	answer any
	err    error
}

func (c *call) finish(answer any, err error) {
	if !c.over {
		c.over, c.answer, c.err = true, answer, err
	}
}

func newClient(w *world, id int) *client {
	c := &client{w: w, id: id, rng: rand.New(rand.NewPCG(w.seed, uint64(100+id))), chance: rand.NewChaCha8(seedOf(w.seed, byte(100+id)))}
	c.resume, c.stop = iter.Pull(func(yield func(struct{}) bool) {
		c.yield = yield
		c.life()
		c.done = true
	})
	return c
}

// advance resumes the client's coroutine if the call that it waits for has ended, or if its waiting time has passed.
func (c *client) advance() {
	if !c.done && (c.call != nil && c.call.over || c.w.step >= c.wake) {
		c.resume()
	}
}

// wait yields the coroutine for a number of steps. If the call on is not nil and ends earlier, wait returns earlier. It
// returns errOver when the run ends.
func (c *client) wait(steps int, on *call) error {
	c.call, c.wake = on, c.w.step+steps
	if !c.yield(struct{}{}) {
		return errOver
	}
	c.call = nil
	return nil
}

// await waits for the result of the call ask for at most 40 steps. If there is none then, it ends the call with
// errGone.
func (c *client) await(ask *call) (any, error) {
	if !ask.over {
		if err := c.wait(40, ask); err != nil {
			return nil, err
		}
	}
	if !ask.over {
		c.w.count("calls abandoned")
		ask.finish(nil, errGone)
	}
	return ask.answer, ask.err
}

// propose proposes data on the member m and waits for the result.
func (c *client) propose(m *member, id [16]byte, data []byte) (any, error) {
	if !m.up || c.w.network.cut[m.id][m.id] {
		return nil, errDown
	}
	ask := &call{}
	m.calls = append(m.calls, ask)
	life := m.life
	m.group.Propose(id, data, func(r consensus.Result, err error) {
		if m.life != life || m.dying() {
			return
		}
		if err == nil {
			c.w.check.answered(m, id, r.Answer)
		}
		c.w.trace.Add("%d answers client %d's %x: %v %v", m.id, c.id, id[:4], r.Answer, err)
		ask.finish(r.Answer, err)
		if err == nil && m.group.Status().Role != "Leader" {
			c.w.count("proposals forwarded")
		}
	})
	return c.await(ask)
}

// read calls ReadIndex on the member m and waits until reads on m are linearizable. If this fails, it cancels the
// request.
func (c *client) read(m *member) error {
	if !m.up || c.w.network.cut[m.id][m.id] {
		return errDown
	}
	ask := &call{}
	m.calls = append(m.calls, ask)
	life := m.life
	r := m.group.ReadIndex(func(_ uint64, err error) {
		if m.life == life && !m.dying() {
			ask.finish(nil, err)
		}
	})
	_, err := c.await(ask)
	if m.life == life && err != nil {
		r.Cancel()
	}
	return err
}

// clientProposer is the store.Proposer of a client. It reads on the member in the field m and makes the first proposal
// there. After a failure, it proposes on the leader that the error names, or on a random member. A proposal without a
// result is repeated under the same ID.
type clientProposer struct {
	c *client
	m *member
	// unknown is true if the last proposal may have been or may still be applied although no result was received.
	unknown  bool
	attempts int
}

// Propose implements store.Proposer. It tries up to eight times to get a result, and then returns errTired. From its
// seventh call on, it returns errTired at once.
func (d *clientProposer) Propose(_ context.Context, id [16]byte, data []byte) (command.Result, error) {
	if d.attempts++; d.attempts > 6 {
		return command.Result{}, errTired
	}
	m := d.m
	for range 8 {
		answer, err := d.c.propose(m, id, data)
		var elsewhere *consensus.NotLeaderError
		switch {
		case err == nil:
			if d.unknown {
				d.c.w.count("retries answered")
			}
			d.unknown = false
			r, _ := answer.(command.Result) // check.answered has checked this type
			return r, nil
		case errors.Is(err, errOver):
			d.unknown = true
			return command.Result{}, err
		case errors.As(err, &elsewhere):
			if elsewhere.Leader != 0 {
				m = d.c.w.member(elsewhere.Leader)
			} else {
				m = d.c.some()
			}
		case errors.Is(err, consensus.ErrUncertain), errors.Is(err, errGone):
			d.c.w.count("outcomes unknown")
			d.unknown = true
			m = d.c.some()
		case errors.Is(err, consensus.ErrStopped), errors.Is(err, consensus.ErrOverloaded), errors.Is(err, consensus.ErrNoLeader), errors.Is(err, errDown), wiped(err):
			m = d.c.some()
		default:
			d.c.w.fail("a proposal came to an error that nobody expects: %v", err)
			return command.Result{}, err
		}
		if err := d.c.wait(1+d.c.rng.IntN(6), nil); err != nil {
			return command.Result{}, err
		}
	}
	return command.Result{}, errTired
}

// ReadIndex implements store.Proposer.
func (d *clientProposer) ReadIndex(context.Context) error { return d.c.read(d.m) }

// some returns a random member, which may be down.
func (c *client) some() *member { return c.w.trio[c.rng.IntN(members)] }

// at returns a store that reads on the member m, and the clientProposer of this store.
func (c *client) at(m *member) (*store.Store, *clientProposer) {
	d := &clientProposer{c: c, m: m}
	return store.New(store.Options{Engine: m.engine, Proposer: d, PageKey: make([]byte, 32), Now: m.clock, Rand: c.chance}), d
}

// reachable returns a random member that is up and not frozen, and waits for one if needed.
func (c *client) reachable() (*member, error) {
	for {
		if m := c.some(); m.up && !m.frozen() {
			return m, nil
		}
		if err := c.wait(2, nil); err != nil {
			return nil, err
		}
	}
}

// write runs the function f in a transaction. The transaction also writes a row of the table ops, under the name of the
// operation, without reading the row first. So a transaction that is applied twice is detected. The returned revision
// or error is passed to c.w.check.
func (c *client) write(kind string, f func(tx *store.Tx, op string) error) error {
	w := c.w
	m, err := c.reachable()
	if err != nil {
		return err
	}
	c.made++
	op := fmt.Sprintf("%d.%d-%s", c.id, c.made, kind)
	c.doing = op
	life, frontier := m.life, w.check.frontier
	s, d := c.at(m)
	w.trace.Add("client %d begins %s on %d", c.id, op, m.id)
	revision, err := s.Update(context.Background(), func(tx *store.Tx) error {
		if err := f(tx, op); err != nil {
			return err
		}
		ops.Put(tx, &row{Op: op, At: tx.Now()}, op)
		return nil
	})
	w.trace.Add("client %d ends %s: %d %v", c.id, op, revision, err)
	switch {
	case err == nil:
		w.check.confirm(op, revision, frontier)
	case errors.Is(err, errOver):
	case !c.expected(m, life, err):
		w.fail("%s on member %d came to an error that nobody expects: %v", op, m.id, err)
	case !d.unknown:
		w.check.deny(op, err)
	}
	return err
}

// expected reports whether err is an error that a call on the member m may return. The parameter life is the value of
// m.life when the call began.
func (c *client) expected(m *member, life int, err error) bool {
	for _, known := range []error{errTired, errDown, errPointless, errGone, consensus.ErrNoLeader, consensus.ErrStopped, consensus.ErrOverloaded} {
		if errors.Is(err, known) {
			return true
		}
	}
	if errors.Is(err, mvcc.ErrClosed) {
		return m.life != life
	}
	if wiped(err) {
		return m.refusals > 0
	}
	f, isFault := fault.From(err)
	return errors.Is(err, mvcc.ErrRestored) || isFault && f.Reason == "HISTORY_EXPIRED" && m.engine.CompactRevision() > 0
}

// wiped reports whether err is the error with which a member stops because its disk is empty.
func wiped(err error) bool {
	var w *consensus.WipedError
	return errors.As(err, &w)
}
