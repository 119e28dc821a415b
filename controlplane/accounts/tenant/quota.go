package tenant

import (
	"fmt"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Amount holds an amount of each quantity that a quota can limit. It is used for usage and for requests.
type Amount struct {
	VCPUs, MemoryMiB, StorageGiB, VMs, Images uint64
	// Projects counts the projects of an org. It is 0 for a project.
	Projects uint64 `cbor:",omitempty"`
	// Network resources:
	VPCs           uint64 `cbor:",omitempty"`
	Subnets        uint64 `cbor:",omitempty"`
	Ports          uint64 `cbor:",omitempty"`
	SecurityGroups uint64 `cbor:",omitempty"`
	FloatingIPs    uint64 `cbor:",omitempty"`
	ServiceIPs     uint64 `cbor:",omitempty"`
	Volumes        uint64 `cbor:",omitempty"`
	VolumeGiB      uint64 `cbor:",omitempty"`
	// ImageMiB is the total size of the stored bytes of images.
	ImageMiB  uint64 `cbor:",omitempty"`
	Snapshots uint64 `cbor:",omitempty"`
}

// Quota holds the limit of each quantity in Amount; nil means no limit.
type Quota struct {
	VCPUs      *uint64 `cbor:",omitempty"`
	MemoryMiB  *uint64 `cbor:",omitempty"`
	StorageGiB *uint64 `cbor:",omitempty"`
	VMs        *uint64 `cbor:",omitempty"`
	Images     *uint64 `cbor:",omitempty"`
	// Projects is the maximum number of projects of an org; nil means DefaultProjects. In the quota of a project it
	// must be nil.
	Projects *uint64 `cbor:",omitempty"`
	// Limits of network resources; nil means the default limit of a project, and no limit for an org.
	VPCs           *uint64 `cbor:",omitempty"`
	Subnets        *uint64 `cbor:",omitempty"`
	Ports          *uint64 `cbor:",omitempty"`
	SecurityGroups *uint64 `cbor:",omitempty"`
	FloatingIPs    *uint64 `cbor:",omitempty"`
	ServiceIPs     *uint64 `cbor:",omitempty"`
	// Volumes limits the number of volumes; nil means the default limit of a project, and no limit for an org.
	// VolumeGiB limits their total size.
	Volumes   *uint64 `cbor:",omitempty"`
	VolumeGiB *uint64 `cbor:",omitempty"`
	// ImageMiB limits the total size of the stored bytes of images.
	ImageMiB *uint64 `cbor:",omitempty"`
	// Snapshots limits the number of snapshots of volumes; nil means the default limit of a project, and no limit for
	// an org.
	Snapshots *uint64 `cbor:",omitempty"`
}

// Default limits of a project's network resources, volumes and snapshots. They keep one project from filling the
// members' memory, and are larger than what most projects need.
const (
	DefaultVPCs           = 20
	DefaultSubnets        = 200
	DefaultPorts          = 10_000
	DefaultSecurityGroups = 500
	DefaultFloatingIPs    = 20
	DefaultServiceIPs     = 200
	DefaultVolumes        = 1000
	DefaultSnapshots      = 10_000
)

// Kind is a group of quantities that one kind of object uses, such as VMs. The usage of a group is stored in one
// record.
type Kind string

const (
	// Machines is the kind of the quantities that VMs use: VCPUs, MemoryMiB, StorageGiB and VMs.
	Machines Kind = "machines"
	// Images is the kind of the quantities of images: Images and ImageMiB.
	Images Kind = "images"
	// Networks is the kind of the quantities of network resources.
	Networks Kind = "networks"
	// Storage is the kind of the quantities of volumes: Volumes, VolumeGiB and Snapshots.
	Storage Kind = "volumes"
)

var kinds = []Kind{Machines, Images, Networks, Storage}

var (
	quotas = store.NewTable[Quota]("quota")
	usages = store.NewTable[Amount]("usage")
)

// dimension describes one quantity that a quota can limit: its name in errors, its field in an Amount, and its field in
// a Quota.
type dimension struct {
	name  string
	of    func(*Amount) *uint64
	limit func(*Quota) **uint64
}

var dimensions = []dimension{
	{"vcpus", func(a *Amount) *uint64 { return &a.VCPUs }, func(q *Quota) **uint64 { return &q.VCPUs }},
	{"memory_mib", func(a *Amount) *uint64 { return &a.MemoryMiB }, func(q *Quota) **uint64 { return &q.MemoryMiB }},
	{"storage_gib", func(a *Amount) *uint64 { return &a.StorageGiB }, func(q *Quota) **uint64 { return &q.StorageGiB }},
	{"vms", func(a *Amount) *uint64 { return &a.VMs }, func(q *Quota) **uint64 { return &q.VMs }},
	{"images", func(a *Amount) *uint64 { return &a.Images }, func(q *Quota) **uint64 { return &q.Images }},
	{"projects", func(a *Amount) *uint64 { return &a.Projects }, func(q *Quota) **uint64 { return &q.Projects }},
	{"vpcs", func(a *Amount) *uint64 { return &a.VPCs }, func(q *Quota) **uint64 { return &q.VPCs }},
	{"subnets", func(a *Amount) *uint64 { return &a.Subnets }, func(q *Quota) **uint64 { return &q.Subnets }},
	{"ports", func(a *Amount) *uint64 { return &a.Ports }, func(q *Quota) **uint64 { return &q.Ports }},
	{"security_groups", func(a *Amount) *uint64 { return &a.SecurityGroups }, func(q *Quota) **uint64 { return &q.SecurityGroups }},
	{"floating_ips", func(a *Amount) *uint64 { return &a.FloatingIPs }, func(q *Quota) **uint64 { return &q.FloatingIPs }},
	{"service_ips", func(a *Amount) *uint64 { return &a.ServiceIPs }, func(q *Quota) **uint64 { return &q.ServiceIPs }},
	{"volumes", func(a *Amount) *uint64 { return &a.Volumes }, func(q *Quota) **uint64 { return &q.Volumes }},
	{"volume_gib", func(a *Amount) *uint64 { return &a.VolumeGiB }, func(q *Quota) **uint64 { return &q.VolumeGiB }},
	{"snapshots", func(a *Amount) *uint64 { return &a.Snapshots }, func(q *Quota) **uint64 { return &q.Snapshots }},
	{"image_mib", func(a *Amount) *uint64 { return &a.ImageMiB }, func(q *Quota) **uint64 { return &q.ImageMiB }},
}

// String returns the quantities that are not 0 as a text such as "2 vcpus, 1 vms".
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

// Plus returns a + b for each quantity.
func (a Amount) Plus(b Amount) Amount {
	for _, d := range dimensions {
		*d.of(&a) += *d.of(&b)
	}
	return a
}

// Minus returns a − b for each quantity, with 0 in place of negative results.
func (a Amount) Minus(b Amount) Amount {
	for _, d := range dimensions {
		n := d.of(&a)
		*n -= min(*n, *d.of(&b))
	}
	return a
}

// Fits checks a change of a project's usage against the quota q. The parameter used is the present usage. The parameter
// more is the amount to add, and the parameter less is the amount to subtract. If a quantity would increase and exceed
// its limit, Fits returns ResourceExhausted. The error contains the usage, the limit and the requested amount.
func (q *Quota) Fits(id cloud.ProjectID, used, more, less Amount) error {
	return q.fits(fmt.Sprintf("project %s", id), used, more, less)
}

// fits implements Fits for projects and orgs. The parameter owner is the text that names the project or the org in the
// error.
func (q *Quota) fits(owner string, used, more, less Amount) error {
	for _, d := range dimensions {
		limit, plus, minus := *d.limit(q), *d.of(&more), *d.of(&less)
		if limit == nil || plus <= minus {
			continue
		}
		now := *d.of(&used)
		// Subtract before comparing, so that no sum overflows.
		if left := *limit - min(*limit, now-min(now, minus)); plus > left {
			return fault.New(fault.ResourceExhausted, "the quota of %s allows %d %s: %d are used, %d more are asked for",
				owner, *limit, d.name, now, plus-minus).
				WithReason("QUOTA_EXCEEDED").With("quota", d.name).With("used", now).With("limit", *limit)
		}
	}
	return nil
}

// Counted returns the usage of a project of one kind, determined by counting its objects. It is called if the project
// has no usage record of the kind yet.
type Counted func(cloud.ProjectID) (Amount, error)

// Take adds the parameter more to the usage of a project and subtracts the parameter less. If the quota of the project
// or of its org does not allow that, Take returns ResourceExhausted. If the project does not exist or does not belong
// to the org in t, Take returns NotFound.
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
	q.setProjectDefaults()
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

// Give subtracts the parameter less from the usage of a project and of its org. It does not check the quotas. If a
// usage record does not exist, Give does not create it, because the next Take counts the usage.
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

// setProjectDefaults sets the limits of network resources and volumes that the quota of a project does not set.
func (q *Quota) setProjectDefaults() {
	for _, d := range []struct {
		limit    **uint64
		standard uint64
	}{
		{&q.VPCs, DefaultVPCs}, {&q.Subnets, DefaultSubnets}, {&q.Ports, DefaultPorts}, {&q.SecurityGroups, DefaultSecurityGroups},
		{&q.FloatingIPs, DefaultFloatingIPs}, {&q.ServiceIPs, DefaultServiceIPs},
		{&q.Volumes, DefaultVolumes}, {&q.Snapshots, DefaultSnapshots},
	} {
		if *d.limit == nil {
			*d.limit = &d.standard
		}
	}
}

func usageOf(tx *store.Tx, id cloud.ProjectID, kind Kind, counted Counted) (Amount, error) {
	used, err := usages.Get(tx.GuardedUnless(mutant.StaleQuota), string(id), string(kind))
	if err != nil {
		return Amount{}, err
	}
	if used == nil {
		return counted(id)
	}
	return *used, nil
}

// Used returns the usage of a project, according to its usage records.
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

// QuotaOf returns the quota that was set for a project. If none was set, it returns a Quota without limits.
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

// SetQuota replaces the quota of a project. It returns NotFound if the project does not exist, and InvalidArgument if
// q.Projects is set.
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
