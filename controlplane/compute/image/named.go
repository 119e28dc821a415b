package image

import (
	"context"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// claimName reserves a name in the org of an image. It returns AlreadyExists if another image of the org has the name,
// unless that image is in the status ERROR: an import that failed can be repeated under its name.
//
// The entry in the table names only makes two concurrent calls for one name conflict. The names that are taken are read
// from the images themselves, unguarded (later writes to them do not make the transaction conflict), because images of
// earlier versions have no entry, and several of them can have one name.
func claimName(tx *store.Tx, i *cloud.Image, name string) error {
	if _, err := names.Get(tx, string(i.Org), name); err != nil {
		return err
	}
	all, _, err := Images.List(tx.Unguarded(), 0)
	if err != nil {
		return err
	}
	for _, r := range all {
		if other := r.Value; other.Org == i.Org && other.Name == name && other.ID != i.ID && other.Status != cloud.ImageError {
			return fault.New(fault.AlreadyExists, "org %s has an image called %s", i.Org, name)
		}
	}
	names.Put(tx, &i.ID, string(i.Org), name)
	return nil
}

// releaseName deletes the entry that claimName wrote for the name of an image, unless another image got the name since.
func releaseName(tx *store.Tx, i *cloud.Image) error {
	holder, err := names.Get(tx, string(i.Org), i.Name)
	if err == nil && holder != nil && *holder == i.ID {
		names.Delete(tx, string(i.Org), i.Name)
	}
	return err
}

// named returns the ID of the image with a name among those that the org may see. An image of the org takes precedence
// over those of other orgs, and then an image in another status than ERROR over those in ERROR. If several remain, named
// returns FailedPrecondition. It returns NotFound if there is none, and InvalidArgument if no image can have the name.
func (s *Service) named(ctx context.Context, org cloud.OrgID, name string) (string, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return "", err
	}
	var own, others []*cloud.Image
	err := s.opts.Store.View(ctx, func(v *store.View) error {
		own, others = nil, nil
		all, _, err := Images.List(v, 0)
		for _, r := range all {
			switch i := r.Value; {
			case i.Name != name || !i.VisibleTo(org):
			case i.Org == org:
				own = append(own, i)
			default:
				others = append(others, i)
			}
		}
		return err
	})
	if err != nil {
		return "", err
	}
	failed := func(i *cloud.Image) bool { return i.Status == cloud.ImageError }
	usable := func(all []*cloud.Image) []*cloud.Image { return slices.DeleteFunc(slices.Clone(all), failed) }
	var found []*cloud.Image
	for _, found = range [][]*cloud.Image{usable(own), usable(others), own, others} {
		if len(found) > 0 {
			break
		}
	}
	switch len(found) {
	case 0:
		return "", fault.New(fault.NotFound, "no image has the name %s", name)
	case 1:
		return string(found[0].ID), nil
	}
	ids := make([]string, len(found))
	for n, i := range found {
		ids[n] = string(i.ID)
	}
	return "", fault.New(fault.FailedPrecondition, "several images have the name %s: %s", name, strings.Join(ids, ", "))
}
