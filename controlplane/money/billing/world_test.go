package billing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/node/nodetest"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// world is a member that leads, with VMs, wallets and billing, its records in memory and one simulated host.
type world struct {
	*nodetest.World
	t       testing.TB
	store   *store.Store
	credits *credit.Service
	vms     *vm.Service
	bills   *Service
	host    cloud.NodeID
}

var (
	acme = cloud.Tenant{Org: "acme", Project: "web"}
	evil = cloud.Tenant{Org: "evil", Project: "lair"}
	// With prices, an hour of the VM small costs 10 × 2 + 4 × 1/2 + 1 × 5 = 27 while it runs, and 5 while it is off.
	prices = Prices{VCPUHour: 10, MemoryGiBHour: 4, DiskGiBHour: 1}
	on     = Rules{Enabled: true, Prices: prices}
	strict = Rules{Enabled: true, Prices: prices, OnEmpty: Stop}
)

const (
	running = 27
	off     = 5
)

// hour is the default length of a billed hour.
const hour = time.Hour

func newWorld(t testing.TB, rules Rules) *world {
	base := nodetest.New(t, func(o *node.Options) {
		began := o.Now()
		o.Now = func() time.Time { return began } // heartbeats never time out
	}, acme, evil)
	w := &world{World: base, t: t, store: base.Store}
	w.credits = credit.New(credit.Options{Store: w.store, Commands: w.Commands, Log: w.Log, Project: lookUp})
	w.bills = w.member(rules)
	o := vm.Options{Store: w.store, Commands: w.Commands, Nodes: w.Nodes, Log: w.Log}
	if rules.Enabled {
		o.Billing = w.bills
	}
	w.vms = vm.New(o)
	w.bills.Attach(w.vms)
	w.Attach(w.vms)
	w.host = w.AddHost("h1", cloud.Capacity{VCPUs: 1 << 20, MemoryMiB: 1 << 30, StorageGiB: 1 << 30})
	return w
}

// lookUp returns what wallets need of a project's record. Package main of the control plane has the same function.
func lookUp(r store.Reader, id cloud.ProjectID) (credit.Project, error) {
	p, err := tenant.Projects.Get(r, string(id))
	if err != nil || p == nil {
		return credit.Project{}, err
	}
	return credit.Project{Exists: p.DeletedAt == 0, Org: p.Org, Incarnation: p.Incarnation}, nil
}

// member returns the billing service of another member that has these rules.
func (w *world) member(rules Rules) *Service {
	s := New(Options{Store: w.store, Credits: w.credits, Log: slog.New(slog.DiscardHandler), Rules: rules})
	if w.vms != nil {
		s.Attach(w.vms)
	}
	return s
}

// as returns the context of a call by a project member of the tenant t.
func (w *world) as(t cloud.Tenant) context.Context {
	return auth.With(w.t.Context(), &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}, auth.RPC)
}

// order executes a command on the wallet of acme.
func (w *world) order(c ledger.Command) {
	w.t.Helper()
	_, err := w.credits.Execute(w.as(acme), credit.Request{Tenant: acme, Command: c})
	require.NoError(w.t, err)
}

func (w *world) fund(amount int64)  { w.order(ledger.Command{Op: ledger.DoCreate, Amount: amount}) }
func (w *world) topUp(amount int64) { w.order(ledger.Command{Op: ledger.DoTopUp, Amount: amount}) }

// small returns a request for a VM with 2 vCPUs, 512 MiB of memory and a disk of 5 GiB.
func small(name string) vm.CreateRequest {
	return vm.CreateRequest{Name: name, Spec: cloud.Spec{
		CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 512}, Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 5}},
	}}
}

func (w *world) tryCreate(name string) (cloud.VMID, error) {
	made, err := w.vms.Create(w.as(acme), acme, small(name), [32]byte{})
	return made.VM.ID, err
}

func (w *world) create(name string) cloud.VMID {
	w.t.Helper()
	id, err := w.tryCreate(name)
	require.NoError(w.t, err)
	return id
}

func (w *world) get(id cloud.VMID) (m *cloud.VM) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) (err error) {
		m, err = vm.VMs.Get(v, string(acme.Project), string(id))
		return err
	}))
	return m
}

// reportObserved reports the observation level for the VM's current generation, as its host.
func (w *world) reportObserved(id cloud.VMID, level cloud.Observed, change ...func(*cloud.Observation)) {
	w.t.Helper()
	m := w.get(id)
	o := cloud.Observation{
		VM: id, Generation: m.Generation, Observed: level, StartsDone: m.Desired.Starts, RebootsDone: m.Desired.Reboots, ResetsDone: m.Desired.Resets,
	}
	for _, f := range change {
		f(&o)
	}
	_, err := w.vms.Observed(w.t.Context(), w.host, []cloud.Observation{o})
	require.NoError(w.t, err)
}

