package session

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
)

// DefaultEndpoint is where a control plane that was started with no flags listens.
const DefaultEndpoint = "127.0.0.1:" + account.DefaultPort

type flags struct {
	endpoints        []string
	token, tokenFile string
	org, project     string
	timeout          time.Duration
	tls, plaintext   bool
	tlsCA            string
}

func (f *flags) add(root *cobra.Command, form *show.Form) {
	p := root.PersistentFlags()
	p.StringArrayVar(&f.endpoints, "endpoint", nil, "control plane, as [https://]HOST[:PORT],... (TRIVET_ENDPOINT; default "+DefaultEndpoint+")")
	p.StringVar(&f.token, "token", "", "token (TRIVET_TOKEN); seen by other users of this host, unlike --token-file")
	p.StringVar(&f.tokenFile, "token-file", "", "file with the token (TRIVET_TOKEN_FILE)")
	p.StringVar(&f.org, "org", "", "org to act for, where the token leaves a choice (TRIVET_ORG)")
	p.StringVar(&f.project, "project", "", "project to act for, where the token leaves a choice (TRIVET_PROJECT)")
	p.VarP((*formFlag)(form), "output", "o", "how to print: "+strings.Join(show.Forms(), ", "))
	p.DurationVar(&f.timeout, "timeout", 0, "how long to wait at most, such as 90s (default depends on the command)")
	p.BoolVar(&f.tls, "tls", false, "speak TLS, with the system's authorities; so does https:// before an endpoint")
	p.StringVar(&f.tlsCA, "tls-ca", "", "speak TLS, with the authority in this file (TRIVET_TLS_CA)")
	p.BoolVar(&f.plaintext, "insecure-plaintext", false, "send tokens and passwords in plaintext to other hosts (TRIVET_INSECURE_PLAINTEXT)")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	// These fail only for a flag that there is not.
	_ = root.MarkPersistentFlagFilename("token-file")
	_ = root.MarkPersistentFlagFilename("tls-ca")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(show.Forms(), cobra.ShellCompDirectiveNoFileComp))
}

// formFlag takes one of the forms.
type formFlag show.Form

func (f *formFlag) String() string { return string(*f) }
func (f *formFlag) Type() string   { return "form" }
func (f *formFlag) Set(s string) error {
	if !slices.Contains(show.Forms(), s) {
		return fmt.Errorf("want one of %s", strings.Join(show.Forms(), ", "))
	}
	*f = formFlag(s)
	return nil
}

// Connect prepares the connection with the token that was given or saved. Nothing is dialled yet.
func (s *Session) Connect() (*dial.Conn, error) {
	if s.flags.timeout < 0 {
		return nil, Usagef("--timeout: want more than nothing, got %v", s.flags.timeout)
	}
	token, err := s.token()
	if err != nil {
		return nil, err
	}
	endpoints, secure, err := s.endpoints()
	if err != nil {
		return nil, err
	}
	var saved *account.Login
	if token == "" || len(endpoints) == 0 { // a login that is not needed may be of any shape
		if saved, err = s.saved(); err != nil {
			return nil, err
		}
	}
	endpoints = orSaved(endpoints, saved)
	if token == "" && saved != nil {
		if err := covers(saved, endpoints); err != nil {
			return nil, err
		}
		token, s.facts.Source = saved.Token, explain.SavedLogin
		s.actFor(saved)
	}
	s.Keep(token)
	way, err := s.way(endpoints, secure, saved)
	if err != nil {
		return nil, err
	}
	return s.open(way, token)
}

// ConnectToLogIn prepares a connection without a token, and says where it goes: a login without who.
func (s *Session) ConnectToLogIn() (*dial.Conn, account.Login, error) {
	s.facts.LoggingIn = true
	endpoints, secure, err := s.endpoints()
	if err != nil {
		return nil, account.Login{}, err
	}
	// A login that cannot be read is about to be replaced.
	saved, _ := s.saved()
	endpoints = orSaved(endpoints, saved)
	if s.flags.plaintext {
		saved = nil // whoever says so may be leaving TLS
	}
	way, err := s.way(endpoints, secure, saved)
	if err != nil {
		return nil, way, err
	}
	conn, err := s.open(way, "")
	return conn, way, err
}

// saved is the login, nil when there is none.
func (s *Session) saved() (*account.Login, error) {
	path, err := account.Path(s.Env)
	if err != nil {
		return nil, nil // without a home there is no login; `trivet login` says so
	}
	l, err := account.Load(path)
	if errors.Is(err, account.ErrNone) {
		return nil, nil
	}
	return l, err
}

// endpoints are those that were named: by flag before environment.
func (s *Session) endpoints() (all []string, secure bool, err error) {
	source, lists := "--endpoint", s.flags.endpoints
	if len(lists) == 0 {
		source, lists = "TRIVET_ENDPOINT", []string{s.Env("TRIVET_ENDPOINT")}
	}
	if all, secure, err = account.Endpoints(lists...); err != nil {
		return nil, false, Usagef("%s: %v", source, err)
	}
	return all, secure, nil
}

func orSaved(named []string, saved *account.Login) []string {
	switch {
	case len(named) > 0:
		return named
	case saved != nil:
		return saved.Endpoints
	}
	return []string{DefaultEndpoint}
}

// token is what was given: by flag before environment, and the token itself before a file.
func (s *Session) token() (account.Secret, error) {
	if s.flags.token != "" && s.flags.tokenFile != "" {
		return "", Usagef("give --token or --token-file, not both")
	}
	for _, from := range []struct {
		source, token, file string
	}{
		{"--token", s.flags.token, ""}, {"--token-file", "", s.flags.tokenFile},
		{"TRIVET_TOKEN", s.Env("TRIVET_TOKEN"), ""}, {"TRIVET_TOKEN_FILE", "", s.Env("TRIVET_TOKEN_FILE")},
	} {
		if from.token == "" && from.file == "" {
			continue
		}
		s.facts.Source = from.source
		token := account.Secret(from.token)
		if from.file != "" {
			var err error
			if token, err = account.ReadSecret(from.file, s.Stdin); err != nil {
				return "", fmt.Errorf("%s: %w", from.source, err)
			}
		}
		if strings.ContainsFunc(string(token), func(r rune) bool { return r <= ' ' || r > '~' }) {
			return "", fmt.Errorf("%s: that is not a token", from.source)
		}
		return token, nil
	}
	return "", nil
}

// covers refuses to send a saved token to where it was not made for.
func covers(l *account.Login, endpoints []string) error {
	for _, e := range endpoints {
		if !slices.Contains(l.Endpoints, e) {
			return fmt.Errorf("the login is for %s, and its token is not sent to %s: run `trivet login --endpoint %s`, or give a token",
				strings.Join(l.Endpoints, ","), e, strings.Join(endpoints, ","))
		}
	}
	return nil
}

// Tenant is the org and project to name in calls; empty leaves the choice to the token.
func (s *Session) Tenant() (org, project string) {
	org, project = s.flags.org, s.flags.project
	if org == "" {
		org = s.Env("TRIVET_ORG")
	}
	if project == "" {
		project = s.Env("TRIVET_PROJECT")
	}
	return org, project
}

// actFor takes the tenant of the saved login, unless another was named.
func (s *Session) actFor(l *account.Login) {
	if org, project := s.Tenant(); org == "" && project == "" {
		s.flags.org, s.flags.project = l.Org, l.Project
	}
}
