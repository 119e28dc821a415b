package identity

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// userCommand returns the command `trivet user`.
func userCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "user", Short: "Create users and set their passwords", Args: cobra.NoArgs,
		Long: `Create users and set their passwords. A new user cannot do anything yet: it needs a credential, which is a password
or an identity at an OpenID provider, and a role, which ` + "`trivet binding create`" + ` gives. These commands require the role
system:admin, except that every user can change their own password.`,
		Example: "  trivet user create ada --name \"Ada Lovelace\"\n  trivet user password ada\n  trivet binding create --user ada --role project:member --org acme --project web",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createUserCommand(s), users.Command(s, &cobra.Command{Use: "list", Short: "List the users"}, callTimeout), showUserCommand(s), updateUserCommand(s), deleteUserCommand(s), setPasswordCommand(s),
		changeUserCommand(s, "disable", "Revoke a user's tokens and issue no new ones", func(ctx context.Context, c identityv1.IdentityServiceClient, id string) (*identityv1.User, error) {
			return c.DisableUser(ctx, &identityv1.DisableUserRequest{UserId: id})
		}),
		changeUserCommand(s, "enable", "Allow a disabled user to log in again", func(ctx context.Context, c identityv1.IdentityServiceClient, id string) (*identityv1.User, error) {
			return c.EnableUser(ctx, &identityv1.EnableUserRequest{UserId: id})
		}),
		linkIdentityCommand(s, "link", "Allow a user to log in with an OpenID provider", func(ctx context.Context, c identityv1.IdentityServiceClient, id string, i *identityv1.Identity) (*identityv1.User, error) {
			return c.LinkIdentity(ctx, &identityv1.LinkIdentityRequest{UserId: id, Identity: i})
		}),
		linkIdentityCommand(s, "unlink", "Stop a user from logging in with an OpenID provider", func(ctx context.Context, c identityv1.IdentityServiceClient, id string, i *identityv1.Identity) (*identityv1.User, error) {
			return c.UnlinkIdentity(ctx, &identityv1.UnlinkIdentityRequest{UserId: id, Identity: i})
		}))
	return c
}

var users = &list.Kind[*identityv1.User]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.User, string, error) {
		page, err := identityv1.NewIdentityServiceClient(conn).ListUsers(ctx, &identityv1.ListUsersRequest{PageSize: q.Size, PageToken: q.Token})
		return page.GetUsers(), page.GetNextPageToken(), err
	},
	Name: (*identityv1.User).GetId,
	Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.User] {
		return []list.Column[*identityv1.User]{
			{Name: "ID", Text: (*identityv1.User).GetId},
			{Name: "NAME", Text: (*identityv1.User).GetName, Max: 16},
			{Name: "STATE", Text: userState, Words: []string{"UNREGISTERED", "ACTIVE", "DISABLED"}},
			{Name: "LOGIN", Text: func(u *identityv1.User) string { return strings.Join(userCredentials(u), ", ") }, In: list.InWide},
			{Name: "ROLES", Text: func(u *identityv1.User) string { return strings.Join(userRoles(u), ", ") }, Max: 30},
			{Name: "ORG", Text: (*identityv1.User).GetOrgId, In: list.InWide},
			list.Time("CREATED", (*identityv1.User).GetCreatedAt, list.InWide),
		}
	},
}

// userNames returns a shell completion for an argument or a flag, with the IDs of users.
func userNames(s *session.Session) cobra.CompletionFunc { return users.Names(s) }

func createUserCommand(s *session.Session) *cobra.Command {
	var name string
	c := &cobra.Command{
		Use: "create USER", Short: "Create a user without a credential", Args: session.Exactly("USER"),
		Long: `Create a user. USER is the ID that the user logs in with: 1 to 63 of A-Z a-z 0-9 . _ @ -. Give it a credential next,
with ` + "`trivet user password`" + ` or ` + "`trivet user link`" + `.

--org is the user's home org: its administrators can give the user roles directly, other orgs can only invite the
user. Without --org, the home org is the org of the first role in an org that a system:admin gives to the user.`,
		Example: "  trivet user create ada --name \"Ada Lovelace\" --org acme",
	}
	c.Flags().StringVar(&name, "name", "", "display name")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req := &identityv1.CreateUserRequest{Id: args[0], Name: name}
		if s.Given("org") {
			req.OrgId, _ = s.Named()
		}
		u, err := identityv1.NewIdentityServiceClient(conn).CreateUser(ctx, req)
		return printUser(ctx, s, conn, u, err)
	})
	return c
}

