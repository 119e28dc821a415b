// Package tenant stores the orgs and projects that own everything else, the limits of projects and orgs (their quotas),
// and what they use (their usage).
//
// The services call it in their own transactions to check that a project exists and that its quota has room, so that a
// new object is counted in the transaction that creates it. It does not depend on VMs, images or users.
//
// Decisions:
//   - IDs of orgs and projects are unique in the cloud: the wire contract addresses wallets by the project ID alone.
//     The ID of an org is never used again. The ID of a deleted project stays reserved for its org for a bounded time
//     (ReserveFor, MaxReserved) and is free for every org after that.
//   - If a project is deleted and created again with the same ID, the new project is another incarnation. Bindings,
//     tokens and wallets contain the incarnation of their project, so those of the old project do not apply to the new
//     one.
//   - A quantity without a limit is unlimited, and a limit of 0 allows none of it. A limit below the present usage
//     removes nothing; only increases are refused.
//   - An org has a quota too, which its projects share: without it an org:admin could exceed the quotas of projects by
//     creating more projects. The number of an org's projects is always limited. The quota of an org limits the sum of
//     what its projects use, not the sum of their limits, so the limits of projects may add up to more than the org has.
//     So do hierarchical quotas in Kubernetes (HNC). OpenStack's strict two-level limits compare the sum of the limits
//     instead; an org then cannot use what its projects leave unused. A new object is counted for the project and for
//     the org in one transaction, so concurrent calls do not exceed either quota.
//   - New projects get the default quota, which an operator sets. It is copied when a project is created: a later
//     change of the default does not take capacity from existing projects. An org:admin may create projects with lower
//     limits than the default, not with higher ones.
//   - Usage is counted in separate records, one per project and kind, so that creating an image and creating a VM do
//     not conflict. If a project has no such record yet, its objects are counted. An org has such a record for each
//     kind that its quota limits. If an org has none yet, the usage of its projects is added up.
//   - Usage counts the requested amounts: a stopped VM still occupies its part of a host, so it counts like a running
//     one.
//
// Keys: org/<id>, project/<id>, quota/<project>, quota-default/projects, usage/<project>/<kind>, org-quota/<org>, org-usage/<org>/<kind>,
// project-deleted/<org>/<when, 16 hexadecimal digits>/<id>.
package tenant

