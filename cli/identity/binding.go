package identity

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// roleScope is the kind of object in which a role is granted: the cloud as a whole, an org, or a project.
type roleScope int

const (
	everywhere roleScope = iota
	inOrg
	inProject
)

var roleTable = []struct {
	name  string
	reach roleScope
}{
	{"system:admin", everywhere}, {"billing:admin", everywhere}, {"org:admin", inOrg},
	{"project:admin", inProject}, {"project:member", inProject}, {"project:viewer", inProject},
}

// roleNames returns the names of all roles.
func roleNames() (names []string) {
	for _, r := range roleTable {
		names = append(names, r.name)
	}
	return names
}

// projectRoleNames returns the names of the roles that are granted in a project.
func projectRoleNames() (names []string) {
	for _, r := range roleTable {
		if r.reach == inProject {
			names = append(names, r.name)
		}
	}
	return names
}

// bindingText formats a role and its tenant, such as "project:admin of acme/web".
func bindingText(b *identityv1.Binding) string {
	switch {
	case b.GetProjectId() != "":
		return b.GetRole() + " of " + b.GetOrgId() + "/" + b.GetProjectId()
	case b.GetOrgId() != "":
		return b.GetRole() + " of " + b.GetOrgId()
	}
	return b.GetRole()
}

// bindingCommand returns the command `trivet binding`. The argument users is the shell completion for user IDs.
func bindingCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	c := &cobra.Command{
		Use: "binding", Short: "Give roles to users and groups and remove them", Args: cobra.NoArgs,
		Long: `Give roles to users and groups and remove them. A change takes effect with the user's next call, without a new
login.

A role is effective at once if a system:admin gives it or if it is in the user's home org. Any other role is an
invitation: it is effective once the user accepts it with ` + "`trivet invitation accept`" + `, and expires after 30 days.

  system:admin     can do everything in the whole cloud
  billing:admin    creates and fills wallets in the whole cloud
  org:admin        creates projects in an org and gives roles in it
  project:admin    can do everything in a project and gives roles in it
  project:member   creates and runs VMs in a project
  project:viewer   has read access to a project

A system:admin can give every role, an org:admin the roles in the org, a project:admin the roles in the project. A
user needs a credential first: ` + "`trivet user password`" + ` or ` + "`trivet user link`" + `.`,
		Example: "  trivet binding create --user ada --role project:member --org acme --project web\n  trivet binding list --org acme",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(
		changeBindingCommand(s, users, "create", "Give a user or a group a role", func(ctx context.Context, c identityv1.IdentityServiceClient, to *identityv1.Grant) (string, error) {
			made, err := c.BindRole(ctx, &identityv1.BindRoleRequest{UserId: to.GetUserId(), GroupId: to.GetGroupId(), Binding: to.GetBinding()})
			if made.GetPending() {
				return grantee(to) + " is invited to " + bindingText(to.GetBinding()), err
			}
			return grantee(to) + " has " + bindingText(to.GetBinding()), err
		}),
		changeBindingCommand(s, users, "delete", "Remove a role from a user or a group, or withdraw the invitation", func(ctx context.Context, c identityv1.IdentityServiceClient, from *identityv1.Grant) (string, error) {
			return removeBinding(ctx, c, from)
		}),
		listBindingsCommand(s, users), showBindingCommand(s, users))
	return c
}

// changeBindingCommand returns the command `trivet binding create` or `trivet binding delete`, depending on verb. The
// function do makes the API call. It returns the sentence that is printed.
func changeBindingCommand(s *session.Session, users cobra.CompletionFunc, verb, short string,
	do func(context.Context, identityv1.IdentityServiceClient, *identityv1.Grant) (sentence string, err error)) *cobra.Command {
	var f bindingFlags
	c := f.command(s, users, verb, short, "")
	session.Old(c, map[string]string{"create": "add", "delete": "remove"}[verb])
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		g, err := f.grant(ctx, s, client)
		if err != nil {
			return err
		}
		sentence, err := do(ctx, client, g)
		if err != nil {
			return err
		}
		return s.PrintValue(show.Object{}, []string{grantee(g)}, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, show.Text(sentence))
			return err
		})
	})
	return c
}

// bindingFlags holds the flags that name a binding: a role, and the user or the group that has it. The org and the project
// are those of the global flags.
type bindingFlags struct{ user, group, role string }

