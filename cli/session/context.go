package session

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
)

// ContextNamed is the context that was asked for by flag or environment; empty for the current one.
func (s *Session) ContextNamed() string {
	if s.flags.context != "" {
		return s.flags.context
	}
	return s.Env("TRIVET_CONTEXT")
}

// Given reports whether a flag that all commands share stands on the command line, if only with nothing.
func (s *Session) Given(flag string) bool { return s.given(flag) }

// Fresh says that the context which was named is yet to be made: it has no say in where to and as whom.
func (s *Session) Fresh() { s.fresh = true }

// env is a variable that tells where to and as whom. One that is set for every call does not change what --context
// names for this one.
func (s *Session) env(name string) string {
	if s.flags.context != "" && !s.fresh {
		return ""
	}
	return s.Env(name)
}

// Book is the saved logins, and where they are kept.
func (s *Session) Book() (path string, b *account.Book, err error) {
	if path, err = account.Path(s.Env); err != nil {
		return "", nil, err
	}
	b, err = account.Load(path)
	return path, b, err
}

// NoContext says that there is no context of that name.
func NoContext(name string) error {
	return fmt.Errorf("there is no context named %q: `trivet context list` shows those there are, `trivet login --context %s` makes it", name, name)
}

// saved is the login to use, nil when there is none.
func (s *Session) saved() (*account.Login, error) {
	named := s.ContextNamed()
	if _, err := account.Path(s.Env); err != nil && named == "" {
		return nil, nil // without a home there is no login; `trivet login` says so
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

// Tenant is the org and project to name in calls: those that were named, or else the login's. Empty leaves the choice to
// the token.
func (s *Session) Tenant() (org, project string) {
	org, project = s.Named()
	if org == "" && project == "" && s.scope != nil {
		return s.scope.Org, s.scope.Project
	}
	return org, project
}

// Named is the org and project that were named by flag or environment, and not those of the login, for lists that are
// narrowed by them.
func (s *Session) Named() (org, project string) {
	if org = s.flags.org; org == "" {
		org = s.env("TRIVET_ORG")
	}
	if project = s.flags.project; project == "" {
		project = s.env("TRIVET_PROJECT")
	}
	return org, project
}

// checkNamed returns a usage error if --org or --project is not a valid ID, which gRPC metadata could not carry.
func (s *Session) checkNamed() error {
	org, project := s.Named()
	for _, named := range []struct{ flag, id string }{{"org", org}, {"project", project}} {
		if strings.ContainsFunc(named.id, func(r rune) bool { return r < ' ' || r > '~' }) {
			return Usagef("--%s %q: want 1 to 63 of A-Z a-z 0-9 . _ @ -", named.flag, named.id)
		}
	}
	return nil
}

// Contexts completes the names of contexts.
func (s *Session) Contexts() cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		_, b, err := s.Book()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return starting(b.Names(), prefix), cobra.ShellCompDirectiveNoFileComp
	}
}
