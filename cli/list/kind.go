// Package list implements the commands that list objects. A command describes its objects as a [Kind]: how a page of
// them is read, and the [Column]s of their table. All lists then have the same flags and the same output: a table with
// the columns and the order that the user chooses, or a document with the keys items and next_page_token. [Watch]
// follows the changes of a list.
package list

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Query selects a page of a list.
type Query struct {
	// Size is the maximum number of objects of the page.
	Size int32
	// Token is the token of the page; empty for the first one.
	Token string
	// Filter is the filter of --filter and --label. It is empty unless Kind.Filters is true.
	Filter string
}

// Kind describes how the objects of one kind are read and printed.
type Kind[T any] struct {
	// Page returns a page and the token of the next one, which is empty if there is none. It may return fewer objects than
	// the query asks for, but not more: Slice helps if the API has no pages.
	Page func(ctx context.Context, conn *dial.Conn, q Query) (objects []T, next string, err error)
	// Name returns what -o name prints.
	Name func(T) string
	// Columns returns the columns. The functions of a column may call the API with conn, for example to find the name of a
	// host. For the help of a command conn is nil, and only the names of the columns are used.
	Columns func(ctx context.Context, s *session.Session, conn *dial.Conn) []Column[T]
	// Keep, if not nil, selects the objects that are listed.
	Keep func(T) bool
	// Words has the possible values of fields that are texts in the messages, by the names of the fields, for --filter.
	Words map[string][]string
	// Fields has fields for --filter that replace those of the messages and the columns, by name. Optional.
	Fields map[string]Field
	// Empty, if not nil, is called if the list is empty. It returns an error if a flag names something that does not exist.
	Empty func(ctx context.Context, conn *dial.Conn) error
	// Rewrite, if not nil, replaces comparisons of columns that the API does not know in a filter for Page.
	Rewrite func(ctx context.Context, conn *dial.Conn, filter string) (string, error)
	// Filters is true if Page uses Query.Filter. Otherwise the command line filters the objects that Page returns. It
	// filters only messages.
	Filters bool
}

// Command sets the arguments, flags and body of c, so that c lists objects. limit is the command's deadline unless
// --timeout is given.
func (k *Kind[T]) Command(s *session.Session, c *cobra.Command, limit time.Duration) *cobra.Command {
	f := k.AddFlags(s, c)
	c.Args = session.Exactly()
	c.RunE = s.Run(limit, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		return k.List(ctx, s, conn, f)
	})
	return c
}

// LocalCommand is like Command, for objects that are read without a connection.
func (k *Kind[T]) LocalCommand(s *session.Session, c *cobra.Command) *cobra.Command {
	f := k.AddFlags(s, c)
	c.Args = session.Exactly()
	c.RunE = s.Local(func(ctx context.Context, _ []string) error { return k.List(ctx, s, nil, f) })
	return c
}

// AddFlags adds the flags of lists to c, for a command that calls List.
func (k *Kind[T]) AddFlags(s *session.Session, c *cobra.Command) *Flags {
	f := &Flags{}
	f.add(c, flagNames(k.Columns(context.Background(), s, nil)))
	fields := fieldsOf[T]()
	if fields != nil {
		f.addFilter(c, example(k.Filters, fields))
	}
	if hasLabels(fields) {
		f.labels.Add(c, "list only objects")
	}
	return f
}

// Table returns the table that the flags select, for a Watch.
func (k *Kind[T]) Table(ctx context.Context, s *session.Session, conn *dial.Conn, f *Flags) (*Table[T], error) {
	return table(f, s.Form, k.Columns(ctx, s, conn))
}

// List reads and prints the objects that the flags select.
func (k *Kind[T]) List(ctx context.Context, s *session.Session, conn *dial.Conn, f *Flags) error {
	t, err := k.Table(ctx, s, conn, f)
	if err != nil {
		return err
	}
	q := Query{Token: f.pageToken}
	if q.Filter, err = f.Filter(); err != nil {
		return err
	}
	if !k.Filters && q.Filter != "" {
		if k, err = k.filtered(q.Filter, k.Columns(ctx, s, conn)); err != nil {
			return err
		}
	}
	if k.Filters && k.Rewrite != nil {
		if q.Filter, err = k.Rewrite(ctx, conn, q.Filter); err != nil {
			return err
		}
	}
	limit := f.limit
	if t.order != nil {
		limit = 0 // the first ones in the order of --sort can be anywhere in the list
	}
	all, next, err := k.read(ctx, conn, q, limit)
	if err != nil {
		return err
	}
	if len(all) == 0 && f.pageToken == "" {
		if err := k.checkEmpty(ctx, s, conn); err != nil {
			return err
		}
	}
	t.sort(all)
	cut := f.limit > 0 && len(all) > f.limit
	if cut {
		all = all[:f.limit]
	}
	if err := k.print(s, t, next, all...); err != nil {
		return err
	}
	switch {
	case cut:
		s.Note("there are more: --limit is %d", f.limit)
	case next != "":
		s.Note("there are more: --page-token %s continues the list", next)
	}
	return nil
}

