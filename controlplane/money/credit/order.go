package credit

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Order is a command on a tenant's wallet. Its time, its ids and who gave it are filled in where it is carried out.
type Order struct {
	// Tenant was let in. Its org may be empty for who acts in every project.
	Tenant  cloud.Tenant
	Command ledger.Command
	// Body is the hash of the request, for its idempotency key.
	Body [32]byte
	// account, if set, is the account key of the wallet; otherwise the project that has the ID now determines the
	// wallet. The field is not sent to the leader.
	account string
}

// Done is what came of an order, now or when the same was given before.
type Done struct {
	ledger.Outcome
	Replayed bool
}

// names of the operations, as idempotency keys know them: a key is good for one operation.
var names = map[ledger.Op]string{
	ledger.DoCreate: "CreateWallet", ledger.DoTopUp: "TopUpWallet", ledger.DoReserve: "CreateReservation", ledger.DoCommit: "CommitReservation",
	ledger.DoRelease: "ReleaseReservation", ledger.DoExpire: "Expire", ledger.DoRefund: "RefundCharge", ledger.DoCharge: "ChargeWallet",
	ledger.DoSuspend: "SuspendWallet", ledger.DoResume: "ResumeWallet", ledger.DoClose: "CloseWallet",
}

// Check says whether an order can be understood at all; whether it may be done is the ledger's to say.
func (o *Order) Check() error {
	c := &o.Command
	if err := cloud.CheckCallerID("project_id", string(o.Tenant.Project)); err != nil {
		return err
	}
	if o.Tenant.Org != "" || c.Op == ledger.DoCreate {
		if err := cloud.CheckCallerID("org_id", string(o.Tenant.Org)); err != nil {
			return err
		}
	}
	if err := o.checkReservation(); err != nil {
		return err
	}
	field := "description"
	if c.Op == ledger.DoRelease {
		field = "reason"
	}
	for _, text := range []struct {
		field, value string
		most         int
	}{{field, c.Description, maxDescription}, {"resource_type", c.ResourceType, maxResourceType}, {"resource_id", c.ResourceID, maxResourceID}} {
		if err := checkText(text.field, text.value, text.most); err != nil {
			return err
		}
	}
	return nil
}

func (o *Order) checkReservation() error {
	switch o.Command.Op {
	case ledger.DoReserve:
		if o.Command.Reservation == "" {
			return nil
		}
	case ledger.DoCommit, ledger.DoRelease, ledger.DoExpire:
	default:
		return nil
	}
	return cloud.CheckUUID("reservation_id", o.Command.Reservation)
}

// repeatable reports whether giving the order again does no harm.
func (o *Order) repeatable() bool {
	switch o.Command.Op {
	case ledger.DoCommit, ledger.DoRelease, ledger.DoExpire, ledger.DoSuspend, ledger.DoResume, ledger.DoClose:
		return true
	case ledger.DoReserve:
		return o.Command.Reservation != ""
	}
	return false
}

// Give has an order carried out by the leader. A refusal is a *fault.Fault, and nothing has happened.
func (s *Service) Give(ctx context.Context, o Order) (Done, error) {
	if err := o.Check(); err != nil {
		return Done{}, err
	}
	if o.repeatable() {
		return giveAgainCommand.Call(ctx, s.opts.Commands, o)
	}
	return giveOnceCommand.Call(ctx, s.opts.Commands, o)
}

var (
	giveOnceCommand = leader.NewCommand("credit.once", leader.Keyed, (*Service).giveOnLeader)
	// giveAgainCommand is for orders that are repeatable.
	giveAgainCommand = leader.NewCommand("credit.again", leader.Repeatable, (*Service).giveOnLeader)
)

// giveOnLeader is Give on the leader. Orders on one wallet that wait at the same time share a transaction.
func (s *Service) giveOnLeader(ctx context.Context, o Order) (Done, error) {
	caller := auth.CallerOf(ctx)
	if caller != nil {
		o.Command.By = caller.Name()
	}
	t, err := newTicket(caller, o)
	if err != nil {
		return Done{}, err
	}
	if err := s.desks.queue(ctx, o.Tenant.Project, s.settle, t); err != nil {
		return Done{}, err
	}
	return t.done, t.err
}

// ticket is an order that waits for its turn.
type ticket struct {
	caller *cloud.Caller
	order  Order
	done   Done
	err    error
	// settled is closed when done and err are as they stay.
	settled chan struct{}
}

