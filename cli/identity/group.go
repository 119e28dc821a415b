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

// groupCommand returns the command `trivet group`. The argument users is the shell completion for user IDs.
func groupCommand(s *session.Session, users cobra.CompletionFunc) *cobra.Command {
	c := &cobra.Command{
		Use: "group", Short: "Create groups of users, and change their members", Args: cobra.NoArgs,
		Long: `Create groups of the users of an org, and change their members. The members of a group have its roles, which
` + "`trivet binding create --group`" + ` gives. A change is effective at once. Only users whose home org is the org of the group
can be members, unless a system:admin adds them. These commands require the role org:admin, in the org of --org or
of the login.`,
		Example: "  trivet group create devs --org acme\n  trivet group add devs ada bob --org acme\n" +
			"  trivet binding create --group devs --role project:member --org acme --project web",
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createGroupCommand(s), listGroupsCommand(s), showGroupCommand(s), updateGroupCommand(s), deleteGroupCommand(s),
		membersCommand(s, users, "add", "Add users to a group", "is in group", func(ctx context.Context, c identityv1.IdentityServiceClient, org, group, user string) error {
			_, err := c.AddGroupMember(ctx, &identityv1.AddGroupMemberRequest{OrgId: org, GroupId: group, UserId: user})
			return err
		}),
		membersCommand(s, users, "remove", "Remove users from a group", "is not in group", func(ctx context.Context, c identityv1.IdentityServiceClient, org, group, user string) error {
			_, err := c.RemoveGroupMember(ctx, &identityv1.RemoveGroupMemberRequest{OrgId: org, GroupId: group, UserId: user})
			return err
		}))
	return c
}

func listGroupsCommand(s *session.Session) *cobra.Command {
	c := groups(s).Command(s, &cobra.Command{Use: "list", Short: "List the groups of an org",
		Long: `List the groups of an org: that of --org, or that of the login. A system:admin whose login has no org sees the groups of
all orgs without --org.`}, callTimeout)
	list := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := list(c, args); err != nil {
			return err
		}
		named, _ := s.Named()
		if org, _ := s.Tenant(); named == "" && org != "" && s.Form.ForPeople() {
			s.Note("only the groups of org %s are listed, which is the org of the login; --org names another one", org)
		}
		return nil
	}
	return c
}

func groups(s *session.Session) *list.Kind[*identityv1.Group] {
	type group = *identityv1.Group
	return &list.Kind[group]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]group, string, error) {
			org, _ := s.Tenant()
			page, err := identityv1.NewIdentityServiceClient(conn).ListGroups(ctx,
				&identityv1.ListGroupsRequest{OrgId: org, PageSize: q.Size, PageToken: q.Token})
			return page.GetGroups(), page.GetNextPageToken(), err
		},
		Name: group.GetId,
		Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[group] {
			return []list.Column[group]{
				{Name: "ID", Text: group.GetId},
				{Name: "ORG", Text: group.GetOrgId},
				{Name: "NAME", Text: group.GetName, Max: 20},
				{Name: "ROLES", Text: func(g group) string { return strings.Join(groupRoles(g), ", ") }, Max: 26},
				list.Age("AGE", s.Now, group.GetCreatedAt),
				list.Time("CREATED", group.GetCreatedAt, list.InWide),
				{Name: "CREATOR", Text: group.GetCreatedBy, In: list.InWide},
			}
		},
	}
}

// groupNames returns a shell completion for an argument or a flag, with the IDs of groups.
func groupNames(s *session.Session) cobra.CompletionFunc { return groups(s).Names(s) }

func groupRoles(g *identityv1.Group) (all []string) {
	for _, b := range g.GetBindings() {
		all = append(all, bindingText(b))
	}
	return all
}

func createGroupCommand(s *session.Session) *cobra.Command {
	var name string
	c := &cobra.Command{
		Use: "create GROUP", Short: "Create a group of users", Args: session.Exactly("GROUP"),
		Long:    "Create a group of users. GROUP is its ID: 1 to 63 of A-Z a-z 0-9 . _ @ -, unique in the org.",
		Example: "  trivet group create devs --org acme --name Developers",
	}
	c.Flags().StringVar(&name, "name", "", "display name (default: the ID)")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		org, _ := s.Tenant()
		g, err := identityv1.NewIdentityServiceClient(conn).CreateGroup(ctx, &identityv1.CreateGroupRequest{OrgId: org, Id: args[0], Name: name})
		if err != nil {
			return err
		}
		return groups(s).PrintOne(ctx, s, conn, g)
	})
	return c
}

