package session

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
)

// DefaultEndpoint is the gRPC address of a control plane that was started without flags.
const DefaultEndpoint = "127.0.0.1:" + account.DefaultPort

type flags struct {
	endpoints        []string
	token, tokenFile string
	org, project     string
	context          string
	timeout          time.Duration
	tls, plaintext   bool
	tlsCA            string
}

func (f *flags) add(root *cobra.Command, s *Session) {
	p := root.PersistentFlags()
	p.StringArrayVar(&f.endpoints, "endpoint", nil, "control plane, as [https://]HOST[:PORT],... (TRIVET_ENDPOINT; default "+DefaultEndpoint+")")
	p.StringVar(&f.token, "token", "", "token (TRIVET_TOKEN); visible to other users of this host, unlike --token-file")
	p.StringVar(&f.tokenFile, "token-file", "", "file with the token (TRIVET_TOKEN_FILE)")
	p.StringVar(&f.org, "org", "", "org to act for (TRIVET_ORG; default that of the login)")
	p.StringVar(&f.project, "project", "", "project to act for, as PROJECT or ORG/PROJECT (TRIVET_PROJECT; default that of the login, or else your default project)")
	p.StringVar(&f.context, "context", "", "saved login to use (TRIVET_CONTEXT; default the current one)")
	p.VarP((*formatFlag)(s), "output", "o", "output format: "+strings.Join(show.Forms(), ", "))
	p.DurationVar(&f.timeout, "timeout", 0, "deadline of the command, such as 90s (default depends on the command)")
	p.BoolVar(&f.tls, "tls", false, "use TLS with the system's certificate authorities; the same as https:// before an endpoint")
	p.StringVar(&f.tlsCA, "tls-ca", "", "use TLS with the certificate authority in this file (TRIVET_TLS_CA)")
	p.BoolVar(&f.plaintext, "insecure-plaintext", false, "send tokens and passwords in plaintext to other hosts (TRIVET_INSECURE_PLAINTEXT)")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	// Errors are ignored: these functions fail only if the flag does not exist or already has a completion.
	_ = root.MarkPersistentFlagFilename("token-file")
	_ = root.MarkPersistentFlagFilename("tls-ca")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(show.Forms(), cobra.ShellCompDirectiveNoFileComp))
}

// formatFlag is a pflag.Value for --output.
type formatFlag Session

func (f *formatFlag) String() string { return string(f.Form) }
func (f *formatFlag) Type() string   { return "format" }
func (f *formatFlag) Set(text string) error {
	format, err := show.ParseFormat(text)
	if err != nil {
		return err
	}
	f.format, f.Form = format, format.Form
	return nil
}

