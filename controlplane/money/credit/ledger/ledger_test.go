package ledger_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const project cloud.ProjectID = "web"

// testLedger executes commands on one wallet, at times given in seconds, with new transaction IDs.
type testLedger struct {
	*ledgertest.Memory
	made int
}

func newTestLedger() *testLedger { return &testLedger{Memory: ledgertest.NewMemory()} }

func (d *testLedger) do(at int64, c ledger.Command) (ledger.Outcome, error) {
	d.made += 2
	c.IDs = [2]string{fmt.Sprint("t", d.made-1), fmt.Sprint("t", d.made)}
	c.At, c.By, c.Tenant = 1_800_000_000_000+at*1000, "ada", cloud.Tenant{Org: "acme", Project: project}
	return d.Do(project, c)
}

func (d *testLedger) must(t *testing.T, at int64, c ledger.Command) ledger.Outcome {
	t.Helper()
	out, err := d.do(at, c)
	require.NoError(t, err)
	require.NoError(t, d.Audit())
	return out
}

func (d *testLedger) wallet(t *testing.T) ledger.Wallet {
	t.Helper()
	w, err := d.Wallet(project)
	require.NoError(t, err)
	return *w
}

var ops = map[string]ledger.Op{
	"create": ledger.DoCreate, "top-up": ledger.DoTopUp, "reserve": ledger.DoReserve, "commit": ledger.DoCommit, "release": ledger.DoRelease,
	"expire": ledger.DoExpire, "refund": ledger.DoRefund, "charge": ledger.DoCharge, "suspend": ledger.DoSuspend, "resume": ledger.DoResume,
	"close": ledger.DoClose,
}

// TestStories runs scripts on one wallet. `OP [RESERVATION] [amount=] [at=SECONDS] [ttl=SECONDS] [says=TEXT]
// [charge=SEQUENCE] [resource=ID]` executes a command, and prints the reservation, the new transactions and the wallet,
// or the refusal. After each command an audit must find no problem.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		d, at := newTestLedger(), int64(0)
		datadriven.RunTest(t, path, func(t *testing.T, q *datadriven.TestData) string {
			c := ledger.Command{Op: ops[q.Cmd]}
			q.MaybeScanArgs(t, "at", &at)
			q.MaybeScanArgs(t, "amount", &c.Amount)
			q.MaybeScanArgs(t, "ttl", &c.TTL)
			q.MaybeScanArgs(t, "says", &c.Description)
			q.MaybeScanArgs(t, "charge", &c.Charge)
			q.MaybeScanArgs(t, "resource", &c.ResourceID)
			if len(q.CmdArgs) > 0 && len(q.CmdArgs[0].Vals) == 0 {
				c.Reservation = q.CmdArgs[0].Key
			}
			out, err := d.do(at, c)
			require.NoError(t, d.Audit())
			return formatResult(t, c, out, err)
		})
	})
}

func formatResult(t *testing.T, c ledger.Command, out ledger.Outcome, err error) string {
	var b strings.Builder
	if err != nil {
		f, ok := fault.From(err)
		require.True(t, ok, "%v", err)
		return strings.TrimSpace(fmt.Sprintf("%s %s", f.Kind.RPC(), f.Reason)) + ": " + f.Message
	}
	if r := out.Reservation; r != nil {
		fmt.Fprintf(&b, "%s is %s, of %d", r.ID, r.Status, r.Amount)
		if c.Op == ledger.DoRelease {
			fmt.Fprintf(&b, "; released: %v", out.Released)
		}
		b.WriteByte('\n')
	}
	for _, tx := range out.Transactions {
		fmt.Fprintf(&b, "#%d %s %d -> %d", tx.Sequence, tx.Type, tx.Amount, tx.BalanceAfter)
		for _, s := range []string{tx.Description, tx.Reservation, tx.ResourceID} {
			if s != "" {
				b.WriteString(" " + s)
			}
		}
		b.WriteByte('\n')
	}
	if !out.Changed {
		b.WriteString("nothing new\n")
	}
	w := out.Wallet
	fmt.Fprintf(&b, "%s: balance %d = reserved %d + available %d; deposited %d, consumed %d\n",
		w.Status, w.Balance(), w.Reserved(), w.Available(), w.Deposited(), w.Consumed())
	return b.String()
}

