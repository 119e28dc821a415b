package identity

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/keyring"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

type (
	newName struct {
		ID   cloud.UserID
		Name string
		// Home is the org that the user belongs to; empty for none.
		Home cloud.OrgID
		// Open is set for a name that anybody may register.
		Open bool
	}
	newPassword struct {
		User cloud.UserID
		Hash password.Hash
	}
	newIdentity struct {
		User     cloud.UserID
		Identity principal.Identity
	}
	newState struct {
		User     cloud.UserID
		Disabled bool
	}
	// answer is a user's acceptance or refusal of an invitation.
	answer struct {
		User    cloud.UserID
		Binding cloud.Binding
	}
	oldAccount struct {
		Tenant cloud.Tenant
		ID     cloud.UserID
	}
	newOrg struct {
		ID   cloud.OrgID
		Name string
	}
	newProject struct {
		Tenant cloud.Tenant
		Name   string
		Quota  tenant.Quota
	}
	newQuota struct {
		Tenant cloud.Tenant
		Quota  tenant.Quota
	}
	oldKey struct{ ID string }
	turn   struct{ Force bool }
	none   struct{}
)

// commands are what only the leader does, each as a function that any member may call.
type commands struct {
	createUser  func(context.Context, newName) (principal.User, error)
	setPassword func(context.Context, newPassword) (none, error)
	disable     func(context.Context, newState) (principal.User, error)
	deleteUser  func(context.Context, cloud.UserID) (none, error)
	revoke      func(context.Context, cloud.UserID) (none, error)
	deny        func(context.Context, denial) (denied, error)
	remember    func(context.Context, newNetwork) (none, error)
	link        func(context.Context, newIdentity) (principal.User, error)
	unlink      func(context.Context, newIdentity) (principal.User, error)

	bind          func(context.Context, principal.Grant) (bool, error)
	unbind        func(context.Context, principal.Grant) (none, error)
	accept        func(context.Context, answer) (none, error)
	decline       func(context.Context, answer) (none, error)
	createAccount func(context.Context, principal.NewAccount) (principal.User, error)
	deleteAccount func(context.Context, oldAccount) (none, error)

	createOrg     func(context.Context, newOrg) (tenant.Org, error)
	deleteOrg     func(context.Context, cloud.OrgID) (none, error)
	createProject func(context.Context, newProject) (tenant.Project, error)
	deleteProject func(context.Context, cloud.Tenant) (none, error)
	setQuota      func(context.Context, newQuota) (none, error)

	rotate    func(context.Context, turn) (keyring.Ring, error)
	revokeKey func(context.Context, oldKey) (keyring.Ring, error)
}

func (s *Service) commands() commands {
	return commands{
		createUser: change(s, "create-user", leader.Keyed, s.createUserOnLeader),
		setPassword: change(s, "set-password", leader.Repeatable, func(tx *store.Tx, q newPassword) (none, error) {
			return done(principal.SetPassword(tx, q.User, q.Hash))
		}),
		disable: change(s, "disable", leader.Repeatable, func(tx *store.Tx, q newState) (principal.User, error) {
			return of(principal.SetDisabled(tx, q.User, q.Disabled))
		}),
		deleteUser: change(s, "delete-user", leader.Keyed, s.deleteUserOnLeader),
		revoke:     change(s, "revoke", leader.Repeatable, func(tx *store.Tx, id cloud.UserID) (none, error) { return done(principal.Revoke(tx, id)) }),
		deny:       change(s, "deny", leader.Repeatable, func(tx *store.Tx, q denial) (denied, error) { return q.put(tx) }),
		remember:   change(s, "remember-network", leader.Repeatable, rememberNetworkOnLeader),
		link: change(s, "link", leader.Repeatable, func(tx *store.Tx, q newIdentity) (principal.User, error) {
			return of(principal.Link(tx, q.User, q.Identity))
		}),
		unlink: change(s, "unlink", leader.Once, func(tx *store.Tx, q newIdentity) (principal.User, error) {
			return of(principal.Unlink(tx, q.User, q.Identity))
		}),

		bind:    change(s, "bind", leader.Repeatable, principal.Bind),
		unbind:  change(s, "unbind", leader.Repeatable, func(tx *store.Tx, q principal.Grant) (none, error) { return none{}, principal.Unbind(tx, q) }),
		accept:  change(s, "accept", leader.Repeatable, func(tx *store.Tx, q answer) (none, error) { return none{}, principal.Accept(tx, q.User, q.Binding) }),
		decline: change(s, "decline", leader.Once, func(tx *store.Tx, q answer) (none, error) { return none{}, principal.Decline(tx, q.User, q.Binding) }),
		createAccount: change(s, "create-account", leader.Once, func(tx *store.Tx, q principal.NewAccount) (principal.User, error) {
			return of(principal.CreateAccount(tx, q))
		}),
		deleteAccount: change(s, "delete-account", leader.Keyed, func(tx *store.Tx, q oldAccount) (none, error) {
			return none{}, principal.DeleteAccount(tx, q.Tenant, q.ID)
		}),

		createOrg:     change(s, "create-org", leader.Keyed, func(tx *store.Tx, q newOrg) (tenant.Org, error) { return of(tenant.CreateOrg(tx, q.ID, q.Name)) }),
		deleteOrg:     change(s, "delete-org", leader.Keyed, s.deleteOrgOnLeader),
		createProject: change(s, "create-project", leader.Keyed, s.createProjectOnLeader),
		deleteProject: change(s, "delete-project", leader.Keyed, s.deleteProjectOnLeader),
		setQuota:      change(s, "set-quota", leader.Repeatable, s.setQuotaOnLeader),

		rotate:    change(s, "rotate-keys", leader.Once, s.rotateKeysOnLeader),
		revokeKey: change(s, "revoke-key", leader.Once, s.revokeKeyOnLeader),
	}
}

