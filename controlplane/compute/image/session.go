package image

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// UploadRef names an upload session and its image in a call of an org.
type UploadRef struct {
	Org     cloud.OrgID
	Image   cloud.ImageID
	Session string
}

func (u UploadRef) check() error {
	if err := cloud.CheckUUID("image_id", string(u.Image)); err != nil {
		return err
	}
	if u.Session == "" {
		return fault.Invalid("upload_session_id", "is required")
	}
	return nil
}

// find returns the image of an upload session. It returns NotFound if org has no such image or the image has no such
// session.
func (u UploadRef) find(r store.Reader) (*cloud.Image, error) {
	i, err := Images.Get(r, string(u.Image))
	if err != nil {
		return nil, err
	}
	if i == nil || i.Org != u.Org {
		return nil, noImage(u.Image)
	}
	if i.Upload == nil || i.Upload.ID != u.Session {
		return nil, fault.New(fault.NotFound, "image %s has no upload session %s", u.Image, truncate(u.Session))
	}
	return i, nil
}

func truncate(text string) string { return text[:min(len(text), 64)] }

// findOpen is like find, for calls that need a session that still accepts parts. It returns FailedPrecondition if the
// session has ended.
func (u UploadRef) findOpen(r store.Reader, now cloud.Time) (*cloud.Image, error) {
	i, err := u.find(r)
	if err != nil {
		return nil, err
	}
	switch {
	case i.Upload.CompletedAt != 0:
		return nil, fault.New(fault.FailedPrecondition, "the upload of image %s is complete", u.Image)
	case !i.Uploading(), now >= i.Upload.ExpiresAt:
		return nil, fault.New(fault.FailedPrecondition, "the upload of image %s has expired: delete the image and begin again", u.Image)
	}
	return i, nil
}

// findUpload returns the complete reference of an upload session. Either the image or the session in u is set, and
// findUpload finds the other one. It returns NotFound if org has no such image or session.
func (s *Service) findUpload(ctx context.Context, u UploadRef) (UploadRef, error) {
	if u.Image != "" {
		if err := cloud.CheckUUID("image_id", string(u.Image)); err != nil {
			return u, err
		}
	}
	err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		if u.Image == "" {
			u.Image, err = u.findImage(v)
			return err
		}
		i, err := Images.Get(v, string(u.Image))
		if err != nil {
			return err
		}
		if i == nil || i.Org != u.Org {
			return noImage(u.Image)
		}
		if i.Upload == nil {
			return fault.New(fault.NotFound, "image %s has no upload session", u.Image)
		}
		u.Session = i.Upload.ID
		return nil
	})
	return u, err
}

// findImage returns the ID of the image with the upload session. It returns NotFound if the org has no such image.
func (u UploadRef) findImage(r store.Reader) (cloud.ImageID, error) {
	all, _, err := Images.List(r, 0)
	if err != nil {
		return "", err
	}
	for _, r := range all {
		if i := r.Value; i.Org == u.Org && i.Upload != nil && i.Upload.ID == u.Session {
			return i.ID, nil
		}
	}
	return "", fault.New(fault.NotFound, "no upload session %s", truncate(u.Session))
}
