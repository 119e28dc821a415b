package login

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
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
	c := &cobra.Command{Use: "list", Short: "List the saved logins", Args: session.Exactly()}
	c.RunE = s.Local(func(context.Context, []string) error {
		_, b, err := s.Book()
		if err != nil {
			return err
		}
		all := struct {
			Contexts []contextView `json:"contexts"`
		}{[]contextView{}}
		var rows [][]string
		for _, name := range b.Names() {
			v := viewContext(s.Now(), b, name)
			mark := " "
			if v.Current {
				mark = "*"
			}
			all.Contexts = append(all.Contexts, v)
			rows = append(rows, []string{mark, name, v.User, v.scope(), strings.Join(v.Endpoints, ","), v.State, v.until()})
		}
		return s.PrintValue(all, b.Names(), func(w io.Writer) error {
			return show.Rows(w, []string{" ", "NAME", "USER", "ACTS IN", "ENDPOINTS", "STATE", "UNTIL"}, rows)
		})
	})
	return c
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
