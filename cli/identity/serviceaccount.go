package identity

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

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
		Use: "service-account", Aliases: []string{"sa"}, Short: "Create, list, update and delete service accounts for programs", Args: cobra.NoArgs,
		Long: `Create, list, update and delete service accounts. A program uses the name and secret of a service account instead of a
person's password. A service account belongs to one project, that of --project or of the token, and can only have
roles that its creator has there. NAME@ORG/PROJECT names it wherever a user ID is wanted. These commands require the
role project:admin or org:admin.`,
		Example: `  trivet service-account create ci --role project:member --secret-file ci.secret
  trivet token issue --user ci@acme/web --password-file ci.secret --file ci.token`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	all := serviceAccounts(s)
	c.AddCommand(createServiceAccountCommand(s), all.Command(s, &cobra.Command{Use: "list", Short: "List the project's service accounts"}, callTimeout),
		showServiceAccountCommand(s), updateServiceAccountCommand(s), deleteServiceAccountCommand(s))
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
		lost := func(a *identityv1.ServiceAccount) string {
			return a.GetId() + " was created, but its secret is lost: delete the account"
		}
		return withNewSecret(s, file, lost, func() (accountWithSecret, error) {
			return identityv1.NewIdentityServiceClient(conn).CreateServiceAccount(ctx, req)
		})
	})
	return c
}

// accountWithSecret is the response of a call that makes a secret of a service account.
type accountWithSecret interface {
	proto.Message
	GetAccount() *identityv1.ServiceAccount
	GetSecret() string
}

func printServiceAccount(s *session.Session, made accountWithSecret) error {
	a := made.GetAccount()
	return s.Print(made, []string{a.GetUsername()}, func(w io.Writer) error {
		f := serviceAccountFields(a)
		if made.GetSecret() != "" {
			f = append(f, [2]string{"Secret", made.GetSecret()})
		}
		return show.Fields(w, f)
	})
}

func serviceAccountFields(a *identityv1.ServiceAccount) [][2]string {
	return [][2]string{
		{"ID", a.GetId()}, {"Name", a.GetName()}, {"User name", a.GetUsername()}, {"Project", a.GetOrgId() + "/" + a.GetProjectId()},
		{"Roles", strings.Join(a.GetRoles(), ", ")}, {"Expires", show.When(a.GetExpiresAt())},
	}
}

func showServiceAccountCommand(s *session.Session) *cobra.Command {
	c := serviceAccountArgCommand(s, "show NAME|ID", "Show a service account")
	c.Long = `Show a service account of the project. Its secret is shown only when it is made: "trivet service-account update
--new-secret" replaces it.`
	session.Many(c)
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := findServiceAccount(ctx, s, conn, name)
		if err != nil {
			return err
		}
		req := &identityv1.GetServiceAccountRequest{Id: id}
		req.OrgId, req.ProjectId = s.Tenant()
		a, err := identityv1.NewIdentityServiceClient(conn).GetServiceAccount(ctx, req)
		if err != nil {
			return err
		}
		return s.Print(a, []string{a.GetUsername()}, func(w io.Writer) error {
			return show.Fields(w, append(serviceAccountFields(a), [2]string{"Created", created(s, a.GetCreatedAt())}, [2]string{"Created by", a.GetCreatedBy()}))
		})
	})
	return c
}

