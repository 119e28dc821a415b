package credit

import (
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Callers name a wallet by its project's ID alone (part 4.7 of the wire contract), and a project may be created again
// under the ID of a deleted one. Each incarnation of a project therefore has a wallet of its own. The records of a
// wallet are stored under an account key made of the project ID and the incarnation. The wallets of earlier
// incarnations stay unchanged for audits, and calls for the project ID do not reach them.

// Project is the part of a project's record that wallets use.
type Project struct {
	Exists      bool
	Org         cloud.OrgID
	Incarnation cloud.Incarnation
}

// Lookup returns a project. For a deleted project it returns the incarnation for as long as the ID is reserved, so that
// the closed wallet can be read.
type Lookup func(store.Reader, cloud.ProjectID) (Project, error)

// accountOf returns the account key of a project: ID, or ID:incarnation unless the incarnation is 0. No ID contains a
// colon.
func accountOf(id cloud.ProjectID, i cloud.Incarnation) string {
	if i == 0 {
		return string(id)
	}
	return string(id) + ":" + number(int64(i))
}

// projectOf returns the project ID of an account key.
func projectOf(account string) cloud.ProjectID {
	id, _, _ := strings.Cut(account, ":")
	return cloud.ProjectID(id)
}

// account returns the account key of a wallet.
func account(w *ledger.Wallet) string { return accountOf(w.Project, w.Incarnation) }

// lookUp returns a project. Without Options.Project every project counts as existing.
func (s *Service) lookUp(r store.Reader, id cloud.ProjectID) (Project, error) {
	if s.opts.Project == nil {
		return Project{Exists: true}, nil
	}
	return s.opts.Project(r, id)
}

// ProjectCreatedAt returns the creation time of the project with this ID: bills from before that time belong to a deleted
// project of the same ID. It returns 0 for a project created before there were incarnations, and the greatest time if
// there is no such project.
func (s *Service) ProjectCreatedAt(r store.Reader, id cloud.ProjectID) (cloud.Time, error) {
	p, err := s.lookUp(r, id)
	if err != nil || p.Exists {
		return cloud.Time(p.Incarnation), err
	}
	return 1<<63 - 1, nil
}

// mayCreate returns NotFound if the project does not exist, and FailedPrecondition if it belongs to another org than
// t.Org.
func (p Project) mayCreate(t cloud.Tenant) error {
	if !p.Exists {
		return fault.New(fault.NotFound, "no project %s: create the project before its wallet", t.Project)
	}
	if p.Org != "" && p.Org != t.Org {
		return fault.New(fault.FailedPrecondition, "project %s belongs to another org", t.Project)
	}
	return nil
}

// Holds returns a check for the deletion of a project: FailedPrecondition while its wallet is open.
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

// Vacant returns FailedPrecondition if a new project's ID already has an open wallet. Earlier versions made wallets
// without checking that the project exists. Once the project exists, no call reaches such a wallet.
func Vacant(r store.Reader, id cloud.ProjectID) error {
	return closed(r, accountOf(id, 0), "a wallet of project ID %s was made before the project: have a billing:admin close it first", id)
}

// closed returns FailedPrecondition when the wallet of an account is open.
func closed(r store.Reader, account, format string, id cloud.ProjectID) error {
	w, err := wallets.Get(r, account)
	if err != nil || w == nil || w.Status == ledger.Closed {
		return err
	}
	return fault.New(fault.FailedPrecondition, format, id)
}