// TestSecondCommitChargesNothing executes the same commit twice. The second must charge nothing if it reads the records
// that the first has written. (In the ledger blnk, bug #171, two commits read the same remaining amount and both
// charged it.)
func TestSecondCommitChargesNothing(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 100})
	d.must(t, 0, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 80})
	before, read := d.wallet(t), *d.Reservation(project, "r")
	commit := ledger.Command{Op: ledger.DoCommit, Reservation: "r", Amount: 50, At: 1000, IDs: [2]string{"a", "b"}}
	first, err := ledger.Apply(ledger.Touched{Wallet: &before, Reservation: &read}, commit)
	require.NoError(t, err)
	require.Equal(t, ledger.Pending, read.Status, "Apply must not change the reservation that it read")
	// The second commit either reads what the first has written, or the store refuses its write because of the
	// conflict.
	again, err := ledger.Apply(ledger.Touched{Wallet: &first.Wallet, Reservation: first.Reservation}, commit)
	require.NoError(t, err)
	require.False(t, again.Changed)
	require.Empty(t, again.Transactions)
	require.EqualValues(t, 50, again.Wallet.Consumed())
	// A commit that reads the new wallet and the old reservation must be a Violation.
	_, err = ledger.Apply(ledger.Touched{Wallet: &first.Wallet, Reservation: &read}, commit)
	var v *ledger.Violation
	require.ErrorAs(t, err, &v)
}

// TestHoldsReduceTheAvailableAmount checks that reserved amounts can be neither reserved again nor charged. (In the
// ledger blnk, bug #181, the check of the balance ignored reserved amounts.)
func TestHoldsReduceTheAvailableAmount(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 100})
	d.must(t, 0, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 70})
	for _, op := range []ledger.Op{ledger.DoReserve, ledger.DoCharge} {
		_, err := d.do(1, ledger.Command{Op: op, Reservation: "s", Amount: 31})
		f, _ := fault.From(err)
		require.NotNil(t, f)
		require.Equal(t, "INSUFFICIENT_CREDIT", f.Reason)
		require.EqualValues(t, 30, f.Details["available"])
	}
	d.must(t, 1, ledger.Command{Op: ledger.DoReserve, Reservation: "s", Amount: 30})
}

// TestSecondReleaseHasNoEffect releases a reservation twice. The second release must return no credit. (In the ledger
// blnk, bug #41, a reservation that was voided twice was returned twice.)
func TestSecondReleaseHasNoEffect(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 100})
	d.must(t, 0, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 70})
	require.Len(t, d.must(t, 1, ledger.Command{Op: ledger.DoRelease, Reservation: "r"}).Transactions, 1)
	again := d.must(t, 2, ledger.Command{Op: ledger.DoRelease, Reservation: "r"})
	require.True(t, again.Released)
	require.Empty(t, again.Transactions)
	require.EqualValues(t, 100, again.Wallet.Available())
	// DoExpire after the deadline must not change the released reservation.
	require.False(t, d.must(t, 1000, ledger.Command{Op: ledger.DoExpire, Reservation: "r"}).Changed)
}

// TestRefusedReservationCannotBeCommitted checks that a reservation that was refused does not exist. (In the ledger
// blnk, bug #182, it could be committed.)
func TestRefusedReservationCannotBeCommitted(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 10})
	_, err := d.do(0, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 11})
	require.True(t, fault.Is(err, fault.ResourceExhausted))
	for _, op := range []ledger.Op{ledger.DoCommit, ledger.DoRelease, ledger.DoExpire} {
		_, err = d.do(1, ledger.Command{Op: op, Reservation: "r"})
		require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	}
	require.EqualValues(t, 1, d.wallet(t).Sequence)
}

