package session

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/show"
)

// PageSize is the number of objects that commands request per page of a list. This many objects fit in a gRPC message,
// even if each object has the maximum number of labels.
const PageSize = 250

// Exactly returns a check that accepts exactly one argument for each name. Its errors contain the names.
func Exactly(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) == len(names)-1:
			return fmt.Errorf("%s is missing", names[len(args)])
		case len(args) < len(names):
			return fmt.Errorf("%s are missing", strings.Join(names[len(args):], " and "))
		case len(args) > len(names):
			return fmt.Errorf("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// AtMost returns a check that accepts up to one argument for each name.
func AtMost(names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		return Exactly(names[:min(len(args), len(names))]...)(c, args)
	}
}

// AtLeast returns a check that the command has all the named arguments. It may have further ones.
func AtLeast(names ...string) cobra.PositionalArgs {
	exactly := Exactly(names...)
	return func(c *cobra.Command, args []string) error { return exactly(c, args[:min(len(args), len(names))]) }
}

// IsID reports whether s has the form of a generated ID, a lower-case UUID. Commands treat a name of that form as an
// ID.
func IsID(s string) bool {
	u, err := uuid.Parse(s)
	return err == nil && u.String() == s
}

// Match is an object whose name is the one that the user has given.
type Match struct {
	ID string
	// About is text that distinguishes the object from others of the same name.
	About string
}

// nouns maps the name of a command to the noun for its objects in messages, where the two differ.
var nouns = map[string]string{
	"vm": "VM", "service-account": "service account",
	"network vpc": "VPC", "network subnet": "subnet", "network port": "port", "network group": "security group", "network route": "route table",
	"network nat": "NAT gateway", "network floating-ip": "floating IP", "network service-ip": "service IP", "network peering": "peering",
}

// One returns the ID of the only match for a name. It returns a NOT_FOUND error if there is no match, and an error that
// lists the matches if there are several. kind is the command for such objects, such as "vm". scope is the org or
// project in which the name was looked up, for the error; it may be empty.
func One(kind, scope, name string, matches []Match) (string, error) {
	noun := cmp.Or(nouns[kind], kind)
	switch len(matches) {
	case 0:
		if scope != "" {
			scope = " in " + scope
		}
		return "", NotFound(fmt.Sprintf("`trivet %s list` shows the existing ones", kind), "no %s named %q%s", noun, name, scope)
	case 1:
		return matches[0].ID, nil
	}
	rows := make([][]string, len(matches))
	for i, m := range matches {
		rows[i] = []string{"  " + m.ID, m.About}
	}
	var b bytes.Buffer
	if err := show.Rows(&b, []string{"  ID", "ABOUT"}, rows); err != nil {
		return "", err
	}
	return "", &Problem{Code: codes.InvalidArgument, Message: fmt.Sprintf("several %ss are named %q", noun, name), Responded: true,
		Details: strings.Split(strings.TrimRight(b.String(), "\n"), "\n"), Hint: "give the ID of one"}
}

// Scope returns the org and the project in which the command acts, such as "acme/shop", for messages. It returns "" if
// the token decides.
func (s *Session) Scope() string {
	org, project := s.Tenant()
	switch {
	case project == "":
		return org
	case org == "":
		return "project " + project
	}
	return org + "/" + project
}

// Pages reads a list page by page and returns its first objects: at most limit, or all if limit is 0. The function page
// takes a page token, and returns the objects of that page and the token of the next page. more is true if the list has
// further objects.
func Pages[T any](limit int, page func(token string) ([]T, string, error)) (all []T, more bool, err error) {
	token := ""
	for {
		got, next, err := page(token)
		if err != nil {
			return nil, false, err
		}
		all = append(all, got...)
		switch {
		case limit > 0 && (len(all) > limit || len(all) == limit && next != ""):
			return all[:limit], true, nil
		case next == "":
			return all, false, nil
		case next == token:
			return nil, false, errors.New("the control plane gave the same page token twice")
		}
		token = next
	}
}

// NameOf returns a function that returns the name of an object by its ID, for output. It calls load for the names of all
// objects by ID when the first one is needed. If load fails or does not return an ID, the function returns the ID.
func NameOf(load func() (map[string]string, error)) func(id string) string {
	names := sync.OnceValue(func() map[string]string {
		names, _ := load() // without the right to list them, or without an answer, the output has IDs
		return names
	})
	return func(id string) string {
		if id == "" {
			return ""
		}
		return cmp.Or(names()[id], id)
	}
}

// completing is the timeout of the calls for a shell completion.
const completing = 2 * time.Second

// Names returns a shell completion for an argument or flag, with the names that the function list returns. It completes
// nothing if list fails or takes longer than 2 seconds.
func (s *Session) Names(list func(ctx context.Context, conn *dial.Conn) ([]string, error)) cobra.CompletionFunc {
	return s.names(s.Connect, list)
}

// OpenNames is like Names, but its connection has no token, for calls that are possible before a login.
func (s *Session) OpenNames(list func(ctx context.Context, conn *dial.Conn) ([]string, error)) cobra.CompletionFunc {
	return s.names(func() (*dial.Conn, error) { return s.ConnectWith("", "") }, list)
}

func (s *Session) names(connect func() (*dial.Conn, error), list func(ctx context.Context, conn *dial.Conn) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		conn, err := connect()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(cmd.Context(), completing)
		defer cancel()
		names, err := list(ctx, conn)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return starting(names, prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

func starting(names []string, prefix string) (found []string) {
	for _, n := range names {
		if strings.HasPrefix(n, prefix) {
			found = append(found, n)
		}
	}
	return found
}

// AnyArg returns a shell completion that is f for each argument, without the arguments that are given already.
func AnyArg(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		names, directive := f(cmd, args, prefix)
		return slices.DeleteFunc(names, func(n string) bool { return slices.Contains(args, n) }), directive
	}
}

// FirstArg returns a shell completion that is f for the first argument, and completes nothing for later ones.
func FirstArg(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return f(cmd, args, prefix)
	}
}

// Pairs parses the values of a repeated flag, each KEY=VALUE, into a map. It returns a *Usage error for another form or
// a repeated key.
func Pairs(flag string, given []string) (map[string]string, error) {
	var m map[string]string
	for _, g := range given {
		k, v, ok := strings.Cut(g, "=")
		if !ok || k == "" {
			return nil, Usagef("--%s %q: want KEY=VALUE", flag, g)
		}
		if _, twice := m[k]; twice {
			return nil, Usagef("--%s: %q is given twice", flag, k)
		}
		if m == nil {
			m = map[string]string{}
		}
		m[k] = v
	}
	return m, nil
}
