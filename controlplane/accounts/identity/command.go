package identity

import (
	"context"
	"crypto/sha256"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/password"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

type (
	newName struct {
		ID   cloud.UserID
		Name string
		// Home is the ID of the org that the user belongs to, or empty.
		Home cloud.OrgID
		// Open is true if an unauthenticated caller registers the name.
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
	// answer holds the arguments of acceptCommand and declineCommand: a user, and the role to which the user is
	// invited.
	answer struct {
		User    cloud.UserID
		Binding cloud.Binding
	}
	newGroup struct {
		Group    principal.GroupRef
		Name, By string
	}
	// groupGrant holds the arguments of bindGroupCommand and unbindGroupCommand.
	groupGrant struct {
		Group   principal.GroupRef
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
		// AnyQuota is true if the caller may give the project a larger quota than the default.
		AnyQuota bool
	}
	// newDisplayName holds the arguments of the commands that change the display name of an org, a project or a user.
	newDisplayName[ID ~string] struct {
		ID   ID
		Name string
	}
	newProjectName struct {
		Tenant cloud.Tenant
		Name   string
	}
	newQuota struct {
		Tenant cloud.Tenant
		Quota  tenant.Quota
	}
	oldKey   struct{ ID string }
	rotation struct{ Force bool }
	none     struct{}
)

// command is a command that any member can call. Its function runs on the leader, and gets the leader's Service.
type command[Q, A any] = leader.Command[*Service, Q, A]

// newCommand returns the command identity.<name>, which runs the function f on the leader in one transaction. In mode
// Keyed, a caller may send an idempotency key. The response is then stored under that key, and a repeated request with
// the key gets the stored response.
func newCommand[Q, A any](name string, mode leader.Mode, f func(s *Service, tx *store.Tx, q Q) (A, error)) *command[Q, A] {
	return leader.NewCommand("identity."+name, mode, func(s *Service, ctx context.Context, q Q) (out A, err error) {
		body, err := cbor.Marshal(q)
		if err != nil {
			return out, fmt.Errorf("encode %s: %w", name, err)
		}
		caller := auth.CallerOf(ctx)
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
			if mode != leader.Keyed || caller == nil {
				out, err = f(s, tx, q)
			} else {
				out, _, err = store.Idempotent(tx, caller, store.OfPrincipal(caller.Name()), name, sha256.Sum256(body), func() (A, error) { return f(s, tx, q) })
			}
			if err != nil {
				return err
			}
			// A command that changes nothing, such as giving a role that the user has already, writes no log entry and
			// no audit record.
			return tx.DropUnchanged()
		})
		return out, err
	})
}

// register registers all commands of the service with Options.Commands, so that any member can call them on the leader.
func (s *Service) register() {
	leader.Register(s.opts.Commands, s,
		createUserCommand, setPasswordCommand, setDisabledCommand, deleteUserCommand, revokeCommand, denyCommand,
		rememberNetworkCommand, linkCommand, unlinkCommand,
		bindCommand, unbindCommand, acceptCommand, declineCommand, createAccountCommand, updateAccountCommand, deleteAccountCommand,
		renameUserCommand, renameOrgCommand, renameProjectCommand, renameGroupCommand,
		createGroupCommand, deleteGroupCommand, addMemberCommand, removeMemberCommand, bindGroupCommand, unbindGroupCommand,
		createOrgCommand, deleteOrgCommand, createProjectCommand, deleteProjectCommand, setQuotaCommand, setDefaultQuotaCommand,
		rotateKeysCommand, revokeKeyCommand,
	)
}

