package session

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/account"
)

// ContextNamed returns the name of the context that --context or, without that flag, TRIVET_CONTEXT selects. It returns
// "" if neither is set; commands then use the current context.
func (s *Session) ContextNamed() string {
	if s.flags.context != "" {
		return s.flags.context
	}
	return s.Env("TRIVET_CONTEXT")
}

// Given reports whether a global flag is on the command line, even if its value is empty.
func (s *Session) Given(flag string) bool { return s.given(flag) }

// Fresh declares that the context named by --context does not exist yet. As such a context has no endpoint, token or
// tenant, TRIVET_ENDPOINT and similar variables then have an effect although --context is given.
func (s *Session) Fresh() { s.fresh = true }

// env returns the value of an environment variable that selects an endpoint, token or tenant. It returns "" if
// --context names an existing context, which takes precedence over such variables.
func (s *Session) env(name string) string {
	if s.flags.context != "" && !s.fresh {
		return ""
	}
	return s.Env(name)
}

// Book loads the saved logins. It also returns the path of their file.
func (s *Session) Book() (path string, b *account.Book, err error) {
	if path, err = account.Path(s.Env); err != nil {
		return "", nil, err
	}
	b, err = account.Load(path)
	return path, b, err
}

// NoContext returns the error for a context that does not exist, with a hint how to list and create contexts.
func NoContext(name string) error {
	hint := fmt.Sprintf("`trivet context list` shows the existing ones; `trivet login --context %s` creates it", name)
	return Errorf(codes.NotFound, hint, "no context named %q", name)
}

// saved returns the saved login of the context that --context or TRIVET_CONTEXT selects, or else of the current
// context. It returns nil if there is no current context, and an error if the selected one does not exist.
func (s *Session) saved() (*account.Login, error) {
	named := s.ContextNamed()
	if _, err := account.Path(s.Env); err != nil && named == "" {
		return nil, nil // without a home directory there is no saved login
	}
	_, b, err := s.Book()
	if err != nil {
		return nil, err
	}
	if named == "" {
		return b.Contexts[b.Current], nil
	}
	l := b.Contexts[named]
	if l == nil {
		return nil, NoContext(named)
	}
	s.facts.Context = named
	return l, nil
}

// Tenant returns the org and project for requests. It returns the result of Named or, if both values are empty, the org
// and project of the saved login, or else those that inTenant has found. If these are empty too, the control plane uses
// the tenant of the token.
func (s *Session) Tenant() (org, project string) {
	org, project = s.Named()
	if org == "" && project == "" && s.scope != nil {
		org, project = s.scope.Org, s.scope.Project
	}
	if project == "" && (org == "" || org == s.found.org) {
		return s.found.org, s.found.project
	}
	return org, project
}

// LookUpByID registers the function that finds the org and the project of the object that the command is for in the
// whole cloud, and returns a NOT_FOUND error if there is no such object. It is for commands that have the ID of the
// object. It is called only if the control plane requires a project, which it does of callers with roles in all
// projects; the command is then repeated in that project.
func (s *Session) LookUpByID(find func() (org, project string, err error)) {
	if org, project := s.Tenant(); org == "" && project == "" {
		s.lookUp = find
	}
}

// WithID returns the object with an ID among all, the objects of all projects, for a function of LookUpByID. It returns
// the error err of the call that has listed them, if it is not nil, and otherwise NOT_FOUND if no object has the ID.
func WithID[T interface{ GetId() string }](noun, id string, all []T, err error) (one T, _ error) {
	if err != nil {
		return one, err
	}
	if i := slices.IndexFunc(all, func(o T) bool { return o.GetId() == id }); i >= 0 {
		return all[i], nil
	}
	return one, NotFound("", "no %s has the ID %s", noun, id)
}

// Named returns the org and project that the flags or the environment name. It ignores the saved login. Commands that
// list objects use the result as filters.
func (s *Session) Named() (org, project string) {
	org, project, _ = s.parseNamed()
	return org, project
}

// parseNamed is like Named. A project can be given with its org, as ORG/PROJECT, which is how tables print it. The
// result is a *Usage error if --org or TRIVET_ORG names another org. An org in --project overrides TRIVET_ORG.
func (s *Session) parseNamed() (org, project string, err error) {
	orgSource, projectSource := "--org", "--project"
	if org = s.flags.org; org == "" {
		org, orgSource = s.env("TRIVET_ORG"), "TRIVET_ORG"
	}
	if project = s.flags.project; project == "" {
		project, projectSource = s.env("TRIVET_PROJECT"), "TRIVET_PROJECT"
	}
	of, name, ok := strings.Cut(project, "/")
	switch {
	case !ok:
		return org, project, nil
	case of == "" || name == "" || strings.Contains(name, "/"):
		return org, project, Usagef("%s %q: want PROJECT or ORG/PROJECT", projectSource, project)
	case org != "" && org != of && (orgSource == "--org" || projectSource == "TRIVET_PROJECT"):
		return of, name, Usagef("%s %s contradicts %s %s", orgSource, org, projectSource, project)
	}
	return of, name, nil
}

// checkNamed returns a *Usage error if the named org or project contains characters other than printable ASCII, which
// gRPC metadata cannot contain.
func (s *Session) checkNamed() error {
	org, project, err := s.parseNamed()
	if err != nil {
		return err
	}
	for _, named := range []struct{ flag, id string }{{"org", org}, {"project", project}} {
		if strings.ContainsFunc(named.id, func(r rune) bool { return r < ' ' || r > '~' }) {
			return Usagef("--%s %q: want 1 to 63 of A-Z a-z 0-9 . _ @ -", named.flag, named.id)
		}
	}
	return nil
}

// Contexts returns a shell completion with the names of the saved contexts.
func (s *Session) Contexts() cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		_, b, err := s.Book()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return starting(b.Names(), prefix), cobra.ShellCompDirectiveNoFileComp
	}
}
