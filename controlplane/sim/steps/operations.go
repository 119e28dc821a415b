package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// operations lists what clients do. An operation is chosen with a probability proportional to its weight.
var operations = []struct {
	weight int
	run    func(*client) error
}{
	{20, (*client).transfer},
	{14, (*client).increment},
	{10, (*client).append},
	{10, (*client).claim},
	{10, (*client).slot},
	{10, (*client).set},
	{8, (*client).order},
	{20, (*client).readTable},
	{5, (*client).readPages},
	{10, (*client).followOps},
	{3, (*client).compact},
	{6, (*client).proposeNotes},
}

// life is the main function of a client's coroutine. It runs random operations until world.heal ends the faults, and
// then a last read. Client 0 creates the accounts first.
func (c *client) life() {
	for len(c.w.check.history.ops) == 0 {
		if c.id == 0 {
			_ = c.createAccounts() // an error is ignored: the call is repeated until the accounts exist
		}
		if c.wait(1+c.rng.IntN(4), nil) != nil {
			return
		}
	}
	total := 0
	for _, e := range operations {
		total += e.weight
	}
	for !c.last {
		n := c.rng.IntN(total)
		for _, e := range operations {
			if n -= e.weight; n < 0 {
				_ = e.run(c) // the operation itself has checked its error
				break
			}
		}
		if c.wait(c.rng.IntN(6), nil) != nil {
			return
		}
	}
	c.doing = "its last read"
	for c.readTable() != nil {
		if c.wait(3, nil) != nil {
			return
		}
	}
}

// createAccounts creates all accounts in one transaction, each with its initial balance.
func (c *client) createAccounts() error {
	return c.write("found", func(tx *store.Tx, op string) error {
		if taken, err := accounts.Has(tx, "0"); err != nil || taken {
			return errors.Join(err, errPointless)
		}
		for i := range accountCount {
			accounts.Put(tx, &row{Op: op, N: funds}, itoa(i))
		}
		return nil
	})
}

// transfer moves a random amount from one random account to another, if the balance of the first one is high enough.
func (c *client) transfer() error {
	from, to, amount := c.rng.IntN(accountCount), c.rng.IntN(accountCount), int64(1+c.rng.IntN(20))
	return c.write("transfer", func(tx *store.Tx, op string) error {
		a, err := accounts.Get(tx, itoa(from))
		if err != nil {
			return err
		}
		b, err := accounts.Get(tx, itoa(to))
		if err != nil {
			return err
		}
		if from == to || a == nil || b == nil || a.N < amount {
			return errPointless
		}
		accounts.Put(tx, &row{Op: op, N: a.N - amount}, itoa(from))
		accounts.Put(tx, &row{Op: op, N: b.N + amount}, itoa(to))
		return nil
	})
}

// increment adds 1 to a random counter, which it reads first.
func (c *client) increment() error {
	key := itoa(c.rng.IntN(3))
	return c.write("count", func(tx *store.Tx, op string) error {
		r, err := counters.Get(tx, key)
		if err != nil {
			return err
		}
		counters.Put(tx, &row{Op: op, N: value(r) + 1}, key)
		return nil
	})
}

// append appends the name of the operation to the items of a list.
func (c *client) append() error {
	key := itoa(c.rng.IntN(2))
	return c.write("append", func(tx *store.Tx, op string) error {
		r, err := lists.Get(tx, key)
		if err != nil {
			return err
		}
		if r == nil {
			r = &row{}
		}
		lists.Put(tx, &row{Op: op, Items: append(slices.Clone(r.Items), op)}, key)
		return nil
	})
}

// claim writes the client's name into a random row of the table names if the row is free. If the row has the client's
// name, claim deletes the row.
func (c *client) claim() error {
	key, mine := itoa(c.rng.IntN(6)), fmt.Sprint("client ", c.id)
	return c.write("claim", func(tx *store.Tx, op string) error {
		r, err := names.Get(tx, key)
		switch {
		case err != nil:
			return err
		case r == nil:
			names.Put(tx, &row{Op: op, Items: []string{mine}}, key)
		case slices.Equal(r.Items, []string{mine}):
			names.Delete(tx, key)
		default:
			return errPointless
		}
		return nil
	})
}

