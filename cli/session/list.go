package session

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/show"
)

// List describes how the objects of one kind are read from the control plane and printed: as a table with Header and
// Row, as JSON with Whole, or as names with Name. All fields are required.
type List[T any] struct {
	Page func(ctx context.Context, conn *dial.Conn, token string) (objects []T, next string, err error)
	// Whole returns a list response that contains all given objects, for JSON output.
	Whole  func([]T) proto.Message
	Name   func(T) string
	Header []string
	Row    func(T) []string
}

// Command sets the arguments, flags and body of c, so that c lists objects. If keep is not nil, c lists only the
// objects for which keep returns true. call is the command's deadline unless --timeout is given.
func (l *List[T]) Command(s *Session, c *cobra.Command, call time.Duration, keep func(T) bool) *cobra.Command {
	var limit int
	c.Args = Exactly()
	c.Flags().IntVar(&limit, "limit", 0, "list at most this many")
	c.RunE = s.Run(call, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		all, more, err := Pages(limit, func(token string) ([]T, string, error) {
			got, next, err := l.Page(ctx, conn, token)
			if keep == nil {
				return got, next, err
			}
			var kept []T
			for _, o := range got {
				if keep(o) {
					kept = append(kept, o)
				}
			}
			return kept, next, err
		})
		if err != nil {
			return err
		}
		err = l.Print(s, l.Whole(all), all...)
		if more {
			s.Note("there are more: --limit is %d", limit)
		}
		return err
	})
	return c
}

// Print prints objects in the format of --output: the message m as JSON, or the names of the objects, or a table of the
// objects.
func (l *List[T]) Print(s *Session, m proto.Message, objects ...T) error {
	var names []string
	var rows [][]string
	for _, o := range objects {
		names = append(names, l.Name(o))
		rows = append(rows, l.Row(o))
	}
	return s.Print(m, names, func(w io.Writer) error { return show.Rows(w, l.Header, rows) })
}

// All reads all pages of the list and returns their objects.
func (l *List[T]) All(ctx context.Context, conn *dial.Conn) ([]T, error) {
	all, _, err := Pages(0, func(token string) ([]T, string, error) { return l.Page(ctx, conn, token) })
	return all, err
}

// Names returns a shell completion with the names of the first PageSize objects.
func (l *List[T]) Names(s *Session) cobra.CompletionFunc {
	return s.Names(func(ctx context.Context, conn *dial.Conn) (names []string, err error) {
		all, _, err := Pages(PageSize, func(token string) ([]T, string, error) { return l.Page(ctx, conn, token) })
		for _, o := range all {
			names = append(names, l.Name(o))
		}
		return names, err
	})
}
