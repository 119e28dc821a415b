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

// projectCommand returns the command `trivet project`.
func projectCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "project", Short: "Create, list, update and delete projects", Args: cobra.NoArgs,
		Long: `Create, list, update and delete projects. A project belongs to an org and contains VMs, images and a wallet, which
other projects cannot see. Changing projects requires the role system:admin, or org:admin in the org.`,
		Example: "  trivet project create web --org acme --vcpus 16 --memory 64GiB\n  trivet login --user ada --org acme --project web",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	all := projectList(s)
	c.AddCommand(createProjectCommand(s), all.Command(s, &cobra.Command{
		Use: "list", Short: "List the projects that you have a role in", Long: "List the projects that you have a role in; with --org only the projects of that org.",
	}, callTimeout), showProjectCommand(s), updateProjectCommand(s), deleteProjectCommand(s))
	return c
}

func projectList(s *session.Session) *list.Kind[*identityv1.Project] {
	return &list.Kind[*identityv1.Project]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.Project, string, error) {
			org, _ := s.Named()
			page, err := identityv1.NewIdentityServiceClient(conn).ListProjects(ctx,
				&identityv1.ListProjectsRequest{OrgId: org, PageSize: q.Size, PageToken: q.Token})
			return page.GetProjects(), page.GetNextPageToken(), err
		},
		Name: (*identityv1.Project).GetId,
		Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.Project] {
			return []list.Column[*identityv1.Project]{
				{Name: "ID", Text: (*identityv1.Project).GetId},
				{Name: "ORG", Text: (*identityv1.Project).GetOrgId},
				{Name: "NAME", Text: (*identityv1.Project).GetName, Max: 30},
				list.Age("AGE", s.Now, (*identityv1.Project).GetCreatedAt),
				list.Time("CREATED", (*identityv1.Project).GetCreatedAt, list.InWide),
			}
		},
	}
}

// ProjectNames returns a shell completion for an argument or a flag, with the IDs of projects.
func ProjectNames(s *session.Session) cobra.CompletionFunc { return projectList(s).Names(s) }

func createProjectCommand(s *session.Session) *cobra.Command {
	var name string
	var limits quotaFlags
	c := &cobra.Command{
		Use: "create PROJECT", Short: "Create a project in an org", Args: session.Exactly("PROJECT"),
		Long: `Create a project in the org of --org, or in the login's org. PROJECT is its ID: 1 to 63 of A-Z a-z 0-9 . _ @ -,
unique in the cloud. The limits given here are the project's own; others are those of "trivet quota show --default",
which only a system:admin can exceed. A project never has more than the quota of its org allows (see "trivet quota"),
and an org has 100 projects at most unless its quota says otherwise. Changing limits later requires the role
system:admin.`,
		Example: "  trivet project create web --org acme --vcpus 16 --memory 64GiB --storage 2TiB --vms 10",
	}
	c.Flags().StringVar(&name, "name", "", "display name (default: the ID)")
	limits.Add(c.Flags())
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		req := &identityv1.CreateProjectRequest{Id: args[0], Name: name}
		if limits.Given() {
			req.Quota = &identityv1.Quota{}
			if err := limits.Change(req.Quota); err != nil {
				return err
			}
		}
		req.OrgId, _ = s.Tenant()
		p, err := identityv1.NewIdentityServiceClient(conn).CreateProject(ctx, req)
		if err != nil {
			return err
		}
		return projectList(s).PrintOne(ctx, s, conn, p)
	})
	return c
}

func showProjectCommand(s *session.Session) *cobra.Command {
	c := projectArgCommand(s, "show PROJECT", "Show a project with its usage and quota")
	c.Long = `Show a project. Of its resources it shows those that are used or limited. "trivet quota show --project PROJECT" shows
all of them, and the quota of the org.`
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		p, err := client.GetProject(ctx, &identityv1.GetProjectRequest{Id: id})
		if err != nil {
			return err
		}
		if s.Form == show.CSV { // a table of one row, as of a list
			return projectList(s).PrintOne(ctx, s, conn, p)
		}
		quota, err := readableQuota(ctx, client, &identityv1.GetQuotaRequest{OrgId: p.GetOrgId(), ProjectId: id})
		if err != nil {
			return err
		}
		return s.PrintValue(withQuota(p, quota), []string{id}, func(w io.Writer) error {
			f := [][2]string{{"ID", p.GetId()}, {"Org", p.GetOrgId()}, {"Name", p.GetName()}, {"Created", created(s, p.GetCreatedAt())}}
			return show.Fields(w, append(f, quotaFields(quota, projectQuota)...))
		})
	})
	return c
}

func updateProjectCommand(s *session.Session) *cobra.Command {
	var name string
	c := projectArgCommand(s, "update PROJECT", "Change the display name of a project")
	c.Long = `Change the display name of a project. Its ID cannot be changed, because roles, tokens and wallets refer to it, and a
project cannot move to another org. "trivet quota update --project PROJECT" changes the quota.`
	c.Example = "  trivet project update web --name \"Web shop\""
	displayNameFlag(c, &name, displayNameOrID)
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		// Read the project's org: a caller with the role org:admin must name the org in the request.
		p, err := client.GetProject(ctx, &identityv1.GetProjectRequest{Id: args[0]})
		if err != nil {
			return err
		}
		if p, err = client.UpdateProject(ctx, &identityv1.UpdateProjectRequest{Id: p.GetId(), OrgId: p.GetOrgId(), Name: &name}); err != nil {
			return err
		}
		return projectList(s).PrintOne(ctx, s, conn, p)
	})
	return c
}

func deleteProjectCommand(s *session.Session) *cobra.Command {
	c := projectArgCommand(s, "delete PROJECT", "Delete an empty project")
	c.Long = `Delete a project that has no VMs and no images, and whose wallet is closed. Its service accounts are deleted, and
roles and tokens in it become invalid. Its ID stays reserved for its org for 30 days (the 100 newest of an org) and
is free for every org after that. A new project with the same ID gets nothing of the deleted one.`
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		client := identityv1.NewIdentityServiceClient(conn)
		// Read the project's org: a caller with the role org:admin must name the org in the request.
		p, err := client.GetProject(ctx, &identityv1.GetProjectRequest{Id: id})
		if err != nil {
			return err
		}
		if _, err := client.DeleteProject(ctx, &identityv1.DeleteProjectRequest{Id: p.GetId(), OrgId: p.GetOrgId()}); err != nil {
			return err
		}
		return s.Done(id, "deleted")
	})
	return c
}

func projectArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: session.Exactly("PROJECT"), ValidArgsFunction: session.FirstArg(ProjectNames(s))}
}
