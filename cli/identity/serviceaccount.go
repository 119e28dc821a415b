package identity

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// serviceAccountCommand returns the command `trivet service-account`.
func serviceAccountCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "service-account", Aliases: []string{"sa"}, Short: "Create, list and delete service accounts for programs", Args: cobra.NoArgs,
		Long: `Create, list and delete service accounts. A program uses the name and secret of a service account instead of a
person's password. A service account belongs to one project, that of --project or of the token, and can only have
roles that its creator has there. NAME@ORG/PROJECT names it wherever a user ID is wanted. Creating and deleting one
requires the role project:admin or org:admin.`,
		Example: `  trivet service-account create ci --role project:member --secret-file ci.secret
  trivet token issue --user ci@acme/web --password-file ci.secret --file ci.token`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	all := serviceAccounts(s)
	c.AddCommand(createServiceAccountCommand(s), all.Command(s, &cobra.Command{Use: "list", Short: "List the project's service accounts"}, callTimeout), deleteServiceAccountCommand(s))
	return c
}

func serviceAccounts(s *session.Session) *list.Kind[*identityv1.ServiceAccount] {
	return &list.Kind[*identityv1.ServiceAccount]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.ServiceAccount, string, error) {
			req := &identityv1.ListServiceAccountsRequest{PageSize: q.Size, PageToken: q.Token}
			req.OrgId, req.ProjectId = s.Tenant()
			page, err := identityv1.NewIdentityServiceClient(conn).ListServiceAccounts(ctx, req)
			return page.GetAccounts(), page.GetNextPageToken(), err
		},
		Name:    (*identityv1.ServiceAccount).GetUsername,
		Columns: serviceAccountColumns,
	}
}

func serviceAccountColumns(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.ServiceAccount] {
	type sa = *identityv1.ServiceAccount
	return []list.Column[sa]{
		{Name: "NAME", Text: sa.GetName},
		{Name: "ID", Text: sa.GetId, In: list.InWide},
		{Name: "PROJECT", Text: func(a sa) string { return a.GetOrgId() + "/" + a.GetProjectId() }},
		{Name: "ROLES", Text: func(a sa) string { return strings.Join(a.GetRoles(), ", ") }, Max: 21},
		list.Until("EXPIRES", s.Now, sa.GetExpiresAt),
		list.Age("AGE", s.Now, sa.GetCreatedAt),
		{Name: "CREATOR", Text: sa.GetCreatedBy, In: list.InWide},
		list.Time("CREATED", sa.GetCreatedAt, list.InWide),
	}
}

func createServiceAccountCommand(s *session.Session) *cobra.Command {
	req := &identityv1.CreateServiceAccountRequest{}
	var file string
	var ttl time.Duration
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a service account and show its secret once", Args: session.Exactly("NAME"),
		Long: `Create a service account. NAME is 1 to 63 of a-z 0-9 -, unique in the project. Its secret is printed, or written to
a new file that only you can read; it cannot be shown again. Use NAME@ORG/PROJECT as the user and the secret as the
password in ` + "`trivet login`" + ` and ` + "`trivet token issue`" + `.`,
		Example: "  trivet service-account create ci --role project:member --secret-file ci.secret --ttl 2160h",
	}
	c.Flags().StringArrayVar(&req.Roles, "role", nil, "a role in the project, repeatable: "+strings.Join(projectRoleNames(), ", "))
	c.Flags().StringVar(&file, "secret-file", "", "write the secret to this new file, mode 0600, instead of standard output")
	c.Flags().DurationVar(&ttl, "ttl", 0, "lifetime of the account (default: until it is deleted)")
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(projectRoleNames(), cobra.ShellCompDirectiveNoFileComp))
	session.Require(c, "role")
	_ = c.MarkFlagFilename("secret-file")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if ttl < 0 {
			return session.Usagef("--ttl %v: want more than 0", ttl)
		}
		if s.Form == show.Name && file == "" {
			return session.Usagef("-o name does not show the secret: give --secret-file")
		}
		if ttl > 0 {
			req.ExpiresAt = s.Now().Add(ttl).UnixMilli()
		}
		req.OrgId, req.ProjectId = s.Tenant()
		req.Name = args[0]
		if file == "" {
			made, err := identityv1.NewIdentityServiceClient(conn).CreateServiceAccount(ctx, req)
			if err != nil {
				return err
			}
			s.Note("the secret cannot be shown again")
			return printServiceAccount(s, made)
		}
		out, err := account.NewSecretFile(file)
		if err != nil {
			return fmt.Errorf("--secret-file: %w", err)
		}
		made, err := identityv1.NewIdentityServiceClient(conn).CreateServiceAccount(ctx, req)
		if err != nil {
			_ = out.Remove() // the account was not created, so there is no secret to write
			return err
		}
		if err := out.Write(account.Secret(made.GetSecret())); err != nil {
			return fmt.Errorf("--secret-file: %s was created, but its secret is lost: delete the account: %w", made.GetAccount().GetId(), err)
		}
		made.Secret = ""
		return printServiceAccount(s, made)
	})
	return c
}

func printServiceAccount(s *session.Session, made *identityv1.CreateServiceAccountResponse) error {
	a := made.GetAccount()
	return s.Print(made, []string{a.GetUsername()}, func(w io.Writer) error {
		f := [][2]string{
			{"ID", a.GetId()}, {"Name", a.GetName()}, {"User name", a.GetUsername()}, {"Project", a.GetOrgId() + "/" + a.GetProjectId()},
			{"Roles", strings.Join(a.GetRoles(), ", ")}, {"Expires", show.When(a.GetExpiresAt())},
		}
		if made.GetSecret() != "" {
			f = append(f, [2]string{"Secret", made.GetSecret()})
		}
		return show.Fields(w, f)
	})
}

func deleteServiceAccountCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "delete NAME|ID", Short: "Delete a service account and revoke its tokens", Args: session.Exactly("NAME|ID"),
		ValidArgsFunction: session.FirstArg(s.Names(func(ctx context.Context, conn *dial.Conn) (names []string, err error) {
			all, err := serviceAccounts(s).All(ctx, conn)
			for _, a := range all {
				names = append(names, a.GetName())
			}
			return names, err
		})),
	}
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		all, err := serviceAccounts(s).All(ctx, conn)
		if err != nil {
			return err
		}
		var matches []session.Match
		for _, a := range all {
			if a.GetId() == name || a.GetName() == name || a.GetUsername() == name {
				matches = append(matches, session.Match{ID: a.GetId(), About: a.GetName() + " of " + a.GetOrgId() + "/" + a.GetProjectId()})
			}
		}
		id, err := session.One("service-account", s.Scope(), name, matches)
		if err != nil {
			return err
		}
		req := &identityv1.DeleteServiceAccountRequest{Id: id}
		req.OrgId, req.ProjectId = s.Tenant()
		if _, err := identityv1.NewIdentityServiceClient(conn).DeleteServiceAccount(ctx, req); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}