// slot takes one of slotLimit slots, or frees one unless it is the last one in use. Both read the list of all slots, so
// a concurrent change of any slot must make the transaction conflict.
func (c *client) slot() error {
	free := c.rng.IntN(2) == 0
	return c.write("slot", func(tx *store.Tx, op string) error {
		taken, more, err := slots.List(tx, slotLimit)
		if err != nil {
			return err
		}
		if n := len(taken); more || n == slotLimit || free && n > 1 {
			slots.Delete(tx, taken[c.rng.IntN(n)].Path...)
			return nil
		}
		slots.Put(tx, &row{Op: op}, op)
		return nil
	})
}

// set writes a random row of the table registers without reading anything.
func (c *client) set() error {
	key := itoa(c.rng.IntN(3))
	return c.write("set", func(tx *store.Tx, op string) error {
		registers.Put(tx, &row{Op: op}, key)
		return nil
	})
}

// order creates an order under an idempotency key. It tries up to five times to get a result, and checks that the
// result is the order in the history.
func (c *client) order() error {
	key := fmt.Sprintf("%d.%d", c.id, c.made+1)
	caller := &cloud.Caller{User: "sim", IdempotencyKey: key}
	for try := 0; ; try++ {
		m, err := c.reachable()
		if err != nil {
			return err
		}
		c.made++
		c.doing = "order " + key
		made := fmt.Sprintf("%s-%d", key, try)
		life := m.life
		s, _ := c.at(m)
		var answer string
		var replayed bool
		_, err = s.Update(context.Background(), func(tx *store.Tx) (err error) {
			answer, replayed, err = store.Idempotent(tx, caller, store.InProject("p"), "Order", [32]byte{}, func() (string, error) {
				orders.Put(tx, &row{Op: key}, made)
				return made, nil
			})
			return err
		})
		c.w.trace.Add("client %d orders %s on %d: %s %v %v", c.id, made, m.id, answer, replayed, err)
		switch {
		case err == nil:
			c.w.count("orders made")
			if replayed {
				c.w.count("orders replayed")
			}
			if kept := c.w.check.history.keys[key]; kept != "order/"+answer {
				c.w.fail("the order %s was answered %s, but the history has %s", key, answer, kept)
			}
			return nil
		case errors.Is(err, errOver):
			return err
		case !c.expected(m, life, err):
			c.w.fail("order %s on member %d came to an error that nobody expects: %v", key, m.id, err)
		case try == 4:
			return err
		}
		if err := c.wait(1+c.rng.IntN(4), nil); err != nil {
			return err
		}
	}
}

// readTable reads a whole table, linearizably, on a random member, and compares it with the history.
func (c *client) readTable() error {
	tables := []struct {
		name  string
		table store.Table[row]
	}{{"account", accounts}, {"name", names}, {"list", lists}, {"count", counters}, {"slot", slots}, {"register", registers}}
	pick := tables[c.rng.IntN(len(tables))]
	m, err := c.reachable()
	if err != nil {
		return err
	}
	life, frontier := m.life, c.w.check.frontier
	s, _ := c.at(m)
	err = s.View(context.Background(), func(v *store.View) error {
		all, _, err := pick.table.List(v, 0)
		if err != nil {
			return err
		}
		c.w.trace.Add("client %d reads %s on %d at %d", c.id, pick.name, m.id, v.Revision())
		c.w.check.read(pick.name, v.Revision(), frontier)
		c.w.check.history.compare(m, pick.name, v.Revision(), all)
		return nil
	})
	if err != nil && !errors.Is(err, errOver) && !c.expected(m, life, err) {
		c.w.fail("a read on member %d came to an error that nobody expects: %v", m.id, err)
	}
	return err
}

// readPages reads a table in pages, each on a random member, and checks that all pages are of the same revision.
func (c *client) readPages() error {
	frontier := c.w.check.frontier
	var got []string
	token := ""
	for {
		m, err := c.reachable()
		if err != nil {
			return err
		}
		life := m.life
		s, _ := c.at(m)
		page, next, err := store.Page(context.Background(), s, accounts, store.PageRequest{Size: 2, Token: token}, func(*row) bool { return true })
		if f, ok := fault.From(err); ok && f.Reason == "PAGE_TOKEN_EXPIRED" && m.engine.CompactRevision() > frontier {
			return err
		}
		if err != nil {
			if !errors.Is(err, errOver) && !c.expected(m, life, err) {
				c.w.fail("a page on member %d came to an error that nobody expects: %v", m.id, err)
			}
			return err
		}
		for _, r := range page {
			got = append(got, fmt.Sprintf("%+v", *r))
		}
		if token = next; token == "" {
			break
		}
		if err := c.wait(c.rng.IntN(20), nil); err != nil {
			return err
		}
	}
	c.w.count("tables listed in pages")
	h := &c.w.check.history
	for revision := frontier; revision <= h.last; revision++ {
		var want []string
		for _, f := range h.table("account", revision) {
			want = append(want, fmt.Sprintf("%+v", *f.row))
		}
		if slices.Equal(got, want) {
			return nil
		}
	}
	c.w.fail("pages of accounts show %v, which they never were since revision %d", got, frontier)
	return nil
}