// checkEmpty is called for an empty list. It returns an error if the org or the project that the command line names does
// not exist. It makes no call if neither is named.
func (k *Kind[T]) checkEmpty(ctx context.Context, s *session.Session, conn *dial.Conn) error {
	if conn == nil {
		return nil
	}
	if err := s.CheckTenant(ctx, conn); err != nil || k.Empty == nil {
		return err
	}
	return k.Empty(ctx, conn)
}

// read returns the objects that q selects: at most limit, or all if limit is 0. next is the token with which the list
// continues, or empty.
func (k *Kind[T]) read(ctx context.Context, conn *dial.Conn, q Query, limit int) (all []T, next string, err error) {
	for {
		q.Size = session.PageSize
		if limit > 0 && k.Keep == nil {
			q.Size = int32(min(session.PageSize, limit-len(all)))
		}
		page, next, err := k.Page(ctx, conn, q)
		if err != nil {
			return nil, "", err
		}
		if limit > 0 && k.Keep != nil {
			if n := k.countUntil(page, limit-len(all)); n < len(page) {
				// Read the page again up to the last object that is listed: only then does next continue after it.
				q.Size = int32(n)
				if page, next, err = k.Page(ctx, conn, q); err != nil {
					return nil, "", err
				}
			}
		}
		for _, o := range page {
			if k.Keep == nil || k.Keep(o) {
				all = append(all, o)
			}
		}
		if next == "" || limit > 0 && len(all) >= limit {
			return all, next, nil
		}
		if next == q.Token {
			return nil, "", errors.New("the control plane gave the same page token twice")
		}
		q.Token = next
	}
}

// countUntil returns how many objects, from the first, contain limit objects for which Keep returns true. It returns the
// number of all objects if there are fewer such objects.
func (k *Kind[T]) countUntil(objects []T, limit int) int {
	for i, o := range objects {
		if k.Keep(o) {
			limit--
		}
		if limit == 0 {
			return i + 1
		}
	}
	return len(objects)
}

// print prints objects in the format of --output. next is the token of the next page.
func (k *Kind[T]) print(s *session.Session, t *Table[T], next string, objects ...T) error {
	if s.Form == show.CSV || s.Form.ForPeople() {
		return t.print(s.Stdout, objects...)
	}
	var names []string
	var items []any
	for _, o := range objects {
		if s.Form == show.Name {
			names = append(names, k.Name(o))
			continue
		}
		item, err := show.Item(o)
		if err != nil {
			return err
		}
		items = append(items, item)
	}
	return s.PrintValue(show.Documents(items, next), names, nil)
}

// PrintAll prints objects as a list, with the columns that are shown by default.
func (k *Kind[T]) PrintAll(ctx context.Context, s *session.Session, conn *dial.Conn, objects ...T) error {
	t, err := k.Table(ctx, s, conn, &Flags{})
	if err != nil {
		return err
	}
	return k.print(s, t, "", objects...)
}

// PrintOne prints one object, for a command that has created or changed it: a table with one row, or the document of
// the object.
func (k *Kind[T]) PrintOne(ctx context.Context, s *session.Session, conn *dial.Conn, o T) error {
	if s.Form == show.CSV {
		return k.PrintAll(ctx, s, conn, o)
	}
	return s.PrintValue(o, []string{k.Name(o)}, func(io.Writer) error { return k.PrintAll(ctx, s, conn, o) })
}

// All reads all pages of the list and returns their objects.
func (k *Kind[T]) All(ctx context.Context, conn *dial.Conn) ([]T, error) {
	all, _, err := k.read(ctx, conn, Query{}, 0)
	return all, err
}

// Names returns a shell completion with the names of the first objects.
func (k *Kind[T]) Names(s *session.Session) cobra.CompletionFunc {
	return s.Names(k.FirstNames)
}

// FirstNames returns the names of the first objects, for a shell completion.
func (k *Kind[T]) FirstNames(ctx context.Context, conn *dial.Conn) (names []string, err error) {
	all, _, err := k.read(ctx, conn, Query{}, session.PageSize)
	for _, o := range all {
		names = append(names, k.Name(o))
	}
	return names, err
}
