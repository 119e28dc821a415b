package identity

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// invitationCommand returns the command `trivet invitation`.
func invitationCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "invitation", Short: "List, accept and decline roles that other orgs offer you", Args: cobra.NoArgs,
		Long: `List, accept and decline roles that other orgs offer you. A role from your own org or from system:admin is effective
at once; a role of another org is an invitation: it has no effect until you accept it, and it ends after 30 days.
` + "`trivet binding delete`" + ` removes a role that you have accepted.`,
		Example: "  trivet invitation list\n  trivet invitation accept acme/web",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(
		invitations.Command(s, &cobra.Command{Use: "list", Short: "List the roles that you are invited to"}, callTimeout),
		answerInvitationCommand(s, "accept", "Accept a role", "The role is effective from the next call on. A default project that you already have stays the same.", "accepted",
			func(ctx context.Context, c identityv1.IdentityServiceClient, b *identityv1.Binding) error {
				_, err := c.AcceptInvitation(ctx, &identityv1.AcceptInvitationRequest{Binding: b})
				return err
			}),
		answerInvitationCommand(s, "decline", "Decline a role", "The list does not show it any more. The org that offers it is not notified.", "declined",
			func(ctx context.Context, c identityv1.IdentityServiceClient, b *identityv1.Binding) error {
				_, err := c.DeclineInvitation(ctx, &identityv1.DeclineInvitationRequest{Binding: b})
				return err
			}))
	return c
}

var invitations = &list.Kind[*identityv1.Invitation]{
	Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*identityv1.Invitation, string, error) {
		page, err := identityv1.NewIdentityServiceClient(conn).ListInvitations(ctx,
			&identityv1.ListInvitationsRequest{PageSize: q.Size, PageToken: q.Token})
		return page.GetInvitations(), page.GetNextPageToken(), err
	},
	Name: invitationTenant,
	Columns: func(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*identityv1.Invitation] {
		return []list.Column[*identityv1.Invitation]{
			{Name: "PLACE", Text: invitationTenant},
			{Name: "ROLE", Text: func(i *identityv1.Invitation) string { return i.GetBinding().GetRole() }},
			{Name: "INVITED BY", Text: (*identityv1.Invitation).GetInvitedBy},
			list.Until("EXPIRES", s.Now, (*identityv1.Invitation).GetExpiresAt),
		}
	},
}

func invitationTenant(i *identityv1.Invitation) string { return bindingTenant(i.GetBinding()) }

// bindingTenant formats the tenant of a binding as ORG or ORG/PROJECT.
func bindingTenant(b *identityv1.Binding) string {
	if b.GetProjectId() == "" {
		return b.GetOrgId()
	}
	return b.GetOrgId() + "/" + b.GetProjectId()
}

// answerInvitationCommand returns a command that accepts or declines an invitation to an org or a project. The function
// do makes the API call. verb, short and more are text for the command's name and help; done is the last word of its
// output.
func answerInvitationCommand(s *session.Session, verb, short, more, done string, do func(context.Context, identityv1.IdentityServiceClient, *identityv1.Binding) error) *cobra.Command {
	var role string
	c := &cobra.Command{
		Use: verb + " ORG[/PROJECT]", Short: short, Args: session.Exactly("ORG[/PROJECT]"), ValidArgsFunction: session.FirstArg(invitations.Names(s)),
		Long:    short + " in an org or a project, named as in the column PLACE of `trivet invitation list`. " + more,
		Example: "  trivet invitation " + verb + " acme/web\n  trivet invitation " + verb + " acme --role org:admin",
	}
	c.Flags().StringVar(&role, "role", "", "the role, if you are offered several in the org or project")
	// The error is ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a
	// completion.
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roleNames(), cobra.ShellCompDirectiveNoFileComp))
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, at string) error {
		all, err := invitations.All(ctx, conn)
		if err != nil {
			return err
		}
		b, err := selectInvitation(all, at, role)
		if err != nil {
			return err
		}
		if err := do(ctx, identityv1.NewIdentityServiceClient(conn), b); err != nil {
			return err
		}
		return s.Done(bindingText(b), "is "+done)
	})
	return c
}

const offeredHint = "`trivet invitation list` shows what you are offered"

// selectInvitation returns the binding of the invitation to the tenant in the parameter at, which has the form ORG or
// ORG/PROJECT. If there are several invitations to that tenant, role must be the role of one of them.
func selectInvitation(all []*identityv1.Invitation, at, role string) (*identityv1.Binding, error) {
	var found []*identityv1.Binding
	var roles []string
	for _, i := range all {
		if b := i.GetBinding(); bindingTenant(b) == at && (role == "" || b.GetRole() == role) {
			found, roles = append(found, b), append(roles, b.GetRole())
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		slices.Sort(roles)
		return nil, session.Usagef("several roles are offered in %s: give --role, one of %s", at, strings.Join(roles, ", "))
	case role != "":
		return nil, session.NotFound(offeredHint, "you are not invited to %s in %s", role, at)
	}
	return nil, session.NotFound(offeredHint, "you are not invited to a role in %s", at)
}