// compact compacts the history at a random recent revision.
func (c *client) compact() error {
	if c.w.faults.compact == 0 {
		return nil
	}
	m, err := c.reachable()
	if err != nil {
		return err
	}
	life := m.life
	s, _ := c.at(m)
	to := c.w.check.history.last - int64(c.rng.IntN(c.w.faults.compact))
	err = s.Compact(context.Background(), max(to, 0))
	c.w.trace.Add("client %d compacts to %d on %d: %v", c.id, to, m.id, err)
	if err == nil {
		c.w.count("compactions")
	} else if !errors.Is(err, errOver) && !c.expected(m, life, err) {
		c.w.fail("a compaction on member %d came to an error that nobody expects: %v", m.id, err)
	}
	return err
}

// follower watches the table ops as a service would: on one member until that member stops, then on another. Sometimes
// it also changes to another member without a reason.
type follower struct {
	m     *member
	life  int
	watch *store.Watch[row]
	next  int64 // next revision that it expects
	place int   // index of the next operation in history.order
}

// followOps receives those changes of the watch that exist already. It checks that they are the operations of the
// history, in order and without gaps.
func (c *client) followOps() error {
	f, h := &c.follow, &c.w.check.history
	if f.watch == nil || f.m.life != f.life || c.rng.IntN(8) == 0 {
		if f.watch != nil {
			f.watch.Close()
		}
		m, err := c.reachable()
		if err != nil {
			return err
		}
		s, _ := c.at(m)
		f.m, f.life, f.next = m, m.life, max(f.next, 2)
		f.watch = ops.Watch(s, f.next)
	}
	for {
		changes, revision, err := f.watch.Next(ended())
		switch {
		case errors.Is(err, context.Canceled):
			return nil
		case fault.Is(err, fault.OutOfRange):
			return c.skip()
		case errors.Is(err, mvcc.ErrRestored), errors.Is(err, mvcc.ErrClosed):
			if errors.Is(err, mvcc.ErrClosed) && f.m.life == f.life {
				c.w.fail("a watch on member %d ended: %v", f.m.id, err)
			}
			f.watch.Close()
			f.watch = nil
			return nil
		case err != nil:
			c.w.fail("a watch of operations on member %d ended: %v", f.m.id, err)
			return err
		}
		for _, change := range changes {
			if f.place >= len(h.order) || h.order[f.place] != change.Path[0] || h.ops[change.Path[0]] != change.Revision {
				c.w.fail("a watch on member %d shows %s at %d as operation %d of %v", f.m.id, change.Path[0], change.Revision, f.place, h.order)
				return nil
			}
			f.place++
		}
		f.next = revision + 1
		if f.place < len(h.order) && h.ops[h.order[f.place]] <= revision {
			c.w.fail("a watch on member %d is at revision %d and has not shown %s", f.m.id, revision, h.order[f.place])
		}
		c.w.count("batches watched")
	}
}

// skip reads the current state and continues the watch after it. A watcher must do that when its history was compacted.
func (c *client) skip() error {
	f, h := &c.follow, &c.w.check.history
	if f.m.engine.CompactRevision() < f.next {
		c.w.fail("a watch from revision %d on member %d says that this is compacted, but the oldest is %d", f.next, f.m.id, f.m.engine.CompactRevision())
	}
	f.watch.Close()
	f.watch = nil
	s, _ := c.at(f.m)
	return s.Local(func(v *store.View) error {
		all, _, err := ops.List(v, 0)
		if err != nil {
			return err
		}
		h.compare(f.m, "op", v.Revision(), all)
		f.next = v.Revision() + 1
		for f.place = 0; f.place < len(h.order) && h.ops[h.order[f.place]] < f.next; {
			f.place++
		}
		return nil
	})
}