// callPower makes a power call. When wished returns true for the VM's record, it reports the observation in then as the
// host. It returns the error of the call.
func (w *world) callPower(id cloud.VMID, wished func(*cloud.VM) bool, call func() error, then cloud.Observed) error {
	w.t.Helper()
	ended := make(chan error, 1)
	ctx, stop := context.WithCancel(w.t.Context())
	defer stop()
	var refused error
	go func() {
		err := call()
		if err != nil {
			stop() // the call was refused, so the record will not change
		}
		ended <- err
	}()
	_, err := store.Await(ctx, w.store, vm.VMs, func(m *cloud.VM) (bool, error) { return m == nil || wished(m), nil }, string(acme.Project), string(id))
	if err != nil {
		refused = <-ended
		require.Error(w.t, refused)
		return refused
	}
	if w.get(id) != nil {
		w.reportObserved(id, then)
	}
	return <-ended
}

func (w *world) start(id cloud.VMID) error {
	w.t.Helper()
	return w.callPower(id, func(m *cloud.VM) bool { return m.Desired.On }, func() error {
		_, err := w.vms.Start(w.as(acme), acme, id, [32]byte{})
		return err
	}, cloud.ObservedRunning)
}

func (w *world) stop(id cloud.VMID) {
	w.t.Helper()
	require.NoError(w.t, w.callPower(id, func(m *cloud.VM) bool { return !m.Desired.On }, func() error {
		_, err := w.vms.Stop(w.as(acme), acme, id, 30*time.Second, [32]byte{})
		return err
	}, cloud.ObservedEnded))
}

// delete deletes a VM, and reports it absent as its host.
func (w *world) delete(id cloud.VMID) error {
	w.t.Helper()
	m := w.get(id)
	_, err := w.vms.Delete(w.as(acme), acme, id, false, [32]byte{})
	if err != nil {
		return err
	}
	_, err = w.vms.Observed(w.t.Context(), w.host, []cloud.Observation{{VM: id, Generation: m.Generation + 1, Observed: cloud.ObservedAbsent}})
	return err
}

// run creates a VM, starts it, and returns it when it is running.
func (w *world) run(name string) cloud.VMID {
	w.t.Helper()
	id := w.create(name)
	w.reportObserved(id, cloud.ObservedBuilt)
	require.NoError(w.t, w.start(id))
	require.Equal(w.t, cloud.Running, w.get(id).State)
	return id
}

// bill calls Run once.
func (w *world) bill() { w.t.Helper(); require.NoError(w.t, w.bills.Run(w.t.Context())) }

func (w *world) wallet() *ledger.Wallet {
	w.t.Helper()
	found, err := w.credits.Wallet(w.t.Context(), acme)
	require.NoError(w.t, err)
	return found
}

// figures returns the consumed, reserved and available amounts of the wallet, in this order.
func (w *world) figures() [3]int64 {
	w.t.Helper()
	f := w.wallet()
	return [3]int64{f.Consumed(), f.Reserved(), f.Available()}
}

// transactions returns all transactions of the wallet, oldest first.
func (w *world) transactions(t testing.TB) []*ledger.Transaction {
	var all []*ledger.Transaction
	for token := ""; ; {
		page, next, err := w.credits.Transactions(t.Context(), acme, credit.Filter{}, 1000, token)
		require.NoError(t, err)
		all = append(all, page...)
		if token = next; token == "" {
			return all
		}
	}
}

// unpaidBills returns the unpaid bills of acme and the sum that is owed for them.
func (w *world) unpaidBills() (bills []Bill, sum int64) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		rows, _, err := owed.List(v, 0, string(acme.Project))
		for _, r := range rows {
			bills = append(bills, *r.Value)
			sum += r.Value.Total()
		}
		return err
	}))
	return bills, sum
}

// clean returns an error if an audit finds an inconsistent wallet, or if the wallet has two transactions of the same
// ID.
func (w *world) clean() error {
	err := w.credits.Audit(w.t.Context(), func(f credit.Finding) error {
		if f.Problem != "" {
			return fmt.Errorf("%s: %s", f.Project, f.Problem)
		}
		return nil
	})
	seen := map[string]bool{}
	for _, tx := range w.transactions(w.t) {
		if seen[tx.ID] {
			err = errors.Join(err, fmt.Errorf("transaction %s is listed twice: %s", tx.ID, tx.Description))
		}
		seen[tx.ID] = true
	}
	return err
}
