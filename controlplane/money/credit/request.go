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

// Request is a command on the wallet of a tenant. The leader sets the command's time, the transaction IDs and the
// principal (the caller's name).
type Request struct {
	// Tenant is the tenant for which the caller was authorized. Its org may be empty if the caller's role applies to
	// all projects.
	Tenant  cloud.Tenant
	Command ledger.Command
	// Body is the hash of the request. If an idempotency key is used again, Body must equal the hash of the first call.
	Body [32]byte
	// account is the account key of the wallet. If it is empty, the request uses the wallet of the project that has the
	// ID now. This field is not sent to the leader.
	account string
}

// Result is the outcome of a request. Replayed is true if an earlier call with the same idempotency key executed the
// request.
type Result struct {
	ledger.Outcome
	Replayed bool
}

// names maps operations to the method names under which idempotency keys are stored. A key that was used for one
// operation can be used again for another.
var names = map[ledger.Op]string{
	ledger.DoCreate: "CreateWallet", ledger.DoTopUp: "TopUpWallet", ledger.DoReserve: "CreateReservation", ledger.DoCommit: "CommitReservation",
	ledger.DoRelease: "ReleaseReservation", ledger.DoExpire: "Expire", ledger.DoRefund: "RefundCharge", ledger.DoCharge: "ChargeWallet",
	ledger.DoSuspend: "SuspendWallet", ledger.DoResume: "ResumeWallet", ledger.DoClose: "CloseWallet",
}

// Check returns InvalidArgument if an ID or a text of the request is malformed. It does not check whether the wallet
// allows the command; package ledger does that.
func (o *Request) Check() error {
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

func (o *Request) checkReservation() error {
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

// repeatable reports whether the request may be sent again after its response was lost. It returns true for operations
// for which executing the request twice has the same effect as executing it once.
func (o *Request) repeatable() bool {
	switch o.Command.Op {
	case ledger.DoCommit, ledger.DoRelease, ledger.DoExpire, ledger.DoSuspend, ledger.DoResume, ledger.DoClose:
		return true
	case ledger.DoReserve:
		return o.Command.Reservation != ""
	}
	return false
}

// Execute executes a request on the leader. If the request is refused, the error is a *fault.Fault and nothing has
// changed.
func (s *Service) Execute(ctx context.Context, o Request) (Result, error) {
	if err := o.Check(); err != nil {
		return Result{}, err
	}
	if o.repeatable() {
		return executeRepeatableCommand.Call(ctx, s.opts.Commands, o)
	}
	return executeOnceCommand.Call(ctx, s.opts.Commands, o)
}

var (
	executeOnceCommand = leader.NewCommand("credit.once", leader.Keyed, (*Service).executeOnLeader)
	// Execute uses executeRepeatableCommand for requests that may be sent again after a lost response (see repeatable),
	// and executeOnceCommand for all others.
	executeRepeatableCommand = leader.NewCommand("credit.again", leader.Repeatable, (*Service).executeOnLeader)
)

// executeOnLeader implements Execute on the leader. Requests for the same wallet that wait at the same time are
// executed together in one transaction.
func (s *Service) executeOnLeader(ctx context.Context, o Request) (Result, error) {
	caller := auth.CallerOf(ctx)
	if caller != nil {
		o.Command.By = caller.Name()
	}
	t, err := newQueuedRequest(caller, o)
	if err != nil {
		return Result{}, err
	}
	if err := s.batchers.queue(ctx, o.Tenant.Project, s.settle, t); err != nil {
		return Result{}, err
	}
	return t.done, t.err
}

// queuedRequest is a request in the queue of its wallet, and its result.
type queuedRequest struct {
	caller  *cloud.Caller
	request Request
	done    Result
	err     error
	// settled is closed when done and err have their final values.
	settled chan struct{}
}

// newQueuedRequest returns the request o with new IDs for its transactions and its reservation. The IDs are generated
// here, because the transaction may run several times before it commits, and must use the same IDs each time.
func newQueuedRequest(caller *cloud.Caller, o Request) (*queuedRequest, error) {
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
	return &queuedRequest{caller: caller, request: o, settled: make(chan struct{})}, nil
}

// settle executes requests on one wallet in one transaction, and stores the result in each request. An error that
// settle returns applies to all of the requests. A refusal, too, is decided in the transaction, so that it is based on
// the newest records.
func (s *Service) settle(ctx context.Context, requests []*queuedRequest) error {
	callers := make([]*cloud.Caller, len(requests))
	for i, t := range requests {
		callers[i] = t.caller
	}
	// Each request's audit entry names the caller of that request. The cost of the transaction's log entry is divided
	// among the budgets of all callers.
	_, err := s.opts.Store.Update(budget.Shared(auth.Without(ctx), callers), func(tx *store.Tx) error {
		for _, t := range requests {
			if err := s.attempt(tx, t); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// attempt executes one request within tx. If the request is refused, it stores the refusal in t and returns nil. It
// returns any other error.
func (s *Service) attempt(tx *store.Tx, t *queuedRequest) error {
	op := t.request.Command.Op
	t.done = Result{}
	t.done.Outcome, t.done.Replayed, t.err = store.Idempotent(tx, t.caller, store.InProject(t.request.Tenant.Project), names[op], t.request.Body,
		func() (ledger.Outcome, error) { return s.carryOut(tx, &t.request) })
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

// carryOut reads the records that the command of o needs, executes the command with ledger.Apply, and writes the
// changed records. If the command is refused, it writes nothing.
func (s *Service) carryOut(tx *store.Tx, o *Request) (out ledger.Outcome, err error) {
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
	} else if err := checkOwner(touched.Wallet, o.Tenant); err != nil {
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

// write stores the records in the outcome of a command. The parameter named before contains the records as they were
// before the command.
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
