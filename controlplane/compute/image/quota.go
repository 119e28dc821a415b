package image

import (
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// amountOf returns the part of its project's quota that an image uses.
func amountOf(i *cloud.Image) tenant.Amount { return tenant.Amount{Images: 1, ImageMiB: i.CountedMiB} }

// chargeQuota counts a new image in the quotas of its project and its org. It returns ResourceExhausted if the image
// would exceed one of them. The image has no bytes yet: countBytes counts them when they are stored.
func chargeQuota(tx *store.Tx, i *cloud.Image) error {
	return takeQuota(tx, i, amountOf(i), tenant.Amount{})
}

// takeQuota adds the parameter more to the usage of the image's project and subtracts the parameter less.
func takeQuota(tx *store.Tx, i *cloud.Image, more, less tenant.Amount) error {
	if i.Project == "" {
		return nil
	}
	return tenant.Take(tx, cloud.Tenant{Org: i.Org, Project: i.Project}, tenant.Pictures, more, less, func(p cloud.ProjectID) (sum tenant.Amount, err error) {
		all, _, err := Images.List(tx, 0)
		for _, r := range all {
			if r.Value.Project == p {
				sum = sum.Plus(amountOf(r.Value))
			}
		}
		return sum, err
	})
}

// countBytes sets the amount of bytes, in MiB, that the image counts in the quotas. The caller stores the image. It
// returns ResourceExhausted and changes nothing if the image would exceed a quota.
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

// countStored counts the bytes that the members store of an image, after a change of its status. The parameter before is
// the status before the change. An image whose size has become known counts this size, and an image in the status ERROR
// counts nothing. A new image that exceeds a quota becomes ERROR with this reason; an image that was stored before never
// does, whatever the quota is. While an upload is open, recordPartOnLeader counts the parts.
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
