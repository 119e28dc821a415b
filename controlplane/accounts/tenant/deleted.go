package tenant

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// ReserveFor is how long the ID of a deleted project is reserved for the org that had it, in milliseconds: 30 days.
	// That is long enough to notice a mistaken deletion, and short enough that no org blocks an ID forever. It is
	// longer than the lifetime of any token.
	ReserveFor = 30 * 24 * 3600_000
	// MaxReserved is the maximum number of IDs of deleted projects that are reserved for one org. Beyond it, the IDs of
	// the projects that were deleted first become free.
	MaxReserved = 100
)

// deleted is the index of the project IDs that are reserved for each org, in the order of deletion:
// project-deleted/<org>/<time>/<project>.
var deleted = store.NewTable[struct{}]("project-deleted")

// row returns the key of a deleted project in the index deleted: the org, the time of the deletion as 16 hexadecimal
// digits, and the ID of the project.
func (p *Project) row() []string {
	return []string{string(p.Org), fmt.Sprintf("%016x", max(p.DeletedAt, 0)), string(p.ID)}
}

// reserve marks a project as deleted and reserves its ID for its org. If the org then has more than MaxReserved
// reserved IDs, the IDs that were reserved first become free.
func reserve(tx *store.Tx, p *Project) error {
	p.DeletedAt = max(tx.Now(), cloud.Time(p.Incarnation))
	Projects.Put(tx, p, string(p.ID))
	deleted.Put(tx, &struct{}{}, p.row()...)
	rows, _, err := deleted.List(tx, 0, string(p.Org))
	if err != nil {
		return err
	}
	for _, r := range rows[:max(0, len(rows)-MaxReserved)] {
		old, err := Projects.Get(tx, r.Path[2])
		if err != nil {
			return err
		}
		// The incarnation of the next project with this ID is its creation time. It must be later than the deletion of
		// the project.
		if old != nil && old.DeletedAt >= tx.Now() {
			break
		}
		if err := release(tx, r.Path); err != nil {
			return err
		}
	}
	return nil
}

// release ends the reservation of a project ID, so that every org can use the ID. The parameter row is the key of the
// deleted project in the index deleted.
func release(tx *store.Tx, row []string) error {
	p, err := Projects.Get(tx, row[2])
	if err != nil {
		return err
	}
	if p != nil && p.DeletedAt != 0 && slices.Equal(p.row(), row) {
		Projects.Delete(tx, row[2])
	}
	deleted.Delete(tx, row...)
	return nil
}

// claim is called when a project with the tenant t is created. It returns the incarnation for the project, and ends the
// reservation of the ID for the org. It returns AlreadyExists if the ID is in use or reserved for another org. The
// error does not reveal which org has or had the ID.
func claim(tx *store.Tx, t cloud.Tenant) (cloud.Incarnation, error) {
	p, err := Projects.Get(tx, string(t.Project))
	if err != nil {
		return 0, err
	}
	now := cloud.Incarnation(tx.Now())
	if p == nil {
		return now, store.ForgetPlace(tx, store.InProject(t.Project))
	}
	if p.Org == t.Org && p.DeletedAt == 0 {
		return 0, fault.New(fault.AlreadyExists, "project %s exists", t.Project)
	}
	if p.Org != t.Org {
		taken := p.DeletedAt == 0
		if !taken && tx.Now()-p.DeletedAt < ReserveFor {
			o, err := FindOrg(tx, p.Org)
			if err != nil {
				return 0, err
			}
			taken = o != nil
		}
		if taken {
			return 0, fault.New(fault.AlreadyExists,
				"the project ID %s is taken: IDs are unique in the cloud, and that of a deleted project stays reserved for its org for a time; choose another",
				t.Project)
		}
	}
	deleted.Delete(tx, p.row()...)
	return max(now, p.Incarnation+1, cloud.Incarnation(p.DeletedAt)+1), store.ForgetPlace(tx, store.InProject(t.Project))
}

// pruneAtOnce is the maximum number of records that one transaction of PruneDeleted changes.
const pruneAtOnce = 500

// PruneDeleted ends the reservation of project IDs that have been reserved for ReserveFor. If an org has more than
// MaxReserved reserved IDs, it also ends the oldest reservations; a version without reservations can have left that
// many deleted projects. Only the leader runs PruneDeleted.
func PruneDeleted(ctx context.Context, s *store.Store) error {
	for more := true; more; {
		if _, err := s.Update(ctx, func(tx *store.Tx) (err error) {
			more, err = prune(tx)
			return err
		}); err != nil {
			return fmt.Errorf("free the IDs of deleted projects: %w", err)
		}
	}
	return nil
}

// prune executes one transaction of PruneDeleted, and reports whether another transaction is needed.
func prune(tx *store.Tx) (more bool, err error) {
	// This read need not be checked for conflicts at commit. Later changes do not affect which of the oldest IDs become
	// free, and release reads each project again.
	all, _, err := Projects.List(tx.Unguarded(), 0)
	if err != nil {
		return false, err
	}
	reserved := map[cloud.OrgID][]*Project{}
	for _, r := range all {
		if p := r.Value; p.DeletedAt != 0 {
			reserved[p.Org] = append(reserved[p.Org], p)
		}
	}
	done := 0
	for _, list := range reserved {
		slices.SortFunc(list, func(a, b *Project) int { return cmp.Compare(b.DeletedAt, a.DeletedAt) })
		for i, p := range list {
			if done == pruneAtOnce {
				return true, nil
			}
			if i >= MaxReserved && p.DeletedAt < tx.Now() || tx.Now()-p.DeletedAt >= ReserveFor {
				done++
				if err := release(tx, p.row()); err != nil {
					return false, err
				}
				continue
			}
			if has, err := deleted.Has(tx.Unguarded(), p.row()...); err != nil {
				return false, err
			} else if !has {
				done++
				deleted.Put(tx, &struct{}{}, p.row()...)
			}
		}
	}
	return false, nil
}