// newTicket draws the ids that the order may need, once: it may be carried out several times until it is agreed on.
func newTicket(caller *cloud.Caller, o Order) (*ticket, error) {
	made := make([]string, 3)
	for i := range made {
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("draw ids: %w", err)
		}
		made[i] = id.String()
	}
	o.Command.IDs = [2]string{made[0], made[1]}
	if o.Command.Op == ledger.DoReserve && o.Command.Reservation == "" {
		o.Command.Reservation = made[2]
	}
	return &ticket{caller: caller, order: o, settled: make(chan struct{})}, nil
}

// settle carries out tickets on one wallet in one transaction, which sees to it that a "no", too, stands on the newest
// records. Its error is that of all of them; else each has its own.
func (s *Service) settle(ctx context.Context, tickets []*ticket) error {
	callers := make([]*cloud.Caller, len(tickets))
	for i, t := range tickets {
		callers[i] = t.caller
	}
	// The audit records each order under its own caller, whose budget is charged a part of the log entry.
	_, err := s.opts.Store.Update(budget.Shared(auth.Without(ctx), callers), func(tx *store.Tx) error {
		for _, t := range tickets {
			if err := s.attempt(tx, t); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// attempt carries out one ticket. Only a failure of ours is an error; a refusal is the ticket's.
func (s *Service) attempt(tx *store.Tx, t *ticket) error {
	op := t.order.Command.Op
	t.done = Done{}
	t.done.Outcome, t.done.Replayed, t.err = store.Idempotent(tx, t.caller, store.InProject(t.order.Tenant.Project), names[op], t.order.Body,
		func() (ledger.Outcome, error) { return s.carryOut(tx, &t.order) })
	if t.err != nil {
		if _, refused := fault.From(t.err); refused {
			return nil
		}
		s.note(t.err)
		return t.err
	}
	if t.done.Changed && t.caller != nil {
		audit.Add(tx, t.caller)
	}
	return nil
}

// carryOut reads what the ledger wants to see, and writes what it says.
func (s *Service) carryOut(tx *store.Tx, o *Order) (out ledger.Outcome, err error) {
	p, of, c := Project{}, o.account, o.Command
	if of == "" {
		if p, err = s.lookUp(tx, o.Tenant.Project); err != nil {
			return out, err
		}
		of = accountOf(o.Tenant.Project, p.Incarnation)
	}
	c.At, c.Tenant = tx.Now(), o.Tenant
	var touched ledger.Touched
	if touched.Wallet, err = wallets.Get(tx, of); err != nil {
		return out, err
	}
	if c.Op == ledger.DoCreate {
		if err := p.mayCreate(o.Tenant); err != nil {
			return out, err
		}
	} else if err := isOf(touched.Wallet, o.Tenant); err != nil {
		return out, err
	}
	if c.Reservation != "" {
		if touched.Reservation, err = reservations.Get(tx, of, c.Reservation); err != nil {
			return out, err
		}
		if err := mayEnd(touched.Reservation, &c); err != nil {
			return out, err
		}
	}
	if c.Charge != 0 {
		if touched.Charge, err = transactions.Get(tx, of, number(c.Charge)); err != nil {
			return out, err
		}
		refunded, err := refunds.Get(tx, of, number(c.Charge))
		if err != nil {
			return out, err
		}
		if refunded != nil {
			touched.Refunded = *refunded
		}
	}
	if out, err = ledger.Apply(touched, c); err != nil || !out.Changed {
		return out, err
	}
	if c.Op == ledger.DoCreate {
		out.Wallet.Incarnation = p.Incarnation
	}
	write(tx, touched, &c, &out)
	return out, nil
}

// write puts an outcome into the records.
func write(tx *store.Tx, before ledger.Touched, c *ledger.Command, out *ledger.Outcome) {
	of := account(&out.Wallet)
	wallets.Put(tx, &out.Wallet, of)
	for i := range out.Transactions {
		transactions.Put(tx, &out.Transactions[i], of, number(out.Transactions[i].Sequence))
	}
	if before.Charge != nil {
		refunds.Put(tx, &out.Refunded, of, number(c.Charge))
	}
	r, was := out.Reservation, before.Reservation
	if r == nil || was != nil && *was == *r {
		return
	}
	reservations.Put(tx, r, of, r.ID)
	row := []string{number(r.Deadline), of, r.ID}
	if r.Status == ledger.Pending {
		due.Put(tx, &struct{}{}, row...)
	} else {
		due.Delete(tx, row...)
	}
}
