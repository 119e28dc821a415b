package vm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) quota(q tenant.Quota) {
	w.update(func(tx *store.Tx) { require.NoError(w.t, tenant.SetQuota(tx, acme.Project, q)) })
}

// quotaUsage returns the stored quota usage of the project, and checks that it equals the sum over the project's VMs.
func (w *world) quotaUsage() (used tenant.Amount) {
	w.t.Helper()
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) (err error) {
		if used, err = tenant.Used(v, acme.Project); err != nil {
			return err
		}
		var sum tenant.Amount
		all, _, err := VMs.List(v, 0, string(acme.Project))
		for _, r := range all {
			sum = sum.Plus(amountOf(r.Value))
		}
		require.Equal(w.t, sum, used, "the stored quota usage must equal the sum over the VMs")
		return err
	}))
	return used
}

func (w *world) try(name string, change ...func(*CreateRequest)) error {
	q := small(name, change...)
	_, err := w.vms.Create(w.as(acme, ""), acme, q, [32]byte{})
	return err
}

// TestQuota checks that creates and updates beyond a quota are refused without allocating capacity, and that a stopped
// VM counts in the quota while a deleted one does not.
func TestQuota(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Stopped, "web")
	one := w.quotaUsage()
	require.Equal(t, amountOf(vm), one)
	limit := one.VMs + 1
	w.quota(tenant.Quota{VMs: &limit})
	require.NoError(t, w.try("second"))
	before := w.allocated(host)
	err := w.try("third")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "allows 2 vms: 2 are used")
	require.Equal(t, before, w.allocated(host), "a refused VM must allocate no capacity")
	require.EqualValues(t, 2, w.quotaUsage().VMs)

	cpus := w.quotaUsage().VCPUs
	w.quota(tenant.Quota{VCPUs: &cpus})
	more := *vm.Spec.CPU
	more.VCPUs++
	_, err = w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{CPU: &more})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.Equal(t, before, w.allocated(host))
	w.deleteIfPresent(vm.ID)
	require.EqualValues(t, 1, w.quotaUsage().VMs)
	require.NoError(t, w.try("web"), "after a delete the quota must allow another VM")
}

// TestConcurrentQuota makes 20 creates at the same time with a quota for 5 VMs. Exactly 5 must succeed.
func TestConcurrentQuota(t *testing.T) {
	w := newWorld(t)
	for i := range 4 { // on 4 hosts, so that the transactions conflict mainly in the quota
		w.AddHost(fmt.Sprintf("h%d", i), plenty())
	}
	limit := uint64(5)
	w.quota(tenant.Quota{VMs: &limit})
	w.delayCommits()
	var wg sync.WaitGroup
	errs := make([]error, 4*limit)
	for i := range errs {
		wg.Go(func() { errs[i] = w.try(fmt.Sprintf("vm-%d", i)) })
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
			continue
		}
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	}
	require.EqualValues(t, limit, made, "more VMs than the quota allows, or fewer")
	require.Equal(t, limit, w.quotaUsage().VMs)
}

// TestQuotaMatchesVMs creates and deletes VMs in a random order. After each step the stored quota usage must equal the
// sum over the VMs.
func TestQuotaMatchesVMs(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	r := rand.New(rand.NewPCG(1, 2))
	var ids []cloud.VMID
	for n := range 60 {
		switch {
		case len(ids) == 0 || r.IntN(2) == 0:
			q := small(fmt.Sprintf("vm-%d", n), func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 1 + uint32(r.IntN(3))} })
			made, err := w.vms.Create(w.as(acme, ""), acme, q, [32]byte{})
			if err == nil {
				ids = append(ids, made.VM.ID)
			} else {
				var f *fault.Fault
				require.True(t, errors.As(err, &f), "%v", err)
			}
		default:
			i := r.IntN(len(ids))
			w.deleteIfPresent(ids[i])
			ids = append(ids[:i], ids[i+1:]...)
		}
		require.EqualValues(t, len(ids), w.quotaUsage().VMs)
	}
}