func showGroupCommand(s *session.Session) *cobra.Command {
	c := groupArgCommand(s, "show GROUP", "Show a group and its members")
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		org, _ := s.Tenant()
		client := identityv1.NewIdentityServiceClient(conn)
		g, err := client.GetGroup(ctx, &identityv1.GetGroupRequest{OrgId: org, Id: id})
		if err != nil {
			return err
		}
		members, _, err := session.Pages(0, func(token string) ([]string, string, error) {
			page, err := client.ListGroupMembers(ctx, &identityv1.ListGroupMembersRequest{
				OrgId: org, GroupId: id, PageSize: session.PageSize, PageToken: token,
			})
			return page.GetUserIds(), page.GetNextPageToken(), err
		})
		if err != nil {
			return err
		}
		return s.PrintValue(groupDocument(g, members), []string{g.GetId()}, func(w io.Writer) error {
			f := [][2]string{
				{"ID", g.GetId()}, {"Org", g.GetOrgId()}, {"Name", g.GetName()}, {"Created", show.When(g.GetCreatedAt())}, {"Created by", g.GetCreatedBy()},
			}
			for _, r := range groupRoles(g) {
				f = append(f, [2]string{"Role", r})
			}
			for _, m := range members {
				f = append(f, [2]string{"Member", m})
			}
			return show.Fields(w, f)
		})
	})
	return c
}

// groupDocument returns the document of a group for -o json: that of the message, which has no members, and the IDs of the
// members.
func groupDocument(g *identityv1.Group, members []string) show.Object {
	ids := make([]any, len(members))
	for i, id := range members {
		ids[i] = id
	}
	return append(show.Document(g), show.Member{Key: "members", Value: ids})
}

func updateGroupCommand(s *session.Session) *cobra.Command {
	var name string
	c := groupArgCommand(s, "update GROUP", "Change the display name of a group")
	c.Long = `Change the display name of a group. Its ID cannot be changed, because its members refer to it. "trivet group add" and
"trivet group remove" change the members, and "trivet binding" the roles.`
	c.Example = "  trivet group update devs --org acme --name Developers"
	displayNameFlag(c, &name, displayNameOrID)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		org, _ := s.Tenant()
		g, err := identityv1.NewIdentityServiceClient(conn).UpdateGroup(ctx, &identityv1.UpdateGroupRequest{OrgId: org, Id: args[0], Name: &name})
		if err != nil {
			return err
		}
		return groups(s).PrintOne(ctx, s, conn, g)
	})
	return c
}

func deleteGroupCommand(s *session.Session) *cobra.Command {
	c := groupArgCommand(s, "delete GROUP", "Delete a group")
	c.Long = "Delete a group. Its members lose its roles at once."
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		org, _ := s.Tenant()
		if _, err := identityv1.NewIdentityServiceClient(conn).DeleteGroup(ctx, &identityv1.DeleteGroupRequest{OrgId: org, Id: id}); err != nil {
			return err
		}
		return s.Done(id, "deleted")
	})
	return c
}

// membersCommand returns the command `trivet group add` or `trivet group remove`, depending on verb. The function do
// makes the API call for one user.
func membersCommand(s *session.Session, users cobra.CompletionFunc, verb, short, done string,
	do func(ctx context.Context, c identityv1.IdentityServiceClient, org, group, user string) error) *cobra.Command {
	c := &cobra.Command{
		Use: verb + " GROUP USER...", Short: short,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return session.Usagef("want GROUP and at least one USER")
			}
			return nil
		},
		ValidArgsFunction: func(c *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return groupNames(s)(c, args, prefix)
			}
			return users(c, args, prefix)
		},
		Example: "  trivet group " + verb + " devs ada bob --org acme",
	}
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		return s.Each(ctx, callTimeout, args[1:], func(ctx context.Context, user string) error {
			org, _ := s.Tenant()
			if err := do(ctx, client, org, args[0], user); err != nil {
				return err
			}
			return s.Done(user, done+" "+args[0])
		})
	})
	return c
}

func groupArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.Exactly("GROUP"), ValidArgsFunction: session.FirstArg(groupNames(s))}
}
