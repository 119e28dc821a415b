// Package apply holds the command `trivet apply`, which creates and changes the objects that files describe. Each kind
// of objects is a [Kind], which the package with the commands for such objects provides. A Kind compares the object of a
// file with that of the cloud, and returns a [Plan]. Decisions:
//
//   - A document has the keys of the create command of its kind, as for `trivet vm create -f`. So there is one reader
//     of files (package flagfile) and one way to create an object, and a file of `trivet vm create -f` can be applied.
//   - An object is found by its name in the project. If it does not exist, it is created as the create command would
//     create it, and with the same waits.
//   - Of an object that exists, the values that the file gives are changed. All others stay, also those that an earlier
//     version of the file gave: the cloud does not record which values came from a file. So apply deletes nothing.
//   - A value that differs and cannot be changed, such as an image or an address, is an error. A Plan finds all such
//     errors before the object is changed.
//   - Values that the cloud does not record, such as the user data of a VM, matter only for a new object.
//   - All files are read and checked before the first object is changed. Then each object is applied on its own, and
//     after a failure the others are still applied. There is no transaction over several objects.
//   - Objects are applied in the order of the kinds, so that a VM can refer to a volume that follows in the file.
//     Objects of one kind are applied in the order of the files.
//   - A dry run makes only calls that read. It cannot find errors that only the control plane finds, such as a quota.
//
// The package must not import the packages that provide kinds, because they import it.
package apply

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/flagfile"
	"github.com/trivet-cloud/trivet/cli/session"
)

// Kind is a kind of objects that can be applied.
type Kind struct {
	// Names are the values of the key "kind". Output has the first one.
	Names []string
	// File describes the documents.
	File *flagfile.File
	// New returns a command whose flags are the keys of a document, and the function that compares the object that the
	// flags describe with the cloud. The command is not executed.
	New func(s *session.Session) (*cobra.Command, PlanFunc)
}

// PlanFunc compares an object of a file with the object of this name in the cloud, and changes nothing. It returns an
// error if the two differ in a value that cannot be changed.
type PlanFunc func(ctx context.Context, conn *dial.Conn, run *Run, name string) (*Plan, error)

// Plan describes what has to be done for one object.
type Plan struct {
	// Create is true if the object does not exist.
	Create bool
	// Changes has a text for each value that Do changes, such as "vcpus 1 -> 2". It is empty for a new object.
	Changes []string
	// Do creates or changes the object. It is not called if Create is false and there are no Changes.
	Do func(ctx context.Context) error
}

// Add adds a text to the changes of the plan.
func (p *Plan) Add(format string, args ...any) {
	p.Changes = append(p.Changes, fmt.Sprintf(format, args...))
}

// Pairs adds a text for each label or pair of the metadata in given that differs from present, and returns these pairs.
// An empty value is that of a pair that does not exist. The texts contain the values only if withValues is true.
func (p *Plan) Pairs(word string, given, present map[string]string, withValues bool) map[string]string {
	changed := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		value := given[key]
		switch {
		case value == present[key]:
			continue
		case value == "":
			p.Add("%s %s removed", word, key)
		case withValues:
			p.Add("%s %s=%s", word, key, value)
		default:
			p.Add("%s %s", word, key)
		}
		changed[key] = value
	}
	return changed
}

// Run is one run of the command.
type Run struct {
	// Dry is true if nothing may be changed.
	Dry bool
	// planned has the objects that a dry run would create, such as volume/data.
	planned map[string]bool
}

// WillExist reports whether err is the error for an object that does not exist and that an earlier document would have
// created if this were not a dry run. kind is the first of Kind.Names.
func (r *Run) WillExist(err error, kind, name string) bool {
	var p *session.Problem
	return r.planned[kind+"/"+name] && errors.As(err, &p) && p.Code == codes.NotFound
}

// Fixed returns the error for a value of a file that differs from that of the object and cannot be changed. An empty
// present value is one that is not set.
func Fixed(what, present, given string) error {
	return session.Errorf(codes.FailedPrecondition, "", "%s cannot be changed: it is %s, and the file gives %s",
		what, cmp.Or(present, "not set"), cmp.Or(given, "none"))
}

// SameAddress reports whether two texts are the same address or prefix, or otherwise equal.
func SameAddress(a, b string) bool { return normalizeAddress(a) == normalizeAddress(b) }

// normalizeAddress returns the usual text of a prefix or an address, and other text unchanged.
func normalizeAddress(text string) string {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.String()
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return a.String()
	}
	return text
}
