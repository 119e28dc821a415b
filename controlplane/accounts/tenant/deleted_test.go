package tenant_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ticking returns a world with the orgs acme and evil, and its clock, which the test may set.
func ticking(t *testing.T) (*world, *time.Time) {
	at := time.UnixMilli(1_800_000_000_000)
	w := &world{t, storetest.Memory(t, func() time.Time { return at })}
	require.NoError(t, w.do(func(tx *store.Tx) error {
		for _, id := range []cloud.OrgID{web.Org, "evil"} {
			if _, err := tenant.CreateOrg(tx, id, ""); err != nil {
				return err
			}
		}
		return nil
	}))
	return w, &at
}

func (w *world) records() (n int) {
	require.NoError(w.t, w.s.View(w.t.Context(), func(v *store.View) error {
		all, _, err := tenant.Projects.List(v, 0)
		n = len(all)
		return err
	}))
	return n
}

// TestDeletedIDCanBeUsedByItsOrg checks that the org of a deleted project can create a project with the same ID, which
// has a later incarnation even in the same millisecond.
func TestDeletedIDCanBeUsedByItsOrg(t *testing.T) {
	w, _ := ticking(t)
	var last cloud.Incarnation
	for range 3 {
		p, err := w.create(web.Org, web.Project)
		require.NoError(t, err)
		require.Greater(t, p.Incarnation, last)
		last = p.Incarnation
		_, err = w.create(web.Org, web.Project)
		require.EqualError(t, err, "project web exists")
		require.NoError(t, w.remove(web.Project))
	}
	require.Equal(t, 1, w.records())
}

// TestDeletedIDIsReserved checks that an org cannot use the ID of another org's project while the project exists and
// for ReserveFor after its deletion, and can after that. Both errors must be equal and name no org.
func TestDeletedIDIsReserved(t *testing.T) {
	w, at := ticking(t)
	first, err := w.create("evil", "acme-production")
	require.NoError(t, err)
	_, exists := w.create(web.Org, "acme-production")
	require.True(t, fault.Is(exists, fault.AlreadyExists), "%v", exists)
	require.NotContains(t, exists.Error(), "evil")
	require.NoError(t, w.remove("acme-production"))
	*at = at.Add(tenant.ReserveFor*time.Millisecond - time.Millisecond)
	_, reserved := w.create(web.Org, "acme-production")
	require.Equal(t, exists.Error(), reserved.Error())
	*at = at.Add(time.Millisecond)
	p, err := w.create(web.Org, "acme-production")
	require.NoError(t, err)
	require.Equal(t, web.Org, p.Org)
	require.Greater(t, p.Incarnation, first.Incarnation)
	require.NoError(t, tenant.PruneDeleted(t.Context(), w.s))
	_, err = w.create("evil", "acme-production")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
}

// TestReservedIDsAreLimited checks that at most MaxReserved IDs of deleted projects are reserved for an org, so that
// creating and deleting projects does not fill the store.
func TestReservedIDsAreLimited(t *testing.T) {
	w, at := ticking(t)
	for i := range tenant.MaxReserved + 20 {
		id := cloud.ProjectID(fmt.Sprintf("p%d", i))
		_, err := w.create("evil", id)
		require.NoError(t, err)
		*at = at.Add(time.Millisecond)
		require.NoError(t, w.remove(id))
	}
	require.Equal(t, tenant.MaxReserved, w.records())
	_, err := w.create(web.Org, "p0")
	require.NoError(t, err, "an ID beyond the limit must not be reserved")
	_, err = w.create(web.Org, "p119")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)

	require.NoError(t, w.do(func(tx *store.Tx) error { return tenant.DeleteOrg(tx, "evil") }))
	_, err = w.create(web.Org, "p119")
	require.NoError(t, err, "no ID may stay reserved for a deleted org")
	*at = at.Add(tenant.ReserveFor * time.Millisecond)
	require.NoError(t, tenant.PruneDeleted(t.Context(), w.s))
	require.Equal(t, 2, w.records())
}

// TestPruneOldRecords checks that PruneDeleted removes reservations beyond MaxReserved that a version without this
// limit stored.
func TestPruneOldRecords(t *testing.T) {
	w, at := ticking(t)
	const many = 1300
	require.NoError(t, w.do(func(tx *store.Tx) error {
		for i := range many {
			id := fmt.Sprintf("p%d", i)
			tenant.Projects.Put(tx, &tenant.Project{ID: cloud.ProjectID(id), Org: "evil", DeletedAt: at.UnixMilli() - many + int64(i)}, id)
		}
		return nil
	}))
	require.NoError(t, tenant.PruneDeleted(t.Context(), w.s))
	require.Equal(t, tenant.MaxReserved, w.records())
	_, err := w.create(web.Org, "p1299")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = w.create("evil", "new")
	require.NoError(t, err)
	require.NoError(t, w.remove("new"))
	require.Equal(t, tenant.MaxReserved, w.records(), "the oldest reservation is removed for a new one")
}