import (
	"cmp"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Default is the org and the project that exist from the first start of the cluster.
var Default = cloud.Tenant{Org: "default", Project: "default"}

// Org owns projects. It stands for a customer or a department.
type Org struct {
	ID        cloud.OrgID
	Name      string
	CreatedAt cloud.Time
	// DeletedAt is the time of the deletion, or 0 if the org was not deleted.
	DeletedAt cloud.Time `cbor:",omitempty"`
}

// Project owns VMs, images, volumes and wallets.
type Project struct {
	ID        cloud.ProjectID
	Org       cloud.OrgID
	Name      string
	CreatedAt cloud.Time
	// DeletedAt is the time of the deletion, or 0 if the project was not deleted.
	DeletedAt cloud.Time `cbor:",omitempty"`
	// Incarnation distinguishes this project from earlier projects with the same ID. It is the creation time, which is
	// later than that of each earlier project with the ID. It is 0 for a project created before there were
	// incarnations.
	Incarnation cloud.Incarnation `cbor:",omitempty"`
}

var (
	// Orgs and Projects are the tables of orgs and projects, including deleted ones. Other packages may read the
	// tables; only this package may write to them.
	Orgs     = store.NewTable[Org]("org")
	Projects = store.NewTable[Project]("project")
)

// maxName is the maximum length of a display name, in bytes.
const maxName = 256

// CheckName returns InvalidArgument if text cannot be the display name of an org, a project or a user. A display name
// has at most maxName bytes of UTF-8, without characters that are invisible or change the direction of text. It may be
// empty.
func CheckName(field, text string) error {
	if len(text) > maxName || !printable(text) {
		return fault.Invalid(field, "must be at most %d bytes of printable text, without control characters and invisible ones", maxName)
	}
	return nil
}

// NoOrg and NoProject return the NotFound error for an org or project that does not exist.
func NoOrg(id cloud.OrgID) *fault.Fault { return fault.New(fault.NotFound, "no org %s", id) }
func NoProject(id cloud.ProjectID) *fault.Fault {
	return fault.New(fault.NotFound, "no project %s", id)
}

// Find returns a project, or nil if it does not exist or was deleted.
func Find(r store.Reader, id cloud.ProjectID) (*Project, error) {
	p, err := Projects.Get(r, string(id))
	if err != nil || p == nil || p.DeletedAt != 0 {
		return nil, err
	}
	return p, nil
}

// FindOrg returns an org, or nil if it does not exist or was deleted.
func FindOrg(r store.Reader, id cloud.OrgID) (*Org, error) {
	o, err := Orgs.Get(r, string(id))
	if err != nil || o == nil || o.DeletedAt != 0 {
		return nil, err
	}
	return o, nil
}

// OrgOf returns the ID of the org to which a project belongs, or "" if the project does not exist.
func OrgOf(r store.Reader, id cloud.ProjectID) (cloud.OrgID, error) {
	p, err := Find(r, id)
	if err != nil || p == nil {
		return "", err
	}
	return p.Org, nil
}

// CreateOrg creates an org. It returns AlreadyExists if the ID belongs to an existing or a deleted org.
func CreateOrg(tx *store.Tx, id cloud.OrgID, name string) (*Org, error) {
	if err := cloud.CheckCallerID("id", string(id)); err != nil {
		return nil, err
	}
	if err := CheckName("name", name); err != nil {
		return nil, err
	}
	switch o, err := Orgs.Get(tx, string(id)); {
	case err != nil:
		return nil, err
	case o != nil && o.DeletedAt != 0:
		return nil, fault.New(fault.AlreadyExists, "org %s was deleted; ids of orgs are not used again", id)
	case o != nil:
		return nil, fault.New(fault.AlreadyExists, "org %s exists", id)
	}
	if name == "" {
		name = string(id)
	}
	o := &Org{ID: id, Name: name, CreatedAt: tx.Now()}
	Orgs.Put(tx, o, string(id))
	orgUsages.Put(tx, &Amount{}, string(id), string(orgProjects))
	return o, nil
}

// RenameOrg changes the display name of an org. An empty name means the ID. It returns NotFound if the org does not
// exist.
func RenameOrg(tx *store.Tx, id cloud.OrgID, name string) (*Org, error) {
	if err := cloud.CheckCallerID("id", string(id)); err != nil {
		return nil, err
	}
	if err := CheckName("name", name); err != nil {
		return nil, err
	}
	o, err := FindOrg(tx, id)
	if err != nil {
		return nil, err
	}
	if o == nil {
		return nil, NoOrg(id)
	}
	o.Name = cmp.Or(name, string(id))
	Orgs.Put(tx, o, string(id))
	return o, nil
}

// DeleteOrg marks an org as deleted. It returns FailedPrecondition for an org with projects, and for the default org.
func DeleteOrg(tx *store.Tx, id cloud.OrgID) error {
	o, err := FindOrg(tx, id)
	if err != nil {
		return err
	}
	if o == nil {
		return NoOrg(id)
	}
	if id == Default.Org {
		return fault.New(fault.FailedPrecondition, "org %s cannot be deleted: it was created with the cloud", id)
	}
	all, _, err := Projects.List(tx, 0)
	if err != nil {
		return err
	}
	for _, p := range all {
		if p.Value.Org == id && p.Value.DeletedAt == 0 {
			return fault.New(fault.FailedPrecondition, "org %s has project %s: delete its projects first", id, p.Value.ID)
		}
	}
	o.DeletedAt = tx.Now()
	Orgs.Put(tx, o, string(id))
	orgQuotas.Delete(tx, string(id))
	for _, kind := range orgKinds {
		orgUsages.Delete(tx, string(id), string(kind))
	}
	return nil
}

// CreateProject creates a project in an existing org. Limits that q does not set are those of DefaultQuota. It returns AlreadyExists if another project has the ID or the ID
// is reserved for another org. It returns ResourceExhausted if the org already has the maximum number of projects.
func CreateProject(tx *store.Tx, t cloud.Tenant, name string, q Quota) (*Project, error) {
	if err := cloud.CheckCallerID("id", string(t.Project)); err != nil {
		return nil, err
	}
	if err := cloud.CheckCallerID("org_id", string(t.Org)); err != nil {
		return nil, err
	}
	if err := CheckName("name", name); err != nil {
		return nil, err
	}
	if err := q.checkProject(); err != nil {
		return nil, err
	}
	if err := q.addDefaults(tx); err != nil {
		return nil, err
	}
	if o, err := FindOrg(tx, t.Org); err != nil {
		return nil, err
	} else if o == nil {
		return nil, NoOrg(t.Org)
	}
	incarnation, err := claim(tx, t)
	if err != nil {
		return nil, err
	}
	if err := takeOfOrg(tx, t.Org, orgProjects, Amount{Projects: 1}, Amount{}, nil); err != nil {
		return nil, err
	}
	if name == "" {
		name = string(t.Project)
	}
	p := &Project{ID: t.Project, Org: t.Org, Name: name, CreatedAt: tx.Now(), Incarnation: incarnation}
	Projects.Put(tx, p, string(t.Project))
	quotas.Put(tx, &q, string(t.Project))
	for _, kind := range kinds {
		usages.Put(tx, &Amount{}, string(t.Project), string(kind))
	}
	return p, nil
}

// RenameProject changes the display name of a project. An empty name means the ID. It returns NotFound if the project
// does not exist.
func RenameProject(tx *store.Tx, id cloud.ProjectID, name string) (*Project, error) {
	if err := cloud.CheckCallerID("id", string(id)); err != nil {
		return nil, err
	}
	if err := CheckName("name", name); err != nil {
		return nil, err
	}
	p, err := Find(tx, id)
	if err != nil {
		return nil, err
	}
	if p == nil {
		return nil, NoProject(id)
	}
	p.Name = cmp.Or(name, string(id))
	Projects.Put(tx, p, string(id))
	return p, nil
}

// DeleteProject marks a project as deleted and reserves its ID for its org. It returns FailedPrecondition if the
// project has any usage. Some objects, such as wallets, are not counted as usage. The caller must first check that the
// project has none of these.
func DeleteProject(tx *store.Tx, id cloud.ProjectID) error {
	p, err := Find(tx, id)
	if err != nil {
		return err
	}
	if p == nil {
		return NoProject(id)
	}
	if id == Default.Project {
		return fault.New(fault.FailedPrecondition, "project %s cannot be deleted: it was created with the cloud", id)
	}
	used, err := Used(tx, id)
	if err != nil {
		return err
	}
	if used != (Amount{}) {
		return fault.New(fault.FailedPrecondition, "project %s still has %s: delete them first", id, used)
	}
	quotas.Delete(tx, string(id))
	for _, kind := range kinds {
		usages.Delete(tx, string(id), string(kind))
	}
	if err := giveToOrg(tx, p.Org, orgProjects, Amount{Projects: 1}); err != nil {
		return err
	}
	return reserve(tx, p)
}

// Adopt completes a store that was written by a version without calls to create orgs and projects. It adds the missing
// records of orgs, and the missing fields of projects. If the default org exists, Adopt does nothing.
func Adopt(tx *store.Tx) error {
	if done, err := Orgs.Has(tx, string(Default.Org)); done || err != nil {
		return err
	}
	all, _, err := Projects.List(tx, 0)
	if err != nil {
		return err
	}
	for _, r := range all {
		p := r.Value
		p.ID = cloud.ProjectID(r.Path[0])
		p.Name = string(p.ID)
		Projects.Put(tx, p, string(p.ID))
		Orgs.Put(tx, &Org{ID: p.Org, Name: string(p.Org), CreatedAt: tx.Now()}, string(p.Org))
	}
	return nil
}
