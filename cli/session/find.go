package session

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/show"
)

// PageSize is the number of objects per page. So many objects fit a gRPC message, with all the labels that they can
// have.
const PageSize = 250

// Exactly accepts exactly the named arguments.
func Exactly(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return fmt.Errorf("%s is missing", strings.Join(names[len(args):], " and "))
		case len(args) > len(names):
			return fmt.Errorf("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// IsID reports whether s has the form of a generated ID: a lower-case UUID. A name of that form is treated as an ID.
func IsID(s string) bool {
	u, err := uuid.Parse(s)
	return err == nil && u.String() == s
}

// Match is an object that has the requested name.
type Match struct {
	ID string
	// About describes the object, to distinguish it from others of the same name.
	About string
}

// nouns lists the kinds of objects whose name in messages differs from the name of their command.
var nouns = map[string]string{"vm": "VM", "node": "host", "service-account": "service account"}

// One returns the ID of the only match for a name, or an error if there is none or more than one. kind is the command
// of the objects, such as "vm".
func One(kind, name string, matches []Match) (string, error) {
	noun := cmp.Or(nouns[kind], kind)
	switch len(matches) {
	case 0:
		return "", fmt.Errorf("there is no %s named %q: `trivet %s list` shows the existing ones", noun, name, kind)
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
	return "", fmt.Errorf("several %ss are named %q: give the ID of one\n%s", noun, name, b.String())
}

// Pages reads a list page by page, up to limit objects; 0 means all. more reports whether there are further objects.
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

// completing is the deadline of a shell completion.
const completing = 2 * time.Second

// Names completes an argument with the names that list returns. It completes nothing if the control plane does not
// respond.
func (s *Session) Names(list func(ctx context.Context, conn *dial.Conn) ([]string, error)) cobra.CompletionFunc {
	return s.names(s.Connect, list)
}

// OpenNames does the same as Names for calls that need no token, such as those before a login.
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

// FirstArg completes the first argument only.
func FirstArg(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return f(cmd, args, prefix)
	}
}

// Pairs parses the values of a repeated KEY=VALUE flag.
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
