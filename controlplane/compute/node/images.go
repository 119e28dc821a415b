package node

import (
	"context"
	"io"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// openImage opens the image with the checksum sha256 for a host. It returns errNoImage if no VM and no volume of the
// host uses the image, and also if this member does not have the image. Because the error is the same, a host cannot
// find out which images exist.
func (s *Service) openImage(ctx context.Context, id cloud.NodeID, sha256 string) (io.ReadSeekCloser, error) {
	if err := s.throttle(ctx, s.budgetOf(id).images, 1); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	uses := false
	err := s.opts.Store.View(limited, func(v *store.View) (err error) {
		if uses, err = s.vms.UsesImage(v, id, sha256); err != nil || uses {
			return err
		}
		uses, err = s.volumes.VolumesUseImage(v, id, sha256)
		return err
	})
	if err != nil {
		return nil, err
	}
	if !uses {
		return nil, errNoImage()
	}
	f, err := s.images.Open(sha256)
	if fault.Is(err, fault.NotFound) {
		return nil, errNoImage()
	}
	return f, err
}

func errNoImage() error {
	return fault.New(fault.NotFound, "this member has no such image for a VM of this host")
}

// maxImageReads is the maximum number of concurrent image reads of a host from one member.
const maxImageReads = 8

func (s *Service) beginReading(id cloud.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.imageReads[id] >= maxImageReads {
		return false
	}
	s.imageReads[id]++
	return true
}

func (s *Service) endReading(id cloud.NodeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.imageReads[id]--; s.imageReads[id] == 0 {
		delete(s.imageReads, id)
	}
}