// Connect returns a connection that uses the token of the flags or the environment or, if there is none, the token of
// the saved login. It does not dial; the first call does.
func (s *Session) Connect() (*dial.Conn, error) {
	if s.flags.timeout < 0 {
		return nil, Usagef("--timeout: want more than 0, got %v", s.flags.timeout)
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
	if token == "" || len(endpoints) == 0 || s.flags.context != "" { // otherwise, an invalid saved login must not matter
		if saved, err = s.saved(); err != nil {
			return nil, err
		}
	}
	endpoints = orSaved(endpoints, saved)
	if token == "" && saved != nil {
		if err := covers(saved, endpoints); err != nil {
			return nil, err
		}
		if token = saved.Token; token != "" {
			s.facts.Source = explain.SavedLogin
		}
		s.scope = saved
	}
	s.Keep(token)
	if err := s.checkNamed(); err != nil {
		return nil, err
	}
	way, err := s.way(endpoints, secure, saved)
	if err != nil {
		return nil, err
	}
	s.choosing = true
	return s.open(way, token)
}

// ConnectToLogIn returns a connection without a token, and a new Login that holds only the endpoints and TLS options of
// that connection. saved is the login to be replaced, or nil. The TLS options of saved are used if it has all these
// endpoints, or else those of a login in b that has them. Thus an endpoint for which a saved login uses TLS is called
// in plaintext only with --insecure-plaintext.
func (s *Session) ConnectToLogIn(b *account.Book, saved *account.Login) (*dial.Conn, *account.Login, error) {
	s.facts.LoggingIn = true
	endpoints, secure, err := s.endpoints()
	if err != nil {
		return nil, nil, err
	}
	endpoints = orSaved(endpoints, saved)
	if saved == nil || covers(saved, endpoints) != nil {
		saved = nil
		for _, name := range b.Names() {
			if l := b.Contexts[name]; covers(l, endpoints) == nil && (saved == nil || l.TLS) {
				saved = l
			}
		}
	}
	if s.flags.plaintext {
		saved = nil // --insecure-plaintext overrides a saved login that uses TLS
	}
	way, err := s.way(endpoints, secure, saved)
	if err != nil {
		return nil, nil, err
	}
	s.secret = "the password"
	conn, err := s.open(way, "")
	return conn, &way, err
}

// ConnectWith returns a connection that uses token, or no token if it is empty. The parameter told describes another
// secret that the requests contain, such as "the password"; it is empty if there is none. The description is for the
// error that is returned if the secret would be sent in plaintext.
func (s *Session) ConnectWith(token account.Secret, told string) (*dial.Conn, error) {
	endpoints, secure, err := s.endpoints()
	if err != nil {
		return nil, err
	}
	saved, err := s.saved()
	if err != nil && (len(endpoints) == 0 || s.flags.context != "") {
		return nil, err
	}
	s.facts.LoggingIn, s.secret = token == "", told
	s.Keep(token)
	way, err := s.way(orSaved(endpoints, saved), secure, saved)
	if err != nil {
		return nil, err
	}
	return s.open(way, token)
}

// HasToken reports whether the flags, the environment or the saved login have a token.
func (s *Session) HasToken() (bool, error) {
	token, err := s.token()
	if err != nil || token != "" {
		return token != "", err
	}
	saved, err := s.saved()
	return saved != nil && saved.Token != "", err
}

// Token returns the token of the flags or the environment or, if there is none, the token of the saved login. It does
// not return a saved token but an error if --endpoint or TRIVET_ENDPOINT names an endpoint that the saved login does
// not have.
func (s *Session) Token() (account.Secret, error) {
	token, err := s.token()
	if err != nil {
		return "", err
	}
	if token == "" {
		saved, err := s.saved()
		if err != nil {
			return "", err
		}
		if saved == nil || saved.Token == "" {
			return "", Errorf(codes.Unauthenticated, "run `trivet login`, or give --token-file", "there is no token")
		}
		named, _, err := s.endpoints()
		if err != nil {
			return "", err
		}
		if err := covers(saved, named); err != nil {
			return "", err
		}
		token = saved.Token
	}
	s.Keep(token)
	return token, nil
}

// ConnectFor returns a connection that uses the token and endpoints of the saved login l. If --endpoint is given, it
// uses those endpoints, which must be endpoints of l.
func (s *Session) ConnectFor(l *account.Login) (*dial.Conn, error) {
	endpoints, secure := l.Endpoints, false
	if len(s.flags.endpoints) > 0 {
		var err error
		if endpoints, secure, err = s.endpoints(); err != nil {
			return nil, err
		}
		if err := covers(l, endpoints); err != nil {
			return nil, err
		}
	}
	s.facts.Source = explain.SavedLogin
	s.Keep(l.Token)
	way, err := s.way(endpoints, secure, l)
	if err != nil {
		return nil, err
	}
	return s.open(way, l.Token)
}

// endpoints returns the endpoints in --endpoint or, without that flag, in TRIVET_ENDPOINT. It returns none if neither
// is set. secure is true if one of them has https://.
func (s *Session) endpoints() (all []string, secure bool, err error) {
	source, lists := "--endpoint", s.flags.endpoints
	if len(lists) == 0 {
		source, lists = "TRIVET_ENDPOINT", []string{s.env("TRIVET_ENDPOINT")}
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

// token returns the token of --token, --token-file, TRIVET_TOKEN or TRIVET_TOKEN_FILE, in this order of precedence, or
// "" if none is set.
func (s *Session) token() (account.Secret, error) {
	if s.flags.token != "" && s.flags.tokenFile != "" {
		return "", Usagef("give --token or --token-file, not both")
	}
	for _, from := range []struct {
		source, token, file string
	}{
		{"--token", s.flags.token, ""}, {"--token-file", "", s.flags.tokenFile},
		{"TRIVET_TOKEN", s.env("TRIVET_TOKEN"), ""}, {"TRIVET_TOKEN_FILE", "", s.env("TRIVET_TOKEN_FILE")},
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
			return "", fmt.Errorf("%s: not a valid token", from.source)
		}
		return token, nil
	}
	return "", nil
}

// covers returns an error if the saved login l does not have all of the endpoints. Its token must not be sent to
// others.
func covers(l *account.Login, endpoints []string) error {
	for _, e := range endpoints {
		if !slices.Contains(l.Endpoints, e) {
			return Errorf(codes.Unauthenticated, fmt.Sprintf("run `trivet login --endpoint %s`, or give a token", strings.Join(endpoints, ",")),
				"the saved token is for %s and is not sent to %s", strings.Join(l.Endpoints, ","), e)
		}
	}
	return nil
}
