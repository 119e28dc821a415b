// Package ledgertest executes random commands on a ledger and on a naive model of it, and reports the first difference.
//
// The same commands test the pure ledger (Memory) and any implementation that stores its records. Package ledgertest
// does not depend on the store.
package ledgertest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Book is a ledger under test, with its records.
type Book interface {
	// Do executes a command on the wallet of a project, at the time c.At.
	Do(project cloud.ProjectID, c ledger.Command) (ledger.Outcome, error)
	// Wallet returns the stored wallet of a project, or nil if it does not exist.
	Wallet(project cloud.ProjectID) (*ledger.Wallet, error)
	// Audit recomputes all wallets and returns an error if one is inconsistent.
	Audit() error
}

// auditEvery is the number of commands between two audits.
const auditEvery = 1000

// Run executes a number of random commands, generated from seed, on the ledger b and on the model. It returns an error
// that names the first command after which b and the model differ, or after which an audit fails.
func Run(seed uint64, commands int, b Book) error {
	g := newGenerator(seed)
	m := &model{wallets: map[cloud.ProjectID]*modelWallet{}}
	for n := 1; n <= commands; n++ {
		project, c := g.next(m)
		if err := play(m, b, project, c); err != nil {
			return fmt.Errorf("seed %d, command %d, %+v on %s: %w", seed, n, c, project, err)
		}
		if n%auditEvery == 0 || n == commands {
			if err := b.Audit(); err != nil {
				return fmt.Errorf("seed %d, after command %d: %w", seed, n, err)
			}
		}
	}
	return nil
}

// play executes one command on the ledger and on the model, and returns an error if their results or their wallets
// differ.
func play(m *model, b Book, project cloud.ProjectID, c ledger.Command) error {
	want := m.do(project, c)
	out, err := b.Do(project, c)
	var refusal *fault.Fault
	if err != nil && !errors.As(err, &refusal) {
		return err
	}
	if (err == nil) != want.ok {
		return fmt.Errorf("answered %v, the model says %+v", err, want)
	}
	if err == nil && (out.Released != want.released || uint64(len(out.Transactions)) != want.moves) {
		return fmt.Errorf("released %v with %d transactions, the model says %+v", out.Released, len(out.Transactions), want)
	}
	w, err := b.Wallet(project)
	if err != nil {
		return err
	}
	p := m.wallets[project]
	if (w == nil) != (p == nil) {
		return fmt.Errorf("wallet %v, the model has %v", w, p)
	}
	if w == nil {
		return nil
	}
	if err := w.Check(); err != nil {
		return err
	}
	got := figures{w.Balance(), w.Reserved(), w.Available(), w.Deposited(), w.Consumed(), w.Status, w.Sequence, w.Pending}
	wish := figures{
		p.balance().Int64(), p.reserved().Int64(), p.available().Int64(), p.in.Int64(), p.consumed().Int64(), p.status(), p.moves, uint64(len(p.open)),
	}
	if got != wish {
		return fmt.Errorf("the wallet is %+v, the model's %+v", got, wish)
	}
	return nil
}

// figures are the externally visible values of a wallet, which are compared with the model's.
type figures struct {
	Balance, Reserved, Available, Deposited, Consumed int64
	Status                                            ledger.WalletStatus
	Sequence, Pending                                 uint64
}

// generator generates mostly valid commands. It uses few wallets and reservations, so that commands affect each other.
type generator struct {
	r *rand.Rand
	// rich is true if the amounts of top-ups are not limited to 1000, so that wallets always have enough credit.
	rich bool
	now  cloud.Time
	made int
	// named holds, for each project, the numbers of the reservations that occurred in commands, newest last.
	named map[cloud.ProjectID][]int
	// sent holds the last generated command of each project. The method next sometimes returns it again, to test
	// repeated commands.
	sent map[cloud.ProjectID]ledger.Command
}

func newGenerator(seed uint64) *generator {
	return &generator{
		r: rand.New(rand.NewPCG(seed, 0x7269766574)), rich: seed%4 == 0, now: 1_800_000_000_000, named: map[cloud.ProjectID][]int{}, sent: map[cloud.ProjectID]ledger.Command{},
	}
}