// These commands only read and change stored records. They use no field of the Service.
var (
	setPasswordCommand = newCommand("set-password", leader.Repeatable, func(_ *Service, tx *store.Tx, q newPassword) (none, error) {
		return dropResult(principal.SetPassword(tx, q.User, q.Hash))
	})
	setDisabledCommand = newCommand("disable", leader.Repeatable, func(_ *Service, tx *store.Tx, q newState) (principal.User, error) {
		return valueOf(principal.SetDisabled(tx, q.User, q.Disabled))
	})
	revokeCommand = newCommand("revoke", leader.Repeatable, func(_ *Service, tx *store.Tx, id cloud.UserID) (none, error) {
		return dropResult(principal.Revoke(tx, id))
	})
	denyCommand = newCommand("deny", leader.Repeatable, func(_ *Service, tx *store.Tx, q denial) (denied, error) {
		return q.put(tx)
	})
	linkCommand = newCommand("link", leader.Repeatable, func(_ *Service, tx *store.Tx, q newIdentity) (principal.User, error) {
		return valueOf(principal.Link(tx, q.User, q.Identity))
	})
	unlinkCommand = newCommand("unlink", leader.Once, func(_ *Service, tx *store.Tx, q newIdentity) (principal.User, error) {
		return valueOf(principal.Unlink(tx, q.User, q.Identity))
	})
	bindCommand = newCommand("bind", leader.Repeatable, func(_ *Service, tx *store.Tx, q principal.Grant) (bool, error) {
		return principal.Bind(tx, q)
	})
	unbindCommand = newCommand("unbind", leader.Repeatable, func(_ *Service, tx *store.Tx, q principal.Grant) (none, error) {
		return none{}, principal.Unbind(tx, q)
	})
	acceptCommand = newCommand("accept", leader.Repeatable, func(_ *Service, tx *store.Tx, q answer) (none, error) {
		return none{}, principal.Accept(tx, q.User, q.Binding)
	})
	declineCommand = newCommand("decline", leader.Once, func(_ *Service, tx *store.Tx, q answer) (none, error) {
		return none{}, principal.Decline(tx, q.User, q.Binding)
	})
	createAccountCommand = newCommand("create-account", leader.Once, func(_ *Service, tx *store.Tx, q principal.NewAccount) (principal.User, error) {
		return valueOf(principal.CreateAccount(tx, q))
	})
	updateAccountCommand = newCommand("update-account", leader.Repeatable, func(_ *Service, tx *store.Tx, q principal.AccountChange) (principal.User, error) {
		return valueOf(principal.UpdateAccount(tx, q))
	})
	renameUserCommand = newCommand("rename-user", leader.Repeatable, func(_ *Service, tx *store.Tx, q newDisplayName[cloud.UserID]) (principal.User, error) {
		u, err := valueOf(principal.Rename(tx, q.ID, q.Name))
		if err == nil {
			u.Bindings, err = alive(tx, u.Bindings)
		}
		return u, err
	})
	renameOrgCommand = newCommand("rename-org", leader.Repeatable, func(_ *Service, tx *store.Tx, q newDisplayName[cloud.OrgID]) (tenant.Org, error) {
		return valueOf(tenant.RenameOrg(tx, q.ID, q.Name))
	})
	deleteAccountCommand = newCommand("delete-account", leader.Keyed, func(_ *Service, tx *store.Tx, q oldAccount) (none, error) {
		return none{}, principal.DeleteAccount(tx, q.Tenant, q.ID)
	})
	setDefaultQuotaCommand = newCommand("set-default-quota", leader.Repeatable, func(_ *Service, tx *store.Tx, q tenant.Quota) (none, error) {
		return none{}, tenant.SetDefaultQuota(tx, q)
	})
	createOrgCommand = newCommand("create-org", leader.Keyed, func(_ *Service, tx *store.Tx, q newOrg) (tenant.Org, error) {
		return valueOf(tenant.CreateOrg(tx, q.ID, q.Name))
	})
)

// valueOf returns err if err is not nil, and *record otherwise. Commands return values, not pointers.
func valueOf[T any](record *T, err error) (T, error) {
	if err != nil {
		return *new(T), err
	}
	return *record, nil
}

// dropResult discards the user and returns only err. It is for commands whose response does not contain the changed
// user.
func dropResult(_ *principal.User, err error) (none, error) { return none{}, err }

