package identity

import (
	"context"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// whoAmICommand returns the command `trivet whoami`.
func whoAmICommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "whoami", Short: "Show who you are and what you can do", Args: session.Exactly(),
		Long: `Show the holder of the given or saved token, how the holder was authenticated, in which tenants the token is valid,
the roles, and when the token expires.`,
	}
	c.RunE = s.Run(30*time.Second, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		me, err := identityv1.NewIdentityServiceClient(conn).WhoAmI(ctx, &identityv1.WhoAmIRequest{})
		if err != nil {
			return err
		}
		return s.Print(me, []string{me.GetPrincipalId()}, func(w io.Writer) error { return show.Fields(w, holderFields(me)) })
	})
	return c
}

// noProof is the value of WhoAmIResponse.proof for an unauthenticated token, which the REST token endpoint issues to
// anybody for any name.
const noProof = "none"

// holderFields returns the output of `trivet whoami` as pairs of name and value: the holder of the token, and what the
// token is valid for.
func holderFields(me *identityv1.WhoAmIResponse) [][2]string {
	proof := me.GetProof()
	if proof == noProof {
		proof = "nothing: the token is unauthenticated"
	}
	f := [][2]string{
		{"ID", me.GetPrincipalId()},
		{"Name", me.GetPrincipalName()},
		{"Kind", me.GetKind()},
		{"Proven by", proof},
		{"Acts in", holderScope(me)},
		{"Token", me.GetTokenId()},
		{"Good until", show.When(me.GetExpiresAt())},
	}
	if home := me.GetHomeOrgId(); home != "" {
		f = append(f, [2]string{"Home org", home})
	}
	for _, g := range me.GetGroups() {
		f = append(f, [2]string{"Group", g.GetId() + " of " + g.GetOrgId()})
	}
	for _, b := range me.GetBindings() {
		f = append(f, [2]string{"Role", bindingText(b) + byGroup(me, b)})
	}
	return f
}

// byGroup returns a text that names the group that gives the holder the role b, or "" if no group does.
func byGroup(me *identityv1.WhoAmIResponse, b *identityv1.Binding) string {
	for _, g := range me.GetGroups() {
		if slices.ContainsFunc(g.GetBindings(), func(of *identityv1.Binding) bool { return proto.Equal(of, b) }) {
			return ", by group " + g.GetId()
		}
	}
	return ""
}

func holderScope(me *identityv1.WhoAmIResponse) string {
	switch {
	case me.GetProjectId() != "":
		return me.GetOrgId() + "/" + me.GetProjectId()
	case me.GetOrgId() != "":
		return "org " + me.GetOrgId()
	}
	for _, b := range me.GetBindings() {
		if b.GetRole() == "system:admin" {
			return "the whole cloud"
		}
	}
	if me.GetDefaultProjectId() != "" {
		return me.GetDefaultOrgId() + "/" + me.GetDefaultProjectId() + ", unless a command names another with --project"
	}
	if len(me.GetBindings()) == 0 {
		return ""
	}
	return "what a command names with --org and --project"
}
