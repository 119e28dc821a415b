package tenant

import (
	"fmt"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Amount is how much there is of everything that a quota bounds.
type Amount struct {
	VCPUs, MemoryMiB, StorageGiB, VMs, Images uint64
	// Projects is an org's; a project has none.
	Projects uint64 `cbor:",omitempty"`
}

// Quota bounds each of an Amount. Nil bounds nothing.
type Quota struct {
	VCPUs      *uint64 `cbor:",omitempty"`
	MemoryMiB  *uint64 `cbor:",omitempty"`
	StorageGiB *uint64 `cbor:",omitempty"`
	VMs        *uint64 `cbor:",omitempty"`
	Images     *uint64 `cbor:",omitempty"`
	// Projects limits the projects of an org: nil means DefaultProjects. A project's quota has none.
	Projects *uint64 `cbor:",omitempty"`
}

// Kind is a sort of thing whose use of the quota is counted together.
type Kind string

const (
	// Machines use VCPUs, MemoryMiB, StorageGiB and VMs.
	Machines Kind = "machines"
	// Pictures use Images.
	Pictures Kind = "images"
)

var kinds = []Kind{Machines, Pictures}

var (
	quotas = store.NewTable[Quota]("quota")
	usages = store.NewTable[Amount]("usage")
)

// dimension is one of the things that are bounded.
type dimension struct {
	name  string
	of    func(*Amount) *uint64
	bound func(*Quota) *uint64
}

var dimensions = []dimension{
	{"vcpus", func(a *Amount) *uint64 { return &a.VCPUs }, func(q *Quota) *uint64 { return q.VCPUs }},
	{"memory_mib", func(a *Amount) *uint64 { return &a.MemoryMiB }, func(q *Quota) *uint64 { return q.MemoryMiB }},
	{"storage_gib", func(a *Amount) *uint64 { return &a.StorageGiB }, func(q *Quota) *uint64 { return q.StorageGiB }},
	{"vms", func(a *Amount) *uint64 { return &a.VMs }, func(q *Quota) *uint64 { return q.VMs }},
	{"images", func(a *Amount) *uint64 { return &a.Images }, func(q *Quota) *uint64 { return q.Images }},
	{"projects", func(a *Amount) *uint64 { return &a.Projects }, func(q *Quota) *uint64 { return q.Projects }},
}

// String names what is not nothing.
func (a Amount) String() string {
	var parts []string
	for _, d := range dimensions {
		if n := *d.of(&a); n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, d.name))
		}
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// Plus is both together.
func (a Amount) Plus(b Amount) Amount {
	for _, d := range dimensions {
		*d.of(&a) += *d.of(&b)
	}
	return a
}

// Minus takes b away; never below nothing.
func (a Amount) Minus(b Amount) Amount {
	for _, d := range dimensions {
		n := d.of(&a)
		*n -= min(*n, *d.of(&b))
	}
	return a
}

// Fits returns ResourceExhausted unless a project that uses used may use used − less + more. The error names what is used,
// the limit and what was asked for. Only what grows is checked.
func (q *Quota) Fits(id cloud.ProjectID, used, more, less Amount) error {
	return q.fits(fmt.Sprintf("project %s", id), used, more, less)
}

// fits is Fits for a project or an org; owner names it in the error.
func (q *Quota) fits(owner string, used, more, less Amount) error {
	for _, d := range dimensions {
		limit, plus, minus := d.bound(q), *d.of(&more), *d.of(&less)
		if limit == nil || plus <= minus {
			continue
		}
		now := *d.of(&used)
		// In this order, so that no sum overflows.
		if left := *limit - min(*limit, now-min(now, minus)); plus > left {
			return fault.New(fault.ResourceExhausted, "the quota of %s allows %d %s: %d are used, %d more are asked for",
				owner, *limit, d.name, now, plus-minus).
				WithReason("QUOTA_EXCEEDED").With("quota", d.name).With("used", now).With("limit", *limit)
		}
	}
	return nil
}

// Counted sums what a project has of one kind, for the records that hold no sum yet.
type Counted func(cloud.ProjectID) (Amount, error)

// Take adds more to what a project uses and subtracts less, if the quotas of the project and of its org allow it. It
// returns NotFound unless the project exists and belongs to that org.
func Take(tx *store.Tx, t cloud.Tenant, kind Kind, more, less Amount, counted Counted) error {
	id := t.Project
	p, err := Find(tx, id)
	if err != nil {
		return err
	}
	if p == nil || p.Org != t.Org {
		return NoProject(id)
	}
	q, err := quotaOf(tx, id)
	if err != nil {
		return err
	}
	used, err := usageOf(tx, id, kind, counted)
	if err != nil {
		return err
	}
	if err := q.Fits(id, used, more, less); err != nil {
		return err
	}
	if err := takeOfOrg(tx, t.Org, kind, more, less, counted); err != nil {
		return err
	}
	used = used.Minus(less).Plus(more)
	usages.Put(tx, &used, string(id), string(kind))
	return nil
}

// Give subtracts less from what a project and its org use, whatever their quotas are. Where no sum is recorded yet,
// nothing is written: the next Take counts.
func Give(tx *store.Tx, t cloud.Tenant, kind Kind, less Amount) error {
	for _, sum := range []struct {
		table store.Table[Amount]
		path  []string
	}{{usages, []string{string(t.Project), string(kind)}}, {orgUsages, []string{string(t.Org), string(kind)}}} {
		used, err := sum.table.Get(tx, sum.path...)
		if err != nil {
			return err
		}
		if used != nil {
			left := used.Minus(less)
			sum.table.Put(tx, &left, sum.path...)
		}
	}
	return nil
}

func usageOf(tx *store.Tx, id cloud.ProjectID, kind Kind, counted Counted) (Amount, error) {
	used, err := usages.Get(tx, string(id), string(kind))
	if err != nil {
		return Amount{}, err
	}
	if used == nil {
		return counted(id)
	}
	return *used, nil
}

// Used is what a project has of everything that was counted.
func Used(r store.Reader, id cloud.ProjectID) (sum Amount, err error) {
	for _, kind := range kinds {
		used, err := usages.Get(r, string(id), string(kind))
		if err != nil {
			return sum, err
		}
		if used != nil {
			sum = sum.Plus(*used)
		}
	}
	return sum, nil
}

// QuotaOf is a project's quota.
func QuotaOf(r store.Reader, id cloud.ProjectID) (Quota, error) {
	q, err := quotaOf(r, id)
	if err != nil {
		return Quota{}, err
	}
	return *q, nil
}

func quotaOf(r store.Reader, id cloud.ProjectID) (*Quota, error) {
	q, err := quotas.Get(r, string(id))
	if q == nil {
		q = &Quota{}
	}
	return q, err
}

// SetQuota replaces a project's quota.
func SetQuota(tx *store.Tx, id cloud.ProjectID, q Quota) error {
	if err := q.checkProject(); err != nil {
		return err
	}
	if p, err := Find(tx, id); err != nil {
		return err
	} else if p == nil {
		return NoProject(id)
	}
	quotas.Put(tx, &q, string(id))
	return nil
}
