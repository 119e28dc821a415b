package image

import (
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// amountOf returns the amount with which an image counts in the quotas of its project and org.
func amountOf(i *cloud.Image) tenant.Amount { return tenant.Amount{Images: 1, ImageMiB: i.CountedMiB} }

// chargeQuota counts a new image in the quotas of its project and its org. It returns ResourceExhausted if the image
// would exceed one of them. A new image has no bytes yet. countBytes counts its bytes when they are stored.
func chargeQuota(tx *store.Tx, i *cloud.Image) error {
	return takeQuota(tx, i, amountOf(i), tenant.Amount{})
}

// takeQuota adds more to the usage of the image's project and subtracts less from it. It returns ResourceExhausted if
// the usage would exceed a quota. It does nothing for an image without a project.
func takeQuota(tx *store.Tx, i *cloud.Image, more, less tenant.Amount) error {
	if i.Project == "" {
		return nil
	}
	return tenant.Take(tx, cloud.Tenant{Org: i.Org, Project: i.Project}, tenant.Images, more, less, func(p cloud.ProjectID) (sum tenant.Amount, err error) {
		all, _, err := Images.List(tx, 0)
		for _, r := range all {
			if r.Value.Project == p {
				sum = sum.Plus(amountOf(r.Value))
			}
		}
		return sum, err
	})
}

// countBytes changes the size with which the image counts in the quotas to mib MiB. The caller must store the image.
// countBytes returns ResourceExhausted and changes nothing if the usage would exceed a quota.
func countBytes(tx *store.Tx, i *cloud.Image, mib uint64) error {
	if mib == i.CountedMiB || i.Project == "" {
		return nil
	}
	if err := takeQuota(tx, i, tenant.Amount{ImageMiB: mib}, tenant.Amount{ImageMiB: i.CountedMiB}); err != nil {
		return err
	}
	i.CountedMiB = mib
	return nil
}

// mibOf converts a number of bytes to MiB, rounded up.
func mibOf(bytes uint64) uint64 { return (bytes + 1<<20 - 1) >> 20 }

// countStored updates the size with which an image counts in the quotas, after a change of the image's status. before
// is the status before the change.
//
//   - An image that becomes ERROR counts with size 0.
//   - An image that is no longer PENDING counts with its final size from then on. If this size exceeds a quota, the
//     image becomes ERROR, with the error of the quota as the reason.
//   - In all other cases the counted size stays the same. So a lower quota never affects images that are already
//     stored. While an upload is open, recordPartOnLeader counts its parts.
func countStored(tx *store.Tx, i *cloud.Image, before cloud.ImageStatus) error {
	switch {
	case i.Status == cloud.ImageError:
		return countBytes(tx, i, 0)
	case before != cloud.ImagePending || i.Status == cloud.ImagePending:
		return nil
	}
	err := countBytes(tx, i, mibOf(i.SizeBytes))
	if f, ok := fault.From(err); ok && fault.Is(err, fault.ResourceExhausted) {
		setFailed(i, f.Message)
		return countBytes(tx, i, 0)
	}
	return err
}
