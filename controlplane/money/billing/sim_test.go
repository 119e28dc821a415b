package billing

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestSimulation runs random VM life cycles, clock changes and leader changes, with lost requests and responses. The
// charges must equal those of a model that computes the hours from the history of each VM's record.
func TestSimulation(t *testing.T) {
	for seed := range uint64(12) {
		require.NoError(t, simulate(t, seed, 250), "seed %d", seed)
	}
}

// past is the history of a VM's record, from which the model computes the VM's cost.
type past struct {
	began   cloud.Time
	changes []moment
	// gone is when the VM was deleted, or 0 if it exists.
	gone cloud.Time
}

type moment struct {
	at    cloud.Time
	price int64
	on    bool
}

// price returns the price of an hour of a VM in its current state, as the package comment defines it, and whether the
// VM runs.
func price(m *cloud.VM) (amount int64, on bool) {
	var gib int64
	for _, d := range m.Spec.Disks {
		gib += int64(d.SizeGiB)
	}
	switch m.State {
	case cloud.Pending, cloud.Creating, cloud.Failed:
		return 0, false
	case cloud.Running, cloud.Migrating:
		memory := int64(m.Spec.Memory.SizeMiB) * prices.MemoryGiBHour
		return int64(m.Spec.CPU.VCPUs)*prices.VCPUHour + (memory+1023)/1024 + gib*prices.DiskGiBHour, true
	}
	return gib * prices.DiskGiBHour, false
}

// sum returns what the VM has cost by now: for each hour that has begun, the highest price in it. The first hour in
// which the VM was built costs nothing until the VM runs or the hour is over.
func (p *past) sum(now cloud.Time) (sum int64) {
	end := now
	if p.gone != 0 {
		end = p.gone
	}
	first := true
	for from := p.began; from <= end; from += hour.Milliseconds() {
		to := from + hour.Milliseconds()
		var peak, standing int64
		var ran, runs bool
		for _, c := range p.changes {
			switch {
			case c.at < from:
				standing, runs = c.price, c.on
			case c.at < to && c.at <= end:
				peak, ran = max(peak, c.price), ran || c.on
			}
		}
		peak, ran = max(peak, standing), ran || runs
		if peak > 0 && first {
			first = false
			if !ran && end < to {
				return sum
			}
		}
		sum += peak
	}
	return sum
}

// life is one run of the simulation.
type life struct {
	*world
	rand    *rand.Rand
	leaders []*Service
	pasts   map[cloud.VMID]*past
	made    int
}

func simulate(t testing.TB, seed uint64, steps int) error {
	rules := on
	if seed%2 == 1 {
		rules = strict
	}
	l := &life{world: newWorld(t, rules), rand: rand.New(rand.NewPCG(seed, 7)), pasts: map[cloud.VMID]*past{}}
	l.leaders = []*Service{l.bills, l.member(rules), l.member(rules)}
	l.fund(500)
	for n := range steps {
		if err := l.step(); err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
	}
	return l.end()
}

// steps lists the random steps of the simulation. A step that is listed several times is chosen more often.
var steps = []func(*life) error{
	(*life).pass, (*life).pass, (*life).pass, (*life).make, (*life).make, (*life).build, (*life).build, (*life).build, (*life).power, (*life).power,
	(*life).power, (*life).reshape, (*life).remove, (*life).runOnLeader, (*life).runOnLeader, (*life).runWithFailures, (*life).earn, (*life).suspend,
	func(l *life) error { return l.credits.Sweep(l.t.Context()) },
}

func (l *life) step() error {
	if err := steps[l.rand.IntN(len(steps))](l); err != nil {
		return err
	}
	l.look()
	return nil
}

// look adds the current state of each VM's record to its history.
func (l *life) look() {
	for id, p := range l.pasts {
		m := l.get(id)
		if m == nil {
			continue
		}
		amount, runs := price(m)
		if n := len(p.changes); n == 0 && amount > 0 || n > 0 && p.changes[n-1].price != amount {
			p.changes = append(p.changes, moment{m.UpdatedAt, amount, runs})
		}
	}
}

// some returns a random VM that exists, or nil if there is none.
func (l *life) some() *cloud.VM {
	var there []cloud.VMID
	for _, id := range slices.Sorted(maps.Keys(l.pasts)) {
		if l.pasts[id].gone == 0 {
			there = append(there, id)
		}
	}
	if len(there) == 0 {
		return nil
	}
	return l.get(there[l.rand.IntN(len(there))])
}

func (l *life) pass() error {
	switch l.rand.IntN(10) {
	case 0:
		l.Clock.Advance(-time.Duration(l.rand.IntN(90)) * time.Minute)
	case 1:
		l.Clock.Advance(time.Duration(l.rand.IntN(6)) * hour)
	case 2:
		// Advance the clock to the beginning of an hour of some VM.
		if m := l.some(); m != nil {
			step := hour.Milliseconds()
			l.Clock.Advance(time.Duration(step-(l.store.Now()-l.pasts[m.ID].began)%step) * time.Millisecond)
		}
	default:
		l.Clock.Advance(time.Duration(l.rand.IntN(40)) * time.Minute)
	}
	return nil
}

func (l *life) make() error {
	if len(l.pasts) > 40 {
		return nil
	}
	l.made++
	before := l.figures()
	id, err := l.tryCreate(fmt.Sprint("web-", l.made))
	_, sum := l.unpaidBills()
	if err == nil {
		l.pasts[id] = &past{began: l.get(id).CreatedAt}
		if sum != 0 {
			return fmt.Errorf("VM %s was created while %d is owed", id, sum)
		}
		return nil
	}
	if !fault.Is(err, fault.ResourceExhausted) {
		return err
	}
	if after := l.figures(); after != before {
		return fmt.Errorf("refusing to create a VM changed the wallet to %v from %v", after, before)
	}
	if sum == 0 && before[2] >= running && l.wallet().Status == ledger.Active {
		return fmt.Errorf("with %d available: %w", before[2], err)
	}
	return nil
}

