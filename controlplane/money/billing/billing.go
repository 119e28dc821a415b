// Package billing makes VMs cost credit: what an hour costs, whose hours have begun, who pays, and what happens when
// nobody can.
//
// Hours are a VM's own: the first begins when it is created, the next an hour later. An hour is billed when it begins, at
// what the VM is then, and costs in the end what the dearest use in it costs: when that rises within the hour (the VM
// starts, or comes back larger), the rest is billed at that moment. So an hour that has begun is a whole hour, a start
// and a stop within one cost one hour, and the sum does not depend on who looks, or when.
//
//   - A VM that is RUNNING or MIGRATING pays for processors, memory and disks, in every other state but the following for
//     its disks; PENDING, CREATING and FAILED cost nothing. What is recorded counts: a VM whose host is silent, or that
//     ran while no member did, has run until a report says otherwise.
//   - Memory counts by the MiB; the price of an hour is rounded up to a whole unit of credit.
//   - Another shape (UpdateVm, AttachDisk) counts from the moment that it is recorded. Prices are those of the leader's
//     configuration when an hour is billed: a new table counts from each VM's next hour or change.
//   - Time is the store's, which never goes back. A clock that jumps ahead makes hours begin, as an outage does.
//
// Counting and paying are apart. A Meter a VM says up to when its hours are counted; it moves in the transaction that
// writes the Bill, be that the change of the VM itself (package vm tells, through vm.Billing) or the leader's task. A bill
// goes in the transaction that charges the wallet for it. Neither needs the other, a lock, or memory: a run that is cut
// anywhere, and two leaders at a time, bill each hour once and charge each bill once.
//
// Creating a VM reserves an hour of it running, in the same transaction: there is neither without the other. Its first
// bill commits the reservation: the one for the hour in which it first runs, or for the disks of one that was built and is
// off at the end of an hour. What goes before that, or cannot be built, costs nothing, and the reservation is released.
//
// Bills are paid oldest first, each hour its own transaction of the wallet. When a wallet is not there, not active, or has
// too little for the next hour, what is owed stays, and is charged first when there is credit again. Until then the project
// creates no VMs. With the policy Keep what runs runs on; with Stop the VMs of unpaid bills are stopped, and no VM is
// started until the wallet has paid and covers the hour. Under both, stopped VMs go on owing for their disks, and the hour
// that could not be paid stays owed: it had begun.
//
// Unpaid hours of a deleted project are written off: its wallet was closed before the deletion, or it had none.
//
// A VM that was there before billing was enabled, or changed while it was not, is found by comparison, and billed from
// then on. Hours that pass while billing is not enabled cost nothing.
//
// Billing knows VMs and wallets, and neither edges nor hosts. A wallet that does not add up (ledger.Violation) holds up
// its own project's payments, never a VM's report or removal.
//
// Keys: billing-meter/<project>/<vm>, billing-next/<when>/<project>/<vm>, billing-owed/<project>/<from>/<vm>/<number>;
// numbers as 16 hexadecimal digits.
package billing

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	meters = store.NewTable[Meter]("billing-meter")
	// next has a row for each meter whose VM uses anything, by the beginning of its next hour.
	next = store.NewTable[struct{}]("billing-next")
	owed = store.NewTable[Bill]("billing-owed")
)

// Policy is what happens to running VMs that are not paid for.
type Policy string

const (
	// Keep lets them run.
	Keep Policy = "keep"
	// Stop stops them.
	Stop Policy = "stop"
)

// Rules of billing. The zero value is none.
type Rules struct {
	Enabled bool
	Prices  Prices
	OnEmpty Policy
	// Hour is how long an hour is; 0 is an hour. Anything else is for tests.
	Hour time.Duration
}

// Check says what cannot work.
func (r *Rules) Check() error {
	if err := r.Prices.Check(); err != nil {
		return err
	}
	switch {
	case r.OnEmpty != "" && r.OnEmpty != Keep && r.OnEmpty != Stop:
		return fmt.Errorf("on_empty must be %s or %s, got %q", Keep, Stop, r.OnEmpty)
	case r.Enabled && r.Prices == Prices{}:
		return errors.New("without any price nothing is billed: set prices, or do not enable it")
	case r.Hour != 0 && (r.Hour < time.Second || r.Hour > time.Hour || r.Hour%time.Millisecond != 0):
		return fmt.Errorf("an hour for tests must be 1s to 1h, got %s", r.Hour)
	}
	return nil
}

// Machines is what billing does to VMs.
type Machines interface {
	// Halt stops a VM, unless it is off or wanted off already, and says whether it did.
	Halt(tx *store.Tx, t cloud.Tenant, id cloud.VMID) (bool, error)
}

// Options of the service; all are required.
type Options struct {
	Store   *store.Store
	Credits *credit.Service
	Log     *slog.Logger
	Rules   Rules
}

// Service is the billing of one member.
type Service struct {
	opts     Options
	terms    Terms
	machines Machines
	// payFrom, vmFrom and meterFrom are where the leader's task goes on: it looks at a part of them in each run.
	payFrom, vmFrom, meterFrom []string
	debtors                    debtors
}

// New makes the service.
func New(opts Options) *Service {
	if opts.Rules.Hour == 0 {
		opts.Rules.Hour = time.Hour
	}
	return &Service{opts: opts, terms: Terms{Prices: opts.Rules.Prices, Hour: opts.Rules.Hour.Milliseconds()}}
}

// Attach gives the service what it stops VMs with. Call it before serving.
func (s *Service) Attach(m Machines) { s.machines = m }

// number is a number as a part of a key, in whose order it stands.
func number[N uint64 | int64](n N) string { return fmt.Sprintf("%016x", uint64(n)) }

// put writes a meter, its place in the order of next hours, and what it billed.
func (s *Service) put(tx *store.Tx, was, m *Meter, bills ...*Bill) error {
	for _, b := range bills {
		if b == nil || !s.opts.Rules.Enabled {
			continue
		}
		last, err := owed.Get(tx, m.at(m.Last)...)
		if err != nil {
			return err
		}
		if last != nil && last.Join(b) {
			b = last
		} else {
			m.Last = Place{b.From, b.Number}
		}
		owed.Put(tx, b, m.at(m.Last)...)
	}
	if was.Until != m.Until || was.Use != m.Use {
		next.Delete(tx, m.row(was.Until)...)
	}
	if m.Use != (Use{}) {
		next.Put(tx, &struct{}{}, m.row(m.Until)...)
	}
	meters.Put(tx, m, string(m.Project), string(m.VM))
	return nil
}

// at is the path of a bill, row that of a place in the order of next hours.
func (m *Meter) at(p Place) []string {
	return []string{string(m.Project), number(p.From), string(m.VM), number(p.Number)}
}

func (m *Meter) row(at cloud.Time) []string {
	return []string{number(at), string(m.Project), string(m.VM)}
}

// drop removes a meter.
func drop(tx *store.Tx, m *Meter) {
	next.Delete(tx, m.row(m.Until)...)
	meters.Delete(tx, string(m.Project), string(m.VM))
}