func showUserCommand(s *session.Session) *cobra.Command {
	c := userArgCommand(s, "show USER", "Show a user")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		u, err := identityv1.NewIdentityServiceClient(conn).GetUser(ctx, &identityv1.GetUserRequest{Id: id})
		if err != nil {
			return err
		}
		return s.Print(u, []string{u.GetId()}, func(w io.Writer) error { return show.Fields(w, userFields(u)) })
	})
	return c
}

func updateUserCommand(s *session.Session) *cobra.Command {
	var name string
	c := userArgCommand(s, "update USER", "Change the display name of a user")
	c.Long = `Change the display name of a user. The ID cannot be changed, because the user logs in with it, and roles, groups and
tokens refer to it. The other commands of ` + "`trivet user`" + ` change the credentials of a user, and ` + "`trivet binding`" + ` the
roles.`
	c.Example = "  trivet user update ada --name \"Ada Lovelace\""
	displayNameFlag(c, &name, "new display name; empty for none")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		u, err := identityv1.NewIdentityServiceClient(conn).UpdateUser(ctx, &identityv1.UpdateUserRequest{UserId: args[0], Name: &name})
		return printUser(ctx, s, conn, u, err)
	})
	return c
}

func deleteUserCommand(s *session.Session) *cobra.Command {
	c := userArgCommand(s, "delete USER", "Delete a user with its credentials and roles")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		if _, err := identityv1.NewIdentityServiceClient(conn).DeleteUser(ctx, &identityv1.DeleteUserRequest{UserId: id}); err != nil {
			return err
		}
		return s.Done(id, "deleted")
	})
	return c
}

func changeUserCommand(s *session.Session, verb, short string, do func(context.Context, identityv1.IdentityServiceClient, string) (*identityv1.User, error)) *cobra.Command {
	c := userArgCommand(s, verb+" USER", short)
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		u, err := do(ctx, identityv1.NewIdentityServiceClient(conn), id)
		return printUser(ctx, s, conn, u, err)
	})
	return c
}

func userArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.Exactly("USER"), ValidArgsFunction: session.FirstArg(userNames(s))}
}

func printUser(ctx context.Context, s *session.Session, conn *dial.Conn, u *identityv1.User, err error) error {
	if err != nil {
		return err
	}
	return users.PrintOne(ctx, s, conn, u)
}

func userState(u *identityv1.User) string {
	switch {
	case u.GetDisabled():
		return "DISABLED"
	case !u.GetRegistered():
		return "UNREGISTERED"
	}
	return "ACTIVE"
}

func userCredentials(u *identityv1.User) (all []string) {
	if u.GetHasPassword() {
		all = append(all, "password")
	}
	for _, i := range u.GetIdentities() {
		all = append(all, i.GetProvider())
	}
	return all
}

func userRoles(u *identityv1.User) (all []string) {
	for _, b := range u.GetBindings() {
		all = append(all, bindingText(b))
	}
	return all
}

func userFields(u *identityv1.User) [][2]string {
	f := [][2]string{{"ID", u.GetId()}, {"Name", u.GetName()}, {"State", userState(u)}, {"Created", show.When(u.GetCreatedAt())}}
	if u.GetOrgId() != "" {
		f = append(f, [2]string{"Home org", u.GetOrgId()})
	}
	if u.GetHasPassword() {
		f = append(f, [2]string{"Password", "is set"})
	}
	for _, i := range u.GetIdentities() {
		f = append(f, [2]string{"Identity", i.GetSubject() + " at " + i.GetProvider()})
	}
	for _, g := range u.GetGroups() {
		f = append(f, [2]string{"Group", g.GetGroupId() + " of " + g.GetOrgId()})
	}
	for _, r := range userRoles(u) {
		f = append(f, [2]string{"Role", r})
	}
	return f
}