func (l *life) build() error {
	m := l.some()
	if m == nil || m.State != cloud.Creating {
		return nil
	}
	if l.rand.IntN(6) == 0 {
		l.reportObserved(m.ID, cloud.ObservedBuildFailed, func(o *cloud.Observation) { o.Exit = cloud.ExitFailed })
		return l.freed(m.ID)
	}
	l.reportObserved(m.ID, cloud.ObservedBuilt)
	return nil
}

func (l *life) power() error {
	m := l.some()
	switch {
	case m == nil:
	case m.State == cloud.Stopped:
		if err := l.start(m.ID); err != nil && !fault.Is(err, fault.ResourceExhausted) {
			return err
		}
	case m.State == cloud.Stopping:
		l.reportObserved(m.ID, cloud.ObservedEnded)
	case m.State == cloud.Running && l.rand.IntN(2) == 0:
		l.reportObserved(m.ID, cloud.ObservedEnded, func(o *cloud.Observation) { o.Exit = cloud.ExitGuest })
	case m.State == cloud.Running:
		l.stop(m.ID)
	}
	return nil
}

func (l *life) reshape() error {
	m := l.some()
	if m == nil || m.State != cloud.Stopped {
		return nil
	}
	_, err := l.vms.Update(l.as(acme), acme, m.ID, changeTo(1+l.rand.Uint32N(4), 256<<l.rand.IntN(4)))
	return err
}

func (l *life) remove() error {
	m := l.some()
	if m == nil {
		return nil
	}
	at := l.store.Now()
	if err := l.delete(m.ID); err != nil {
		if fault.Is(err, fault.FailedPrecondition) {
			return nil
		}
		return err
	}
	l.pasts[m.ID].gone = at
	return l.freed(m.ID)
}

// freed returns an error if credit is still reserved for a VM that has no bill with the reservation.
func (l *life) freed(id cloud.VMID) error {
	bills, _ := l.unpaidBills()
	if slices.ContainsFunc(bills, func(b Bill) bool { return b.VM == id && b.Reservation != "" }) {
		return nil
	}
	return l.store.Local(func(v *store.View) error {
		held, err := l.credits.ReservedAt(v, acme, idOf(id, "reservation"), l.store.Now())
		if held != 0 {
			return fmt.Errorf("%d is still reserved for VM %s", held, id)
		}
		return err
	})
}

// runOnLeader calls Run on a random leader, and compares the charges with the model.
func (l *life) runOnLeader() error {
	if err := l.leaders[l.rand.IntN(len(l.leaders))].Run(l.t.Context()); err != nil {
		return err
	}
	l.look()
	return l.agree()
}

// runWithFailures calls Run on a random leader while a third of the requests or responses are lost.
func (l *life) runWithFailures() error {
	l.Quorum.Lose = func(bool) bool { return l.rand.IntN(3) == 0 }
	err := l.leaders[l.rand.IntN(len(l.leaders))].Run(l.t.Context())
	l.Quorum.Lose = nil
	if err != nil && !errors.Is(err, storetest.ErrLost) {
		return err
	}
	return nil
}

func (l *life) earn() error { l.topUp(1 + l.rand.Int64N(200)); return nil }

func (l *life) suspend() error {
	op := ledger.DoResume
	if l.rand.IntN(4) == 0 {
		op = ledger.DoSuspend
	}
	l.order(ledger.Command{Op: op})
	return nil
}

// agree returns an error unless the charges and the unpaid bills of each VM equal its cost in the model.
func (l *life) agree() error {
	got := map[cloud.VMID]int64{}
	for _, tx := range l.transactions(l.t) {
		if tx.Type == ledger.Charge || tx.Type == ledger.BillingCharge {
			got[cloud.VMID(tx.ResourceID)] += tx.Amount
		}
	}
	bills, _ := l.unpaidBills()
	for _, b := range bills {
		got[b.VM] += b.Total()
	}
	for id, p := range l.pasts {
		if want := p.sum(l.store.Now()); got[id] != want {
			return fmt.Errorf("VM %s is charged %d, but its hours cost %d: %+v", id, got[id], want, *p)
		}
		delete(got, id)
	}
	if len(got) != 0 {
		return fmt.Errorf("charges for VMs that never existed: %v", got)
	}
	return l.clean()
}

// end adds enough credit, charges everything, and returns an error unless the total equals the model's, and each meter
// has a VM.
func (l *life) end() error {
	l.order(ledger.Command{Op: ledger.DoResume})
	l.topUp(1_000_000)
	if err := l.runOnLeader(); err != nil {
		return err
	}
	if bills, _ := l.unpaidBills(); len(bills) != 0 {
		return fmt.Errorf("the bills %+v are unpaid, although there is credit for them", bills)
	}
	var sum int64
	for _, p := range l.pasts {
		sum += p.sum(l.store.Now())
	}
	if got := l.wallet().Consumed(); got != sum {
		return fmt.Errorf("%d is consumed, but all hours together cost %d", got, sum)
	}
	return l.store.Local(func(v *store.View) error {
		all, _, err := meters.List(v, 0)
		for _, r := range all {
			if has, _ := vm.VMs.Has(v, r.Path...); !has {
				return fmt.Errorf("VM %s is deleted, but still has a meter", r.Value.VM)
			}
		}
		rows, _, _ := next.List(v, 0)
		if len(rows) > len(all) {
			return fmt.Errorf("%d meters have %d rows in the order", len(all), len(rows))
		}
		return err
	})
}
