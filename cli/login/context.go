package login

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// contextCommand returns the command `trivet context`.
func contextCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "context", Short: "List saved logins and switch between them", Args: cobra.NoArgs,
		Long: `List saved logins and switch between them. A context is a login that ` + "`trivet login`" + ` saved: the endpoints, the user,
the org and project, and the token. Every command uses the current context unless --context or TRIVET_CONTEXT
selects another one. Order of precedence: --context, then TRIVET_TOKEN, TRIVET_ENDPOINT and similar variables, then
TRIVET_CONTEXT, then the current context.`,
		Example: "  trivet context list\n  trivet context use prod\n  trivet --context test vm list",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(listContextsCommand(s), useContextCommand(s), showContextCommand(s), deleteContextCommand(s), renameContextCommand(s))
	return c
}

// contextView holds what `trivet context list` prints of a context: all but its token.
type contextView struct {
	Name      string     `json:"name"`
	Current   bool       `json:"current"`
	User      string     `json:"user"`
	Provider  string     `json:"provider"`
	Endpoints []string   `json:"endpoints"`
	Org       string     `json:"org_id"`
	Project   string     `json:"project_id"`
	State     string     `json:"state"`
	ExpiresAt *time.Time `json:"expires_at"`
}

func viewContext(now time.Time, b *account.Book, name string) contextView {
	l := b.Contexts[name]
	v := contextView{name, name == b.Current, l.User, l.Provider, l.Endpoints, l.Org, l.Project, "LOGGED_OUT", nil}
	if l.Token != "" {
		v.State, v.ExpiresAt = "LOGGED_IN", &l.ExpiresAt
		if !now.Before(l.ExpiresAt) {
			v.State = "EXPIRED"
		}
	}
	return v
}

func (v *contextView) scope() string {
	if v.Project != "" && v.Org != "" {
		return v.Org + "/" + v.Project
	}
	return v.Org + v.Project
}

func (v *contextView) until() string {
	if v.ExpiresAt == nil || v.ExpiresAt.IsZero() {
		return ""
	}
	return show.When(v.ExpiresAt.UnixMilli())
}

func listContextsCommand(s *session.Session) *cobra.Command {
	contexts := &list.Kind[contextView]{
		Page: func(_ context.Context, _ *dial.Conn, q list.Query) (all []contextView, _ string, err error) {
			_, b, err := s.Book()
			if err != nil {
				return nil, "", err
			}
			for _, name := range b.Names() {
				all = append(all, viewContext(s.Now(), b, name))
			}
			return list.Slice(all, q)
		},
		Name: func(v contextView) string { return v.Name },
		Columns: func(context.Context, *session.Session, *dial.Conn) []list.Column[contextView] {
			return []list.Column[contextView]{
				{Name: "CURRENT", Text: func(v contextView) string { return map[bool]string{true: "*", false: ""}[v.Current] }},
				{Name: "NAME", Text: func(v contextView) string { return v.Name }},
				{Name: "USER", Text: func(v contextView) string { return v.User }, Max: 16},
				{Name: "ACTS IN", Text: func(v contextView) string { return v.scope() }, Max: 20},
				{Name: "STATE", Text: func(v contextView) string { return v.State }},
				list.Until("EXPIRES", s.Now, func(v contextView) int64 {
					if v.ExpiresAt == nil || v.ExpiresAt.IsZero() {
						return 0
					}
					return v.ExpiresAt.UnixMilli()
				}),
				{Name: "ENDPOINTS", Text: func(v contextView) string { return strings.Join(v.Endpoints, ",") }, In: list.InWide},
			}
		},
	}
	return contexts.LocalCommand(s, &cobra.Command{Use: "list", Short: "List the saved logins"})
}

func showContextCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "show [NAME]", Short: "Show a saved login, or the current one", Args: session.AtMost("NAME"),
		ValidArgsFunction: session.FirstArg(s.Contexts())}
	c.RunE = s.Local(func(_ context.Context, args []string) error {
		_, b, err := s.Book()
		if err != nil {
			return err
		}
		name := b.Current
		if len(args) > 0 {
			name = args[0]
		} else if named := s.ContextNamed(); named != "" {
			name = named
		}
		if b.Contexts[name] == nil {
			if name == "" {
				return errNoCurrentContext
			}
			return session.NoContext(name)
		}
		v := viewContext(s.Now(), b, name)
		return s.PrintValue(v, []string{name}, func(w io.Writer) error {
			return show.Fields(w, [][2]string{
				{"Name", name}, {"User", v.User}, {"Provider", v.Provider}, {"Acts in", v.scope()}, {"Endpoints", strings.Join(v.Endpoints, ",")},
				{"State", v.State}, {"Until", v.until()},
			})
		})
	})
	return c
}
