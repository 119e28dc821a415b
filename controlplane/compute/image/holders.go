package image

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

type importResult struct {
	ID      cloud.ImageID
	Member  uint64
	SHA256  string
	Size    uint64
	Virtual uint64
	Format  cloud.ImageFormat
	// Source is the SHA-256 of the source if the importer has converted it, else "".
	Source string
	// Failure is the reason why the import failed, or "" if it succeeded.
	Failure string
}

var finishImportCommand = leader.NewCommand("image.imported", leader.Repeatable, (*Service).finishImportOnLeader)

// finishImportOnLeader stores the result of an import in the image's record. It ignores results for images that are no
// longer PENDING, and results from members other than the importer.
//
// The successful import of an upload is an exception: its first result is stored even if another member than the
// importer has sent it. Such results occur when CompleteUpload is called again on another member, which then becomes
// the importer while the former importer still copies. All results are the same, because the parts of a completed
// upload do not change.
func (s *Service) finishImportOnLeader(ctx context.Context, q importResult) (struct{}, error) {
	return struct{}{}, s.rewrite(ctx, q.ID, func(i *cloud.Image) bool {
		switch {
		case i.Status != cloud.ImagePending, i.Importer != q.Member && (i.Upload == nil || q.Failure != ""):
			return false
		case q.Failure != "":
			setFailed(i, q.Failure)
		default:
			i.SHA256, i.SizeBytes, i.VirtualSize, i.Format = q.SHA256, q.Size, q.Virtual, q.Format
			if q.Source != "" {
				i.Metadata = cloud.Merge(i.Metadata, map[string]string{cloud.SourceSHA256: q.Source})
			}
			i.Status, i.Importer = cloud.ImageUploading, q.Member
			s.addHolder(i, q.Member)
		}
		return true
	})
}

// setFailed sets an image to ERROR with the reason why. It removes the checksum and the holders, so that the members
// delete the bytes.
func setFailed(i *cloud.Image, why string) {
	i.Status, i.SHA256, i.Holders = cloud.ImageError, "", nil
	i.Metadata = cloud.Merge(i.Metadata, map[string]string{cloud.ImageReason: why})
}

type holderRequest struct {
	ID     cloud.ImageID
	Member uint64
	SHA256 string
}

var addHolderCommand = leader.NewCommand("image.held", leader.Repeatable, (*Service).addHolderOnLeader)

// addHolderOnLeader adds a member to the holders of an image, the members that have its verified bytes.
func (s *Service) addHolderOnLeader(ctx context.Context, q holderRequest) (struct{}, error) {
	return struct{}{}, s.rewrite(ctx, q.ID, func(i *cloud.Image) bool {
		if i.SHA256 != q.SHA256 || slices.Contains(i.Holders, q.Member) {
			return false
		}
		s.addHolder(i, q.Member)
		return true
	})
}

var removeHolderCommand = leader.NewCommand("image.lost", leader.Repeatable, (*Service).removeHolderOnLeader)

// removeHolderOnLeader removes a member from the holders of an image, because the member has lost the bytes. If no
// holder is left, the image becomes ERROR.
func (s *Service) removeHolderOnLeader(ctx context.Context, q holderRequest) (struct{}, error) {
	return struct{}{}, s.rewrite(ctx, q.ID, func(i *cloud.Image) bool {
		if i.SHA256 != q.SHA256 || !slices.Contains(i.Holders, q.Member) {
			return false
		}
		i.Holders = slices.DeleteFunc(slices.Clone(i.Holders), func(m uint64) bool { return m == q.Member })
		if len(i.Holders) == 0 {
			setFailed(i, "its bytes were lost on member "+itoa(q.Member)+", and no other member holds them")
		}
		return true
	})
}

// rewrite calls change with the record of the image with this ID. If change returns true, rewrite stores the record and
// updates the usage of the quotas to the image's new size. It does nothing if there is no record.
func (s *Service) rewrite(ctx context.Context, id cloud.ImageID, change func(*cloud.Image) bool) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		i, err := Images.Get(tx, string(id))
		if err != nil || i == nil {
			return err
		}
		before := i.Status
		if !change(i) {
			return nil
		}
		if err := countStored(tx, i, before); err != nil {
			return err
		}
		i.UpdatedAt = tx.Now()
		Images.Put(tx, i, string(id))
		return nil
	})
	return err
}

// addHolder adds a member to the holders of an image. An UPLOADING image becomes AVAILABLE if a majority of the present
// members holds it. Holders that are no longer members do not count.
func (s *Service) addHolder(i *cloud.Image, member uint64) {
	i.Holders = append(slices.Clone(i.Holders), member)
	members, count := s.opts.Members(), 0
	for _, m := range members {
		if slices.Contains(i.Holders, m) {
			count++
		}
	}
	if i.Status == cloud.ImageUploading && (count > len(members)/2 || mutant.On(mutant.AvailableEarly)) {
		i.Status = cloud.ImageAvailable
	}
}

// SettleEvery is the interval at which package leader calls Settle on the leader.
const SettleEvery = 30 * time.Second

// Settle applies the time limits of imports and uploads. It sets images to ERROR that have been PENDING for more than
// importTime since their creation, or since their upload was completed, and those that have been UPLOADING for more
// than importTime since their last change. It ends expired upload sessions and deletes the records of parts that are no
// longer needed. If the importer of a completed upload has not joined the parts within takeOverTime, the leader becomes
// the importer. It runs only on the leader.
func (s *Service) Settle(ctx context.Context) error {
	now := s.opts.Store.Now()
	var late []cloud.ImageID
	err := s.opts.Store.Local(func(v *store.View) error {
		all, _, err := Images.List(v, 0)
		for _, r := range all {
			if s.settle(r.Value, now) {
				late = append(late, r.Value.ID)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, id := range late {
		if err := s.rewrite(ctx, id, func(i *cloud.Image) bool { return s.settle(i, now) }); err != nil {
			return err
		}
	}
	return s.deleteOldParts(ctx)
}

// settle changes an image as Settle describes. It returns false if the image needs no change.
func (s *Service) settle(i *cloud.Image, now cloud.Time) bool {
	if why := timeoutReason(i, now); why != "" {
		setFailed(i, why)
		return true
	}
	if i.Status == cloud.ImagePending && i.Upload != nil && i.Upload.CompletedAt != 0 && i.Importer != s.opts.Self &&
		now-i.Upload.CompletedAt > takeOverTime.Milliseconds() {
		i.Importer = s.opts.Self
		return true
	}
	return false
}

// timeoutReason returns a text for the owner of the image if its import or upload took too long (see Settle), and ""
// otherwise.
func timeoutReason(i *cloud.Image, now cloud.Time) string {
	began := i.CreatedAt
	if i.Upload != nil {
		began = i.Upload.CompletedAt
	}
	switch {
	case i.Uploading():
		if now >= i.Upload.ExpiresAt && !mutant.On(mutant.KeepExpiredUpload) {
			return fmt.Sprintf("the upload was not completed within %d hours", int(uploadTime.Hours()))
		}
	case i.Status == cloud.ImagePending && now-began > importTime.Milliseconds():
		return "member " + itoa(i.Importer) + " did not finish the import"
	case i.Status == cloud.ImageUploading && now-i.UpdatedAt > importTime.Milliseconds():
		return "member " + itoa(i.Importer) + " imported it, but a majority of the members did not get its bytes"
	}
	return ""
}
