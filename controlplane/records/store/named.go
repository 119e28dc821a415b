package store

import (
	"context"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Named returns the ID of the object with a name, from a table that has the IDs of a project's objects at path/<name>. kind
// is the kind of the object, for errors. Named returns NotFound if there is no such object, and InvalidArgument if name
// cannot be a name.
func Named[ID ~string](ctx context.Context, s *Store, names Table[ID], kind, name string, path ...string) (id string, err error) {
	if err := cloud.CheckName("name", name); err != nil {
		return "", err
	}
	err = s.View(ctx, func(v *View) error {
		found, err := names.Get(v, append(path, name)...)
		if err != nil {
			return err
		}
		if found == nil {
			return fault.New(fault.NotFound, "no %s has the name %s", kind, name)
		}
		id = string(*found)
		return nil
	})
	return id, err
}