var deleteOrgCommand = newCommand("delete-org", leader.Keyed, (*Service).deleteOrgOnLeader)

// deleteOrgOnLeader deletes an org that has no projects and groups, and the invitations to roles in the org. If a function in
// Options.Holds returns an error, nothing is deleted and the caller gets that error.
func (s *Service) deleteOrgOnLeader(tx *store.Tx, id cloud.OrgID) (none, error) {
	for _, hold := range s.opts.Holds {
		if err := hold(tx, cloud.Tenant{Org: id}); err != nil {
			return none{}, err
		}
	}
	if err := principal.CheckNoGroups(tx, id); err != nil {
		return none{}, err
	}
	if err := tenant.DeleteOrg(tx, id); err != nil {
		return none{}, err
	}
	return none{}, principal.WithdrawAll(tx, cloud.Tenant{Org: id})
}

var createProjectCommand = newCommand("create-project", leader.Keyed, (*Service).createProjectOnLeader)

// createProjectOnLeader creates a project. Limits that q.Quota does not set are the default of new projects. If a function in Options.Vacant finds records under the project's ID, the
// project is not created and the caller gets an error.
func (s *Service) createProjectOnLeader(tx *store.Tx, q newProject) (tenant.Project, error) {
	if !q.AnyQuota {
		if err := tenant.CheckWithinDefault(tx, q.Quota); err != nil {
			return tenant.Project{}, err
		}
	}
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

var renameProjectCommand = newCommand("rename-project", leader.Repeatable, (*Service).renameProjectOnLeader)

// renameProjectOnLeader changes the display name of a project. If the request names an org, the project must belong to
// that org.
func (s *Service) renameProjectOnLeader(tx *store.Tx, q newProjectName) (tenant.Project, error) {
	if err := s.ofOrg(tx, q.Tenant); err != nil {
		return tenant.Project{}, err
	}
	return valueOf(tenant.RenameProject(tx, q.Tenant.Project, q.Name))
}

var deleteProjectCommand = newCommand("delete-project", leader.Keyed, (*Service).deleteProjectOnLeader)

// deleteProjectOnLeader deletes a project that has no usage, its service accounts, and the invitations to roles in it.
// If t names an org, the project must belong to that org. If a function in Options.Holds returns an error, nothing is
// deleted and the caller gets that error.
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
	for _, forget := range s.opts.Forget {
		if err := forget(tx, cloud.Tenant{Org: org, Project: t.Project}); err != nil {
			return none{}, err
		}
	}
	if err := tenant.DeleteProject(tx, t.Project); err != nil {
		return none{}, err
	}
	if err := principal.WithdrawAll(tx, cloud.Tenant{Org: org, Project: t.Project}); err != nil {
		return none{}, err
	}
	return none{}, principal.DeleteAccounts(tx, t.Project)
}

var setQuotaCommand = newCommand("set-quota", leader.Repeatable, (*Service).setQuotaOnLeader)

// setQuotaOnLeader sets the quota of a project. If the request names no project, it sets the quota of the org.
func (s *Service) setQuotaOnLeader(tx *store.Tx, q newQuota) (none, error) {
	if q.Tenant.Project == "" {
		return none{}, tenant.SetOrgQuota(tx, q.Tenant.Org, q.Quota)
	}
	if err := s.ofOrg(tx, q.Tenant); err != nil {
		return none{}, err
	}
	return none{}, tenant.SetQuota(tx, q.Tenant.Project, q.Quota)
}

// ofOrg returns NotFound if the project in t does not exist, or if t names an org to which the project does not belong.
func (s *Service) ofOrg(r store.Reader, t cloud.Tenant) error {
	p, err := tenant.Find(r, t.Project)
	if err == nil && (p == nil || t.Org != "" && p.Org != t.Org) {
		return tenant.NoProject(t.Project)
	}
	return err
}
