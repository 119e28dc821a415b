package identity

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// orgCommand returns the command `trivet org`.
func orgCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "org", Short: "Create, list, update and delete orgs", Args: cobra.NoArgs,
		Long: `Create, list, update and delete orgs. An org is a customer or a department and contains projects. Users with the role
org:admin in an org create its projects, give roles in it and change its display name. Creating and deleting orgs
requires the role system:admin.`,
		Example: "  trivet org create acme --name \"Acme Corp.\"\n  trivet project create web --org acme",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createOrgCommand(s), orgs.Command(s, &cobra.Command{Use: "list", Short: "List the orgs that you have a role in"}, callTimeout),
		showOrgCommand(s), updateOrgCommand(s), deleteOrgCommand(s))
	return c
}

var orgs = &list.Kind[*identityv1.Org]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.Org, string, error) {
		page, err := identityv1.NewIdentityServiceClient(conn).ListOrgs(ctx, &identityv1.ListOrgsRequest{PageSize: q.Size, PageToken: q.Token})
		return page.GetOrgs(), page.GetNextPageToken(), err
	},
	Name: (*identityv1.Org).GetId,
	Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.Org] {
		return []list.Column[*identityv1.Org]{
			{Name: "ID", Text: (*identityv1.Org).GetId},
			{Name: "NAME", Text: (*identityv1.Org).GetName, Max: 40},
			list.Age("AGE", s.Now, (*identityv1.Org).GetCreatedAt),
			list.Time("CREATED", (*identityv1.Org).GetCreatedAt, list.InWide),
		}
	},
}

// OrgNames returns a shell completion for an argument or a flag, with the IDs of orgs.
func OrgNames(s *session.Session) cobra.CompletionFunc { return orgs.Names(s) }

func createOrgCommand(s *session.Session) *cobra.Command {
	var name string
	c := &cobra.Command{
		Use: "create ORG", Short: "Create an org", Args: session.Exactly("ORG"),
		Long: `Create an org. ORG is its ID: 1 to 63 of A-Z a-z 0-9 . _ @ -. It cannot be changed, and is never used again after
the org is deleted. A new org can have 100 projects and has no other limits: set its quota with "trivet quota update
--org ORG".`,
		Example: "  trivet org create acme --name \"Acme Corp.\"",
	}
	c.Flags().StringVar(&name, "name", "", "display name (default: the ID)")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		o, err := identityv1.NewIdentityServiceClient(conn).CreateOrg(ctx, &identityv1.CreateOrgRequest{Id: args[0], Name: name})
		if err != nil {
			return err
		}
		return orgs.PrintOne(ctx, s, conn, o)
	})
	return c
}

func showOrgCommand(s *session.Session) *cobra.Command {
	c := orgArgCommand(s, "show ORG", "Show an org with its usage and quota")
	c.Long = `Show an org. Callers who may read its quota (org:admin, billing:admin and system:admin) also see the number of its
projects, and its other resources that are used or limited. "trivet quota show --org ORG" shows all of them.`
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		o, err := client.GetOrg(ctx, &identityv1.GetOrgRequest{Id: id})
		if err != nil {
			return err
		}
		if s.Form == show.CSV { // a table of one row, as of a list
			return orgs.PrintOne(ctx, s, conn, o)
		}
		quota, err := readableQuota(ctx, client, &identityv1.GetQuotaRequest{OrgId: id})
		if err != nil {
			return err
		}
		return s.PrintValue(withQuota(o, quota), []string{id}, func(w io.Writer) error {
			f := [][2]string{{"ID", o.GetId()}, {"Name", o.GetName()}, {"Created", created(s, o.GetCreatedAt())}}
			return show.Fields(w, append(f, quotaFields(quota, orgQuota)...))
		})
	})
	return c
}

func updateOrgCommand(s *session.Session) *cobra.Command {
	var name string
	c := orgArgCommand(s, "update ORG", "Change the display name of an org")
	c.Long = `Change the display name of an org. Its ID cannot be changed, because roles, tokens and projects refer to it. Requires
the role org:admin in the org, or system:admin. "trivet quota update --org ORG" changes the quota.`
	c.Example = "  trivet org update acme --name \"Acme Corp.\""
	displayNameFlag(c, &name, displayNameOrID)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		o, err := identityv1.NewIdentityServiceClient(conn).UpdateOrg(ctx, &identityv1.UpdateOrgRequest{Id: args[0], Name: &name})
		if err != nil {
			return err
		}
		return orgs.PrintOne(ctx, s, conn, o)
	})
	return c
}

func deleteOrgCommand(s *session.Session) *cobra.Command {
	c := orgArgCommand(s, "delete ORG", "Delete an org that has no projects")
	c.Long = "Delete an org that has no projects. Its ID is never used again; the IDs of its deleted projects become free."
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		if _, err := identityv1.NewIdentityServiceClient(conn).DeleteOrg(ctx, &identityv1.DeleteOrgRequest{Id: id}); err != nil {
			return err
		}
		return s.Done(id, "deleted")
	})
	return c
}

func orgArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.Exactly("ORG"), ValidArgsFunction: session.FirstArg(OrgNames(s))}
}