// of is a record as the answer of a command.
func of[T any](record *T, err error) (T, error) {
	if err != nil {
		return *new(T), err
	}
	return *record, nil
}

func done(_ *principal.User, err error) (none, error) { return none{}, err }

func (s *Service) deleteOrgOnLeader(tx *store.Tx, id cloud.OrgID) (none, error) {
	for _, hold := range s.opts.Holds {
		if err := hold(tx, cloud.Tenant{Org: id}); err != nil {
			return none{}, err
		}
	}
	if err := tenant.DeleteOrg(tx, id); err != nil {
		return none{}, err
	}
	return none{}, principal.WithdrawAll(tx, cloud.Tenant{Org: id})
}

func (s *Service) createProjectOnLeader(tx *store.Tx, q newProject) (tenant.Project, error) {
	p, err := tenant.CreateProject(tx, q.Tenant, q.Name, q.Quota)
	if err != nil {
		return tenant.Project{}, err
	}
	for _, vacant := range s.opts.Vacant {
		if err := vacant(tx, p.ID); err != nil {
			return tenant.Project{}, err
		}
	}
	return *p, nil
}

// deleteProjectOnLeader removes an empty project with its service accounts. Org is empty for whoever may delete in each.
func (s *Service) deleteProjectOnLeader(tx *store.Tx, t cloud.Tenant) (none, error) {
	if err := s.ofOrg(tx, t); err != nil {
		return none{}, err
	}
	for _, hold := range s.opts.Holds {
		if err := hold(tx, cloud.Tenant{Project: t.Project}); err != nil {
			return none{}, err
		}
	}
	org, err := tenant.OrgOf(tx, t.Project)
	if err != nil {
		return none{}, err
	}
	if err := tenant.DeleteProject(tx, t.Project); err != nil {
		return none{}, err
	}
	if err := principal.WithdrawAll(tx, cloud.Tenant{Org: org, Project: t.Project}); err != nil {
		return none{}, err
	}
	return none{}, principal.DeleteAccounts(tx, t.Project)
}

// setQuotaOnLeader sets the quota of a project or, if the project is empty, of an org.
func (s *Service) setQuotaOnLeader(tx *store.Tx, q newQuota) (none, error) {
	if q.Tenant.Project == "" {
		return none{}, tenant.SetOrgQuota(tx, q.Tenant.Org, q.Quota)
	}
	if err := s.ofOrg(tx, q.Tenant); err != nil {
		return none{}, err
	}
	return none{}, tenant.SetQuota(tx, q.Tenant.Project, q.Quota)
}

// ofOrg says whether a project is there, and in the org that is named. Another org's is not found.
func (s *Service) ofOrg(r store.Reader, t cloud.Tenant) error {
	p, err := tenant.Find(r, t.Project)
	if err == nil && (p == nil || t.Org != "" && p.Org != t.Org) {
		return tenant.NoProject(t.Project)
	}
	return err
}
