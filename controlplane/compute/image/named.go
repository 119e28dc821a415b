package image

import (
	"context"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// named returns the ID of the image with a name among those that the org may see. An image of the org takes precedence
// over those of other orgs. If several remain, named returns FailedPrecondition. It returns NotFound if there is none, and
// InvalidArgument if no image can have the name.
func (s *Service) named(ctx context.Context, org cloud.OrgID, name string) (string, error) {
	if err := cloud.CheckName("name", name); err != nil {
		return "", err
	}
	var own, others []string
	err := s.opts.Store.View(ctx, func(v *store.View) error {
		own, others = nil, nil
		all, _, err := Images.List(v, 0)
		for _, r := range all {
			switch i := r.Value; {
			case i.Name != name || !i.VisibleTo(org):
			case i.Org == org:
				own = append(own, string(i.ID))
			default:
				others = append(others, string(i.ID))
			}
		}
		return err
	})
	if err != nil {
		return "", err
	}
	if len(own) > 0 {
		others = nil
	}
	switch found := append(own, others...); len(found) {
	case 0:
		return "", fault.New(fault.NotFound, "no image has the name %s", name)
	case 1:
		return found[0], nil
	default:
		return "", fault.New(fault.FailedPrecondition, "several images have the name %s: %s", name, strings.Join(found, ", "))
	}
}
