// Package billing charges projects for their VMs and volumes by the hour. It defines the prices, counts the hours,
// charges the wallets, and applies the policy for projects that cannot pay.
//
// The hours of each VM are counted separately: the first begins when the VM is created, the next an hour later. An hour
// is billed when it begins, for the resources that the VM uses at that time. Its final price is that of the most
// expensive use within the hour: if the use rises within the hour (the VM starts, or is resized), the difference is
// billed at that moment. So an hour that has begun is paid in full, a start and a stop within one hour cost one hour,
// and the total does not depend on when or how often bills are computed.
//
//   - A RUNNING or MIGRATING VM pays for processors, memory and disks. A PENDING, CREATING or FAILED VM costs nothing.
//     In every other state a VM pays for its disks. The recorded state counts: a VM whose host does not report, or that
//     ran while no member did, counts as running until a report changes the record.
//   - Memory is priced per MiB. The price of an hour is rounded up to a whole unit of credit.
//   - A resize (UpdateVm, AttachDisk) counts from the moment it is recorded. Prices are those of the leader's
//     configuration when an hour is billed: new prices apply from each VM's next hour or change.
//   - Time is the store's clock, which never goes back. If the clock jumps ahead, the skipped hours are billed, as
//     after an outage.
//
// A project pays for the size of each of its volumes from the creation to the deletion of the volume. The price is the
// same for all storage classes, and for attached and detached volumes, because a detached volume also takes storage
// space and counts in the quota. The hours of a volume are counted like those of a VM. The transaction that creates a
// volume reserves the price of the first hour and makes the bill for this hour. A project with unpaid bills cannot
// create volumes. Unpaid volumes are never deleted or detached. With the policy Stop, no VM of the project can be
// started until the project has paid all bills.
//
// Counting and paying are separate. A Meter records the time up to which a VM's hours are counted. It is updated in the
// transaction that writes the Bill: the transaction of the VM's change (package vm calls vm.Billing), or one of Run. A
// bill is reduced or deleted in the transaction that charges the wallet for it. Neither step needs the other, a lock,
// or state in memory: even if a run is interrupted, or two leaders run at once, each hour is billed once and each bill
// is charged once.
//
// Creating a VM reserves the price of one running hour in the same transaction, so neither exists without the other.
// The VM's first bill commits the reservation: the bill for the hour in which the VM first runs, or for the disks of a
// built VM that is off at the end of an hour. A VM that is not built yet, or could not be built, costs nothing. Its
// reservation is released when the VM fails or is deleted.
//
// Bills are paid oldest first, with at least one wallet transaction per hour. If the wallet does not exist, is not
// active, or has too little for the next hour, the bill stays owed, and is charged first when there is credit again.
// Until then the project cannot create VMs. With the policy Keep, running VMs continue. With Stop, the VMs of unpaid
// bills are stopped, and no VM can start until the project owes nothing and its wallet covers the hour. Under both
// policies stopped VMs continue to owe for their disks, and the unpaid hour stays owed, because it had begun.
//
// Unpaid hours of a deleted project are written off: its wallet was closed before the deletion, or never existed.
//
// Run compares VMs with meters. It finds VMs that were created before billing was enabled, or changed while it was not;
// they are billed from then on. Hours that pass while billing is disabled cost nothing.
//
// Billing depends on VMs and wallets, but not on endpoints or hosts. An inconsistent wallet (ledger.Violation) blocks
// its own project's payments, but never a VM's report or removal.
//
// Keys: billing-meter/<project>/<vm>, billing-next/<when>/<project>/<vm>, billing-owed/<project>/<from>/<vm>/<number>.
// Times and numbers are written as 16 hexadecimal digits.
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
	// next is a table with an empty record for each meter whose VM uses billable resources. The records are ordered by
	// the time at which the VM's next hour begins.
	next = store.NewTable[struct{}]("billing-next")
	owed = store.NewTable[Bill]("billing-owed")
)

// Policy defines what happens to running VMs whose hours are not paid.
type Policy string

const (
	// Keep means that the VMs continue to run.
	Keep Policy = "keep"
	// Stop means that the VMs are stopped.
	Stop Policy = "stop"
)

// Rules configures billing. The zero value disables billing.
type Rules struct {
	Enabled bool
	Prices  Prices
	OnEmpty Policy
	// Hour is the length of a billed hour; 0 means one hour. Other values are for tests.
	Hour time.Duration
}

// Check returns an error if a price, the policy or the length of the hour is invalid.
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

// Machines is the part of package vm's Service that billing calls.
type Machines interface {
	// Halt stops a VM within tx and returns true. It returns false if the VM is already off, or is already to be off.
	Halt(tx *store.Tx, t cloud.Tenant, id cloud.VMID) (bool, error)
}

// Options configures New; all fields are required.
type Options struct {
	Store   *store.Store
	Credits *credit.Service
	Log     *slog.Logger
	Rules   Rules
}

// Service implements billing on one member.
type Service struct {
	opts     Options
	terms    Terms
	machines Machines
	// payFrom, vmFrom, meterFrom and volumeFrom are the paths of records at which the next Run continues: payFrom for
	// charging projects, vmFrom for comparing VMs, meterFrom for comparing meters, and volumeFrom for comparing
	// volumes. Each Run processes only a part of the records.
	payFrom, vmFrom, meterFrom, volumeFrom []string
	debtors                                debtors
}

// New returns a Service. Call Attach before the service is used.
func New(opts Options) *Service {
	if opts.Rules.Hour == 0 {
		opts.Rules.Hour = time.Hour
	}
	return &Service{opts: opts, terms: Terms{Prices: opts.Rules.Prices, Hour: opts.Rules.Hour.Milliseconds()}}
}

// Attach sets the service that stops VMs whose hours are not paid.
func (s *Service) Attach(m Machines) { s.machines = m }

// number encodes n as 16 hexadecimal digits, so that keys that contain it sort numerically.
func number[N uint64 | int64](n N) string { return fmt.Sprintf("%016x", uint64(n)) }

// put stores a changed meter (the record that counts the hours of a VM), its record in the table next, and the new
// bills. m is the meter after the change, and the parameter named was is the meter before it. A bill is merged into the
// VM's last bill if that is possible (see Join). If billing is disabled, put stores no bills.
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

// at returns the path of the record of a bill of the meter's VM. p is the position of the bill.
func (m *Meter) at(p Place) []string {
	return []string{string(m.Project), number(p.From), string(m.VM), number(p.Number)}
}

func (m *Meter) row(at cloud.Time) []string {
	return []string{number(at), string(m.Project), string(m.VM)}
}

// deleteMeter deletes the meter m of a VM (the record that counts the VM's hours), and the record of m in the table
// next.
func deleteMeter(tx *store.Tx, m *Meter) {
	next.Delete(tx, m.row(m.Until)...)
	meters.Delete(tx, string(m.Project), string(m.VM))
}
