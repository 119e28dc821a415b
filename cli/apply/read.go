package apply

import (
	"cmp"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/cli/flagfile"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// read returns the objects of files in the order in which they are applied. Its errors are *session.Usage errors.
func read(s *session.Session, files []string, defaultKind string, kinds []*Kind) ([]*object, error) {
	var all []*object
	for _, path := range files {
		documents, err := open(s, path)
		if err != nil {
			return nil, err
		}
		for _, d := range documents {
			o, line, err := newObject(s, d, defaultKind, kinds)
			switch {
			case err != nil:
				return nil, session.Usagef("--file %s: %v", path, err)
			case slices.ContainsFunc(all, func(other *object) bool { return other.String() == o.String() }):
				return nil, session.Usagef("--file %s: line %d: %s is given twice", path, line, o)
			}
			all = append(all, o)
		}
	}
	if len(all) == 0 {
		return nil, session.Usagef("--file %s: there are no objects", strings.Join(files, ", "))
	}
	slices.SortStableFunc(all, func(a, b *object) int { return cmp.Compare(a.order, b.order) })
	return all, nil
}

// open reads the documents of the file at path, or of standard input if path is "-".
func open(s *session.Session, path string) ([]*flagfile.Document, error) {
	var r io.Reader = s.Stdin
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return nil, session.Usagef("--file: %v", err)
		}
		defer file.Close()
		r = file
	}
	documents, err := flagfile.Documents(r)
	if err != nil {
		return nil, session.Usagef("--file %s: %v", path, err)
	}
	return documents, nil
}

// newObject returns the object that a document describes, and the line at which the document begins.
func newObject(
	s *session.Session, d *flagfile.Document, defaultKind string, kinds []*Kind,
) (o *object, line int, err error) {
	line = d.Line()
	name, at, err := d.Take("kind")
	if err != nil {
		return nil, 0, err
	}
	name = cmp.Or(name, defaultKind)
	order := slices.IndexFunc(kinds, func(k *Kind) bool { return slices.Contains(k.Names, name) })
	if order < 0 {
		return nil, 0, session.Usagef("line %d: kind %q: want %s", at, name, kindNames(kinds))
	}
	o = &object{kind: kinds[order].Names[0], order: order}
	o.command, o.plan = kinds[order].New(s)
	if o.name, err = kinds[order].File.Set(o.command, d); err != nil {
		return nil, 0, err
	}
	if o.name == "" {
		return nil, 0, session.Usagef("line %d: name is missing", line)
	}
	if err := cloud.CheckName("name", o.name); err != nil {
		return nil, 0, session.Usagef("line %d: %v", line, err)
	}
	return o, line, nil
}

// firstNames returns the first name of each kind.
func firstNames(kinds []*Kind) []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.Names[0]
	}
	return names
}

// kindNames returns the names of all kinds as a list for a sentence.
func kindNames(kinds []*Kind) string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.Names...)
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}