// command returns the command `trivet binding VERB` with the flags. The text more is added to its description.
func (f *bindingFlags) command(s *session.Session, users cobra.CompletionFunc, verb, short, more string) *cobra.Command {
	c := &cobra.Command{
		Use: verb, Short: short, Args: session.Exactly(),
		Long:    short + ". The org and project are those of --org and --project, or else the login's." + more,
		Example: "  trivet binding " + verb + " --user ada --role project:member --org acme --project web\n  trivet binding " + verb + " --user bob --role org:admin --org acme",
	}
	c.Flags().StringVar(&f.user, "user", "", "ID of the user")
	c.Flags().StringVar(&f.group, "group", "", "ID of a group of the org, instead of --user")
	c.Flags().StringVar(&f.role, "role", "", "one of "+strings.Join(roleNames(), ", "))
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("user", users)
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roleNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("group", groupNames(s))
	session.Require(c, "role")
	session.RequireOne(c, "user", "group")
	session.Exclusive(c, "user", "group")
	return c
}

// grant returns the binding that the flags name, as a Grant that is not pending.
func (f *bindingFlags) grant(ctx context.Context, s *session.Session, client identityv1.IdentityServiceClient) (*identityv1.Grant, error) {
	b, err := bindingFromFlags(ctx, s, client, f.role)
	return &identityv1.Grant{UserId: f.user, GroupId: f.group, Binding: b}, err
}

func showBindingCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	var f bindingFlags
	c := f.command(s, users, "show", "Show whether a user or a group has a role", `
The command fails with exit code 3 if the user or the group does not have the role. A role that was given
to a group of the user does not count: "trivet user show" lists the groups of a user, and --group asks for one.`)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		wanted, err := f.grant(ctx, s, client)
		if err != nil {
			return err
		}
		all, err := grantsOf(ctx, client, wanted.GetBinding())
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(g *identityv1.Grant) bool { return sameGrant(g, wanted) })
		if i < 0 {
			return errNoGrant(wanted)
		}
		return s.Print(all[i], []string{grantee(all[i])}, func(w io.Writer) error { return show.Fields(w, grantFields(s, all[i])) })
	})
	return c
}

func grantFields(s *session.Session, g *identityv1.Grant) [][2]string {
	holder := [2]string{"User", grantee(g)}
	if g.GetGroupId() != "" {
		holder = [2]string{"Group", g.GetGroupId()}
	}
	b := g.GetBinding()
	f := [][2]string{holder, {"Role", b.GetRole()}, {"Org", b.GetOrgId()}, {"Project", b.GetProjectId()}, {"State", grantState(g)}}
	if g.GetPending() {
		f = append(f, [2]string{"Expires", show.When(g.GetExpiresAt()) + " (" + show.In(s.Now(), g.GetExpiresAt()) + ")"})
	}
	return f
}

func grantState(g *identityv1.Grant) string {
	if g.GetPending() {
		return "INVITED"
	}
	return "ACTIVE"
}

// grantsOf returns all roles in the org and the project of the binding b, and the open invitations to them.
func grantsOf(ctx context.Context, c identityv1.IdentityServiceClient, b *identityv1.Binding) ([]*identityv1.Grant, error) {
	grants, _, err := session.Pages(0, func(token string) ([]*identityv1.Grant, string, error) {
		page, err := c.ListBindings(ctx, &identityv1.ListBindingsRequest{
			OrgId: b.GetOrgId(), ProjectId: b.GetProjectId(), PageSize: session.PageSize, PageToken: token,
		})
		return page.GetGrants(), page.GetNextPageToken(), err
	})
	return grants, err
}

// sameGrant reports whether the listed grant g is the one that the user has named: the same role of the same group, user or
// service account.
func sameGrant(g, named *identityv1.Grant) bool {
	who := g.GetUserId() == named.GetUserId() || named.GetUserId() != "" && g.GetUsername() == named.GetUserId()
	return who && g.GetGroupId() == named.GetGroupId() && proto.Equal(g.GetBinding(), named.GetBinding())
}

func errNoGrant(named *identityv1.Grant) error {
	return session.NotFound("`trivet binding list` shows who has which role", "%s does not have %s", grantee(named), bindingText(named.GetBinding()))
}

// removeBinding removes a role, or an invitation to it, and returns the sentence that says so. UnbindRole succeeds also
// if there is neither, so the roles are listed before. A caller who removes an own role may not list them.
func removeBinding(ctx context.Context, c identityv1.IdentityServiceClient, from *identityv1.Grant) (string, error) {
	b := from.GetBinding()
	grants, listErr := grantsOf(ctx, c, b)
	if listErr != nil && status.Code(listErr) != codes.PermissionDenied {
		return "", listErr
	}
	_, err := c.UnbindRole(ctx, &identityv1.UnbindRoleRequest{UserId: from.GetUserId(), GroupId: from.GetGroupId(), Binding: b})
	if err != nil {
		return "", err
	}
	if listErr == nil && !slices.ContainsFunc(grants, func(g *identityv1.Grant) bool { return sameGrant(g, from) }) {
		return "", errNoGrant(from)
	}
	return "removed " + bindingText(b) + " from " + grantee(from), nil
}