// TestCommitRacesRelease executes a commit and a release of one reservation in both orders. The first must succeed, and
// the second be refused.
func TestCommitRacesRelease(t *testing.T) {
	for _, first := range []ledger.Op{ledger.DoCommit, ledger.DoRelease} {
		d := newTestLedger()
		d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 100})
		d.must(t, 0, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 40})
		second := ledger.DoCommit + ledger.DoRelease - first
		d.must(t, 1, ledger.Command{Op: first, Reservation: "r"})
		_, err := d.do(1, ledger.Command{Op: second, Reservation: "r"})
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
		w := d.wallet(t)
		require.Zero(t, w.Reserved())
		require.EqualValues(t, map[ledger.Op]int64{ledger.DoCommit: 40, ledger.DoRelease: 0}[first], w.Consumed())
	}
}

func TestNothingOverflows(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: math.MaxInt64 - 5})
	_, err := d.do(0, ledger.Command{Op: ledger.DoTopUp, Amount: 6})
	f, _ := fault.From(err)
	require.NotNil(t, f)
	require.Equal(t, "OVERFLOW", f.Reason)
	d.must(t, 0, ledger.Command{Op: ledger.DoTopUp, Amount: 5})
	// The total of all movements may exceed an int64, but the amount of a single one may not.
	for n := range int64(5) {
		id := fmt.Sprint("r", n)
		d.must(t, n, ledger.Command{Op: ledger.DoReserve, Reservation: id, Amount: math.MaxInt64})
		d.must(t, n, ledger.Command{Op: ledger.DoRelease, Reservation: id})
	}
	w := d.wallet(t)
	last := &ledger.Transaction{Totals: w.Totals, Sequence: w.Sequence, BalanceAfter: w.Balance()}
	_, err = ledger.Between(nil, last)
	require.True(t, fault.Is(err, fault.OutOfRange), "%v", err)
	before := *last
	out := d.must(t, 9, ledger.Command{Op: ledger.DoReserve, Reservation: "last", Amount: math.MaxInt64})
	s, err := ledger.Between(&before, &out.Transactions[0])
	require.NoError(t, err)
	require.EqualValues(t, math.MaxInt64, s.Of(ledger.Hold))
	require.EqualValues(t, 1, s.Transactions)
}

func TestReservationsAreBounded(t *testing.T) {
	w := ledger.Wallet{Status: ledger.Active, Pending: ledger.MaxPending, Accounts: ledger.Accounts{Funding: -2e6, Wallet: 1e6, Held: 1e6}}
	_, err := ledger.Apply(ledger.Touched{Wallet: &w}, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 1, IDs: [2]string{"a"}})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
}

func TestStatement(t *testing.T) {
	d := newTestLedger()
	d.must(t, 0, ledger.Command{Op: ledger.DoCreate, Amount: 100})
	d.must(t, 1, ledger.Command{Op: ledger.DoReserve, Reservation: "r", Amount: 40})
	open := d.must(t, 2, ledger.Command{Op: ledger.DoTopUp, Amount: 7}).Transactions[0]
	d.must(t, 3, ledger.Command{Op: ledger.DoCommit, Reservation: "r", Amount: 30})
	d.must(t, 4, ledger.Command{Op: ledger.DoCharge, Amount: 5})
	end := d.must(t, 5, ledger.Command{Op: ledger.DoRefund, Charge: 4, Amount: 12}).Transactions[0]
	s, err := ledger.Between(&open, &end)
	require.NoError(t, err)
	require.Equal(t, ledger.Statement{Opening: 107, Closing: 84, Moved: [6]int64{0, 0, 30, 10, 12, 5}, Transactions: 4}, s)
	s, err = ledger.Between(nil, &open)
	require.NoError(t, err)
	require.Equal(t, ledger.Statement{Closing: 107, Moved: [6]int64{107, 40}, Transactions: 3}, s)
	s, err = ledger.Between(nil, nil)
	require.NoError(t, err)
	require.Zero(t, s)
}
