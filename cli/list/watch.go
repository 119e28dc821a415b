package list

import (
	"context"
	"io"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// ChangeKind is the kind of a Change.
type ChangeKind uint8

const (
	// Present is for an object that was in the list when the stream began.
	Present ChangeKind = iota + 1
	// Synced follows the last Present. It has no object.
	Synced
	Changed
	Removed
)

// Change is one message of a stream of changes of a list.
type Change[T any] struct {
	Kind ChangeKind
	ID   string
	// Object is set for Present and Changed.
	Object T
	// At is the time of the change in Unix milliseconds.
	At int64
	// Message is the message itself, for JSON.
	Message proto.Message
}

// Watch follows the changes of a list: it prints the list, and then a line for each change. All fields are required.
type Watch[T proto.Message] struct {
	Table *Table[T]
	Name  func(T) string
	// Stream opens a stream of changes and calls handle with each. It returns the error of the stream.
	Stream func(ctx context.Context, handle func(Change[T]) error) error
	// Removed returns the message for an object that was removed while no stream was open.
	Removed func(id string, at int64) proto.Message

	objects map[string]T // the objects in the list, in the state that was printed last
	synced  bool         // whether the list has been printed
	table   *show.Growing
}

// Run prints changes until ctx ends, session.Follow gives up, or the output fails. If a stream breaks, Run opens
// another one, perhaps to another member, and prints only the objects that have changed meanwhile.
func (w *Watch[T]) Run(ctx context.Context, s *session.Session, conn *dial.Conn) error {
	w.objects, w.table = map[string]T{}, show.NewGrowing(s.Stdout)
	return session.Follow(ctx, conn, func(ctx context.Context, heard func()) error {
		present := map[string]bool{}
		var first []Change[T]
		return w.Stream(ctx, func(c Change[T]) error {
			heard()
			switch c.Kind {
			case Present:
				present[c.ID] = true
				first = append(first, c)
				return nil
			case Synced:
				return w.sync(s, first, present, c)
			}
			return w.print(s, c)
		})
	})
}

// sync prints the objects that have changed since the last stream, or the whole list for the first stream. first has
// the objects that were present when the stream began.
func (w *Watch[T]) sync(s *session.Session, first []Change[T], present map[string]bool, synced Change[T]) error {
	if w.Table.order != nil { // the order of --sort
		slices.SortStableFunc(first, func(a, b Change[T]) int { return w.Table.order(a.Object, b.Object) })
	}
	if !w.synced && s.Form.ForPeople() {
		var rows [][]string
		if header := w.Table.header(); header != nil {
			rows = append(rows, append([]string{"TIME", "CHANGE"}, header...))
		}
		for _, c := range first {
			rows = append(rows, w.row(c))
			w.objects[c.ID] = c.Object
		}
		w.synced = true
		return w.table.Print(rows...)
	}
	for _, c := range first {
		if old, known := w.objects[c.ID]; known && proto.Equal(old, c.Object) {
			continue
		}
		if w.synced {
			c.Kind = Changed
		}
		if err := w.print(s, c); err != nil {
			return err
		}
	}
	w.synced = true
	for _, id := range slices.Sorted(maps.Keys(w.objects)) {
		if !present[id] {
			if err := w.print(s, Change[T]{Kind: Removed, ID: id, At: synced.At, Message: w.Removed(id, synced.At)}); err != nil {
				return err
			}
		}
	}
	return nil
}

// print prints one change.
func (w *Watch[T]) print(s *session.Session, c Change[T]) error {
	if c.Kind == Removed {
		old, known := w.objects[c.ID]
		if !known {
			return nil
		}
		c.Object = old
		delete(w.objects, c.ID)
	} else {
		w.objects[c.ID] = c.Object
	}
	return s.PrintItem(c.Message, []string{w.Name(c.Object)}, func(io.Writer) error { return w.table.Print(w.row(c)) })
}

var kinds = map[ChangeKind]string{Present: "present", Changed: "changed", Removed: "removed"}

func (w *Watch[T]) row(c Change[T]) []string {
	at := time.UnixMilli(c.At).UTC().Format("15:04:05Z")
	return append([]string{at, kinds[c.Kind]}, w.Table.row(c.Object)...)
}