// grantee returns who has the role of g: the ID of a user, the username of a service account, or a group.
func grantee(g *identityv1.Grant) string {
	if g.GetGroupId() != "" {
		return "group " + g.GetGroupId()
	}
	return cmp.Or(g.GetUsername(), g.GetUserId())
}

// bindingFromFlags returns a binding of role. Its org and project come from the flags, the environment or the saved
// login. They are set only as far as the role needs them: org and project for a role in a project, only the org for a
// role in an org, and neither for a role in the cloud as a whole.
func bindingFromFlags(ctx context.Context, s *session.Session, client identityv1.IdentityServiceClient, role string) (*identityv1.Binding, error) {
	i := slices.Index(roleNames(), role)
	if i < 0 {
		return nil, session.Usagef("--role %q: want one of %s", role, strings.Join(roleNames(), ", "))
	}
	reach := roleTable[i].reach
	if reach < inProject && s.Given("project") {
		return nil, session.Usagef("%s is not a role in a project: omit --project", role)
	}
	if reach < inOrg && s.Given("org") {
		return nil, session.Usagef("%s is not a role in an org: omit --org", role)
	}
	b := &identityv1.Binding{Role: role}
	org, project := s.Tenant()
	if reach == inProject {
		var err error
		if org, err = orgOfProject(ctx, client, org, project); err != nil {
			return nil, err
		}
	}
	if reach >= inOrg {
		b.OrgId = org
	}
	if reach >= inProject {
		b.ProjectId = project
	}
	return b, nil
}

// orgOfProject returns org, if it is not empty. Otherwise it requests the org of the project from the control plane.
func orgOfProject(ctx context.Context, client identityv1.IdentityServiceClient, org, project string) (string, error) {
	if org != "" || project == "" {
		return org, nil
	}
	p, err := client.GetProject(ctx, &identityv1.GetProjectRequest{Id: project})
	return p.GetOrgId(), err
}

func grantColumns(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.Grant] {
	type grant = *identityv1.Grant
	return []list.Column[grant]{
		{Name: "USER", Text: grantee},
		{Name: "ROLE", Text: func(g grant) string { return g.GetBinding().GetRole() }},
		{Name: "ORG", Text: func(g grant) string { return g.GetBinding().GetOrgId() }},
		{Name: "PROJECT", Text: func(g grant) string { return g.GetBinding().GetProjectId() }},
		{Name: "STATE", Text: grantState},
		list.Time("EXPIRES", grant.GetExpiresAt, list.InWide),
	}
}

func listBindingsCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	var all bool
	var user, group, role string
	grants := &list.Kind[*identityv1.Grant]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.Grant, string, error) {
			client := identityv1.NewIdentityServiceClient(conn)
			req := &identityv1.ListBindingsRequest{PageSize: q.Size, PageToken: q.Token}
			switch {
			case all && (s.Given("org") || s.Given("project")):
				return nil, "", session.Usagef("give --all, or --org and --project, not both")
			case !all:
				org, project := s.Tenant()
				org, err := orgOfProject(ctx, client, org, project)
				if err != nil {
					return nil, "", err
				}
				req.OrgId, req.ProjectId = org, project
			}
			page, err := client.ListBindings(ctx, req)
			return page.GetGrants(), page.GetNextPageToken(), err
		},
		Name:    grantee,
		Columns: grantColumns,
		Keep: func(g *identityv1.Grant) bool {
			return (user == "" || user == g.GetUserId() || user == g.GetUsername()) && (group == "" || group == g.GetGroupId()) && (role == "" || role == g.GetBinding().GetRole())
		},
	}
	c := grants.Command(s, &cobra.Command{
		Use: "list", Short: "List users and groups with their roles",
		Long: `List users, service accounts and groups with their roles in the org and project of --org and --project, or else of
the login. With --all, or if neither the flags nor the login name an org or project, list all roles, which requires the
role system:admin.`,
		Example: "  trivet binding list --org acme\n  trivet binding list --all --role system:admin",
	}, callTimeout)
	c.Flags().BoolVar(&all, "all", false, "list the roles in every org and project")
	c.Flags().StringVar(&user, "user", "", "list only the roles of this user, or of this service account, as NAME@ORG/PROJECT")
	c.Flags().StringVar(&group, "group", "", "list only the roles of this group")
	c.Flags().StringVar(&role, "role", "", "list only this role")
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("user", users)
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roleNames(), cobra.ShellCompDirectiveNoFileComp))
	return c
}
