package credit

import (
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Callers name a wallet by its project's ID alone (part 4.7 of the wire contract), but a project may be created again
// under the ID of a deleted one. Each creation is an incarnation of the project, identified by its time, and has a
// wallet of its own. The records of a wallet are stored under an account key made of the project ID and the
// incarnation. The wallets of earlier incarnations stay unchanged for audits, and calls for the project ID do not use
// them.

// Project holds the properties of a project that this package needs. Exists is false if the project is deleted.
type Project struct {
	Exists      bool
	Org         cloud.OrgID
	Incarnation cloud.Incarnation
}

// Lookup is a function that returns the project with an ID. After a project's deletion its ID stays reserved for some
// time. In that time Lookup still returns the project's incarnation, so that the closed wallet can be read.
type Lookup func(store.Reader, cloud.ProjectID) (Project, error)

// accountOf returns the account key under which the records of a project's wallet are stored. i is the incarnation,
// which distinguishes successive projects with the same ID. The key is ID:incarnation, or only the ID if i is 0. No ID
// contains a colon, so keys are unique.
func accountOf(id cloud.ProjectID, i cloud.Incarnation) string {
	if i == 0 {
		return string(id)
	}
	return string(id) + ":" + number(int64(i))
}

// projectOf returns the project ID in an account key.
func projectOf(account string) cloud.ProjectID {
	id, _, _ := strings.Cut(account, ":")
	return cloud.ProjectID(id)
}

// account returns the account key under which the records of the wallet w are stored.
func account(w *ledger.Wallet) string { return accountOf(w.Project, w.Incarnation) }

// lookUp returns the project with this ID. It calls Options.Project if that is set. Otherwise every project counts as
// existing, with incarnation 0.
func (s *Service) lookUp(r store.Reader, id cloud.ProjectID) (Project, error) {
	if s.opts.Project == nil {
		return Project{Exists: true}, nil
	}
	return s.opts.Project(r, id)
}

// ProjectCreatedAt returns the creation time of the project that has this ID now. Bills from before that time belong to
// a deleted project with the same ID. It returns 0 if the project was created before creation times were recorded, and
// the greatest time if no project has the ID.
func (s *Service) ProjectCreatedAt(r store.Reader, id cloud.ProjectID) (cloud.Time, error) {
	p, err := s.lookUp(r, id)
	if err != nil || p.Exists {
		return cloud.Time(p.Incarnation), err
	}
	return 1<<63 - 1, nil
}

// mayCreate returns nil if a wallet may be created for the project. It returns NotFound if the project does not exist,
// and FailedPrecondition if the project belongs to another org than t.Org.
func (p Project) mayCreate(t cloud.Tenant) error {
	if !p.Exists {
		return fault.New(fault.NotFound, "no project %s: create the project before its wallet", t.Project)
	}
	if p.Org != "" && p.Org != t.Org {
		return fault.New(fault.FailedPrecondition, "project %s belongs to another org", t.Project)
	}
	return nil
}

// Holds returns a check that the caller registers to run before a project is deleted. The check returns
// FailedPrecondition while the project has a wallet that is not closed.
func Holds(find Lookup) func(store.Reader, cloud.Tenant) error {
	return func(r store.Reader, t cloud.Tenant) error {
		if t.Project == "" {
			return nil
		}
		p, err := find(r, t.Project)
		if err != nil {
			return err
		}
		return closed(r, accountOf(t.Project, p.Incarnation), "project %s has a wallet: close it first", t.Project)
	}
}

// Vacant is called before a project is created with this ID. It returns FailedPrecondition if the ID has a wallet that
// is not closed. Such a wallet can exist because earlier versions created wallets without checking that the project
// exists. After the project's creation, no call could reach that wallet.
func Vacant(r store.Reader, id cloud.ProjectID) error {
	return closed(r, accountOf(id, 0), "a wallet of project ID %s was made before the project: have a billing:admin close it first", id)
}

// closed returns nil if the account has no wallet, or a closed one. Otherwise it returns FailedPrecondition, with a
// message made from format and id.
func closed(r store.Reader, account, format string, id cloud.ProjectID) error {
	w, err := wallets.Get(r, account)
	if err != nil || w == nil || w.Status == ledger.Closed {
		return err
	}
	return fault.New(fault.FailedPrecondition, format, id)
}
