package credit

import (
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Callers name a wallet by the ID of its project alone (the spec's part 4.7), and a project may be created again under the
// ID of a deleted one. Each incarnation of a project has a wallet of its own, whose records are kept under an account: the
// wallets of earlier incarnations stay as they were, for audits, and no call about the project reaches them.

// Project is what wallets need to know of a project.
type Project struct {
	Exists      bool
	Org         cloud.OrgID
	Incarnation cloud.Incarnation
}

// Lookup finds a project. Of a deleted project the incarnation stays known as long as the ID is reserved, so that its
// closed wallet can be read.
type Lookup func(store.Reader, cloud.ProjectID) (Project, error)

// accountOf names the account of a project: its ID, and for projects that have an incarnation that too. The separator is
// in no ID.
func accountOf(id cloud.ProjectID, i cloud.Incarnation) string {
	if i == 0 {
		return string(id)
	}
	return string(id) + ":" + number(int64(i))
}

// projectOf returns the project of an account.
func projectOf(account string) cloud.ProjectID {
	id, _, _ := strings.Cut(account, ":")
	return cloud.ProjectID(id)
}

// account names the account of a wallet.
func account(w *ledger.Wallet) string { return accountOf(w.Project, w.Incarnation) }

// lookUp finds a project. A service without a Lookup takes every project for one that exists.
func (s *Service) lookUp(r store.Reader, id cloud.ProjectID) (Project, error) {
	if s.opts.Project == nil {
		return Project{Exists: true}, nil
	}
	return s.opts.Project(r, id)
}

// Born returns the time before which nothing belongs to a project of an ID: when the project was created, or for a project
// that does not exist the end of time. It is 0 for projects that are older than incarnations.
func (s *Service) Born(r store.Reader, id cloud.ProjectID) (cloud.Time, error) {
	p, err := s.lookUp(r, id)
	if err != nil || p.Exists {
		return cloud.Time(p.Incarnation), err
	}
	return 1<<63 - 1, nil
}

// mayCreate refuses a wallet for a project that does not exist, or that belongs to another org than is named.
func (p Project) mayCreate(t cloud.Tenant) error {
	if !p.Exists {
		return fault.New(fault.NotFound, "no project %s: create the project before its wallet", t.Project)
	}
	if p.Org != "" && p.Org != t.Org {
		return fault.New(fault.FailedPrecondition, "project %s is of another org", t.Project)
	}
	return nil
}

// Holds returns a check that refuses to delete a project whose wallet is not closed.
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

// Vacant refuses to create a project whose ID has a wallet that is not closed. Versions that did not ask for a project made
// such wallets, and no call would reach one any more.
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
