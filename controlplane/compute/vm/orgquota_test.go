package vm

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// orgQuotaUsage returns the stored quota usage of the org acme, and checks that it equals the sum over the org's VMs.
func (w *world) orgQuotaUsage() (used tenant.Amount) {
	w.t.Helper()
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) (err error) {
		if used, err = tenant.OrgUsed(v, acme.Org); err != nil {
			return err
		}
		sum := tenant.Amount{Projects: used.Projects}
		all, _, err := VMs.List(v, 0)
		for _, r := range all {
			if r.Value.Org == acme.Org {
				sum = sum.Plus(amountOf(r.Value))
			}
		}
		require.Equal(w.t, sum, used)
		return err
	}))
	return used
}

// TestOrgQuotaCoversNewProjects creates projects without a quota in an org with a quota for 5 VMs, and makes 15 creates
// in them at the same time. Exactly 5 must succeed.
func TestOrgQuotaCoversNewProjects(t *testing.T) {
	w := newWorld(t)
	var hosts []cloud.NodeID
	for i := range 4 { // on 4 hosts, so that the transactions conflict mainly in the quota
		hosts = append(hosts, w.AddHost(fmt.Sprintf("h%d", i), plenty()))
	}
	allocated := func() (all []cloud.Capacity) {
		for _, id := range hosts {
			all = append(all, w.allocated(id))
		}
		return all
	}
	const limit = 5
	w.update(func(tx *store.Tx) {
		require.NoError(t, tenant.SetOrgQuota(tx, acme.Org, tenant.Quota{VMs: new(uint64(limit))}))
		require.NoError(t, tenant.SetQuota(tx, acme.Project, tenant.Quota{VMs: new(uint64(0))}))
		for i := range 3 {
			_, err := tenant.CreateProject(tx, cloud.Tenant{Org: acme.Org, Project: cloud.ProjectID(fmt.Sprintf("unlimited-%d", i))}, "", tenant.Quota{})
			require.NoError(t, err)
		}
	})
	require.ErrorContains(t, w.try("web"), "the quota of project web allows 0 vms")
	w.delayCommits()
	var calls sync.WaitGroup
	errs := make([]error, 3*limit)
	made := make([]cloud.VMID, len(errs))
	for i := range errs {
		at := cloud.Tenant{Org: acme.Org, Project: cloud.ProjectID(fmt.Sprintf("unlimited-%d", i%3))}
		calls.Go(func() {
			out, err := w.vms.Create(w.as(at, ""), at, small(fmt.Sprintf("vm-%d", i)), [32]byte{})
			errs[i], made[i] = err, out.VM.ID
		})
	}
	calls.Wait()
	done := 0
	for _, err := range errs {
		if err == nil {
			done++
			continue
		}
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		require.ErrorContains(t, err, "the quota of org acme (shared by its projects) allows 5 vms: 5 are used, 1 more are asked for")
	}
	require.Equal(t, limit, done, "more VMs than the quota allows, or fewer")
	require.EqualValues(t, limit, w.orgQuotaUsage().VMs)
	before := allocated()
	at := cloud.Tenant{Org: acme.Org, Project: "unlimited-0"}
	_, err := w.vms.Create(w.as(at, ""), at, small("more"), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.Equal(t, before, allocated(), "refused VMs must allocate no capacity")
	for i, id := range made {
		if errs[i] == nil {
			at := cloud.Tenant{Org: acme.Org, Project: cloud.ProjectID(fmt.Sprintf("unlimited-%d", i%3))}
			_, err := w.vms.deleteOnLeader(w.as(at, ""), deleteRequest{Tenant: at, VM: id, Force: true})
			require.NoError(t, err)
			break
		}
	}
	require.EqualValues(t, limit-1, w.orgQuotaUsage().VMs)
	_, err = w.vms.Create(w.as(at, ""), at, small("more"), [32]byte{})
	require.NoError(t, err)
}

// TestIdempotencyKeyOfDeletedProject deletes a project and creates it again under the same ID. A response that was
// stored under an idempotency key in the old project must not be returned in the new one.
func TestIdempotencyKeyOfDeletedProject(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	create := func() Created {
		out, err := w.vms.Create(w.as(acme, "key"), acme, small("web"), [32]byte{})
		require.NoError(t, err)
		return out
	}
	first := create()
	require.True(t, create().Replayed)
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: first.VM.ID, Force: true})
	require.NoError(t, err)
	w.update(func(tx *store.Tx) {
		require.NoError(t, tenant.DeleteProject(tx, acme.Project))
		_, err := tenant.CreateProject(tx, acme, "", tenant.Quota{})
		require.NoError(t, err)
	})
	again := create()
	require.False(t, again.Replayed)
	require.NotEqual(t, first.VM.ID, again.VM.ID)
}