func id(n int) string { return fmt.Sprintf("00000000-0000-7000-8000-%012d", n) }

var projects = []cloud.ProjectID{"a", "b", "c"}

// weights are the relative frequencies of the operations.
var weights = []struct {
	op ledger.Op
	n  int
}{
	{ledger.DoReserve, 30}, {ledger.DoCommit, 22}, {ledger.DoRelease, 10}, {ledger.DoExpire, 12}, {ledger.DoTopUp, 10}, {ledger.DoCharge, 5},
	{ledger.DoRefund, 6}, {ledger.DoCreate, 2}, {ledger.DoSuspend, 1}, {ledger.DoResume, 3},
}

func (g *generator) next(m *model) (cloud.ProjectID, ledger.Command) {
	project := projects[g.r.IntN(len(projects))]
	if g.r.IntN(3) == 0 {
		g.now += g.r.Int64N(20_000)
	}
	if last, ok := g.sent[project]; ok && g.r.IntN(12) == 0 { // repeat it, as if the client had lost the response
		last.At, last.IDs = g.now, g.ids()
		return project, last
	}
	c := ledger.Command{At: g.now, By: "u", IDs: g.ids(), Op: g.op(m, project)}
	switch c.Op {
	case ledger.DoCreate:
		c.Tenant = cloud.Tenant{Org: "o", Project: project}
		c.Amount = g.pick(0, g.amount()%1000, -1)
	case ledger.DoTopUp, ledger.DoCharge:
		if c.Amount = g.amount(); c.Op == ledger.DoTopUp && !g.rich {
			c.Amount %= 1000
		}
	case ledger.DoReserve:
		c.Amount, c.TTL = g.amount(), g.pick(g.r.Int64N(120), g.r.Int64N(120), 0, -5, 30*24*3600+1)
		if len(g.named[project]) == 0 || g.r.IntN(20) != 0 {
			g.made++
			g.named[project] = append(g.named[project], g.made)
		}
		c.Reservation = g.reservation(project, 1)
	case ledger.DoCommit:
		c.Amount, c.Reservation = g.pick(0, 0, g.amount(), g.amount(), -3), g.reservation(project, 12)
	case ledger.DoRelease, ledger.DoExpire:
		c.Reservation = g.reservation(project, 12)
	case ledger.DoRefund:
		c.Amount = g.amount()
		if p := m.wallets[project]; p != nil {
			c.Charge = g.r.Uint64N(p.moves + 2)
		}
	}
	g.sent[project] = c
	return project, c
}

// op returns a random operation. It rarely returns DoClose, because a closed wallet accepts no further commands.
func (g *generator) op(m *model, project cloud.ProjectID) ledger.Op {
	if m.wallets[project] == nil && g.r.IntN(3) > 0 {
		return ledger.DoCreate
	}
	if g.r.IntN(4000) == 0 {
		return ledger.DoClose
	}
	sum := 0
	for _, w := range weights {
		sum += w.n
	}
	n := g.r.IntN(sum)
	for _, w := range weights {
		if n -= w.n; n < 0 {
			return w.op
		}
	}
	return ledger.DoTopUp
}

// reservation returns the ID of one of the reservations that occurred last in commands of the project. Sometimes it
// returns an ID that does not exist.
func (g *generator) reservation(project cloud.ProjectID, last int) string {
	all := g.named[project]
	if len(all) == 0 || last > 1 && g.r.IntN(30) == 0 {
		return id(0)
	}
	return id(all[len(all)-1-g.r.IntN(min(last, len(all)))])
}

// amount returns a small amount, or sometimes an edge case such as 0 or the largest int64.
func (g *generator) amount() int64 {
	switch g.r.IntN(60) {
	case 0:
		return 0
	case 1:
		return -g.r.Int64N(100)
	case 2:
		return math.MaxInt64
	case 3:
		return math.MaxInt64 - g.r.Int64N(1000)
	case 4:
		return math.MinInt64
	}
	return 1 + g.r.Int64N(200)
}

func (g *generator) pick(of ...int64) int64 { return of[g.r.IntN(len(of))] }

func (g *generator) ids() [2]string {
	return [2]string{id(int(g.r.Int64N(1e12))), id(int(g.r.Int64N(1e12)))}
}
