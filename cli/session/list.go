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

// List describes how objects of one kind are listed and printed. All fields are required.
type List[T any] struct {
	Page func(ctx context.Context, conn *dial.Conn, token string) (objects []T, next string, err error)
	// Whole returns a response with all objects, for JSON output.
	Whole  func([]T) proto.Message
	Name   func(T) string
	Header []string
	Row    func(T) []string
}

// Command makes c list the objects for which keep returns true; a nil keep keeps all. call is the deadline.
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

// Print prints objects as Command does. m is printed for JSON output.
func (l *List[T]) Print(s *Session, m proto.Message, objects ...T) error {
	var names []string
	var rows [][]string
	for _, o := range objects {
		names = append(names, l.Name(o))
		rows = append(rows, l.Row(o))
	}
	return s.Print(m, names, func(w io.Writer) error { return show.Rows(w, l.Header, rows) })
}

// All returns all objects.
func (l *List[T]) All(ctx context.Context, conn *dial.Conn) ([]T, error) {
	all, _, err := Pages(0, func(token string) ([]T, string, error) { return l.Page(ctx, conn, token) })
	return all, err
}

// Names completes an argument with the names of the first PageSize objects.
func (l *List[T]) Names(s *Session) cobra.CompletionFunc {
	return s.Names(func(ctx context.Context, conn *dial.Conn) (names []string, err error) {
		all, _, err := Pages(PageSize, func(token string) ([]T, string, error) { return l.Page(ctx, conn, token) })
		for _, o := range all {
			names = append(names, l.Name(o))
		}
		return names, err
	})
}