func updateServiceAccountCommand(s *session.Session) *cobra.Command {
	var roles []string
	var ttl time.Duration
	var never, fresh bool
	var file string
	c := serviceAccountArgCommand(s, "update NAME|ID", "Change the roles, the expiry or the secret of a service account")
	c.Long = `Change the roles, the expiry or the secret of a service account. --role replaces all roles of the account; its
tokens have the new roles within a second. --new-secret replaces the secret and ends the tokens that were issued with the
old one.
A new secret is printed, or written to a new file that only you can read; it cannot be shown again. The name cannot be
changed, because it is part of the name that the account logs in with.`
	c.Example = `  trivet service-account update ci --role project:viewer --ttl 720h
  trivet service-account update ci --new-secret --secret-file ci.secret`
	c.Flags().StringArrayVar(&roles, "role", nil, "a role in the project that replaces the present ones, repeatable: "+strings.Join(projectRoleNames(), ", "))
	c.Flags().DurationVar(&ttl, "ttl", 0, "time from now until the account expires")
	c.Flags().BoolVar(&never, "no-expiry", false, "the account does not end until it is deleted")
	c.Flags().BoolVar(&fresh, "new-secret", false, "replace the secret, and end the tokens that were issued with the old one")
	c.Flags().StringVar(&file, "secret-file", "", "write the new secret to this new file, mode 0600, instead of standard output")
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(projectRoleNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = c.MarkFlagFilename("secret-file")
	session.RequireOne(c, "role", "ttl", "no-expiry", "new-secret")
	session.Exclusive(c, "ttl", "no-expiry")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		switch {
		case file != "" && !fresh:
			return session.Usagef("--secret-file is for --new-secret")
		case s.Form == show.Name && fresh && file == "":
			return session.Usagef("-o name does not show the secret: give --secret-file")
		}
		req := &identityv1.UpdateServiceAccountRequest{Roles: roles, NewSecret: fresh}
		if ttl > 0 || never {
			ends := int64(0)
			if ttl > 0 {
				ends = s.Now().Add(ttl).UnixMilli()
			}
			req.ExpiresAt = &ends
		}
		var err error
		if req.Id, err = findServiceAccount(ctx, s, conn, args[0]); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		call := func() (accountWithSecret, error) {
			return identityv1.NewIdentityServiceClient(conn).UpdateServiceAccount(ctx, req)
		}
		if fresh {
			return withNewSecret(s, file, func(a *identityv1.ServiceAccount) string {
				return "the secret of " + a.GetUsername() + " was replaced, but the new one is lost: replace it again"
			}, call)
		}
		changed, err := call()
		if err != nil {
			return err
		}
		return printServiceAccount(s, changed)
	})
	return c
}

// withNewSecret makes a call that returns a service account with a new secret, and prints the account. It writes the secret
// to a new file, or prints it if file is empty. lost returns the error text if the secret cannot be written.
func withNewSecret(s *session.Session, file string, lost func(*identityv1.ServiceAccount) string, call func() (accountWithSecret, error)) error {
	if file == "" {
		made, err := call()
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
	made, err := call()
	if err != nil {
		_ = out.Remove() // there is no secret to write
		return err
	}
	if err := out.Write(account.Secret(made.GetSecret())); err != nil {
		return fmt.Errorf("--secret-file: %s: %w", lost(made.GetAccount()), err)
	}
	m := made.ProtoReflect()
	m.Clear(m.Descriptor().Fields().ByName("secret"))
	return printServiceAccount(s, made)
}

// findServiceAccount returns the ID of the service account of the project with a name, an ID or a user name.
func findServiceAccount(ctx context.Context, s *session.Session, conn *dial.Conn, name string) (string, error) {
	all, err := serviceAccounts(s).All(ctx, conn)
	if err != nil {
		return "", err
	}
	var matches []session.Match
	for _, a := range all {
		if a.GetId() == name || a.GetName() == name || a.GetUsername() == name {
			matches = append(matches, session.Match{ID: a.GetId(), About: a.GetName() + " of " + a.GetOrgId() + "/" + a.GetProjectId()})
		}
	}
	return session.One("service-account", s.Scope(), name, matches)
}

// serviceAccountArgCommand returns a command with the single argument NAME|ID, and shell completion for it.
func serviceAccountArgCommand(s *session.Session, use, short string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: session.Exactly("NAME|ID"),
		ValidArgsFunction: session.FirstArg(s.Names(func(ctx context.Context, conn *dial.Conn) (names []string, err error) {
			all, err := serviceAccounts(s).All(ctx, conn)
			for _, a := range all {
				names = append(names, a.GetName())
			}
			return names, err
		})),
	}
}

func deleteServiceAccountCommand(s *session.Session) *cobra.Command {
	c := serviceAccountArgCommand(s, "delete NAME|ID", "Delete a service account and revoke its tokens")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		id, err := findServiceAccount(ctx, s, conn, name)
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
