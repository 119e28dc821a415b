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
	// ReserveFor is how long (milliseconds) the ID of a deleted project is reserved for the org that had it: long enough
	// to notice a mistaken deletion, and short enough that no org blocks a name forever. It is longer than the lifetime of
	// any token.
	ReserveFor = 30 * 24 * 3600_000
	// MaxReserved is the maximum number of IDs that are reserved for one org. If there are more, those that were
	// deleted first become free.
	MaxReserved = 100
)

// deleted indexes the reserved project IDs of each org in order of deletion: project-deleted/<org>/<time>/<project>.
var deleted = store.NewTable[struct{}]("project-deleted")

// row returns the key of a deleted project in the index deleted: its org, the time of its deletion as 16 hexadecimal
// digits, its ID.
func (p *Project) row() []string {
	return []string{string(p.Org), fmt.Sprintf("%016x", max(p.DeletedAt, 0)), string(p.ID)}
}

// reserve marks a project as deleted and reserves its ID for its org. If the org then has more than MaxReserved
// reserved IDs, those that were reserved first become free.
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
		// The incarnation of the next project of this ID is its creation time, which must be later than the deletion.
		if old != nil && old.DeletedAt >= tx.Now() {
			break
		}
		if err := release(tx, r.Path); err != nil {
			return err
		}
	}
	return nil
}

// release ends the reservation of a project ID, given its row in the index deleted, so that every org may use the ID.
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

// claim returns the incarnation for a new project with the ID in t, and ends the reservation of the ID for its org. It
// returns AlreadyExists if the ID is taken. The error does not reveal whether another org has or had the ID, or which
// org.
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

// PruneDeleted ends the reservation of project IDs after ReserveFor, and of those beyond MaxReserved, which a version
// without reservations can have left. It is a leader task.
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

// prune executes one transaction of PruneDeleted, and reports whether there is more to do.
func prune(tx *store.Tx) (more bool, err error) {
	// An unguarded read suffices: later changes do not affect which of the oldest IDs become free, and release reads
	// each project again.
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
