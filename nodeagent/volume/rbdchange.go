package volume

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Create makes a volume, unless the pool has it already. It only checks the image of a registered volume (see adopt).
// If the existing volume is larger than v, Create returns nil, because the volume may have grown. Several hosts may
// call Create for the same volume. The error wraps [ErrRefused] if the volume cannot be made or was deleted (see
// deletions), and [ErrNoKey] if the volume is encrypted and v has no key.
func (p *RBDPool) Create(ctx context.Context, v Volume) error {
	if err := p.change(ctx, func() error { return p.create(ctx, v) }); err != nil {
		return fmt.Errorf("make volume %s: %w", v.ID, err)
	}
	return nil
}

func (p *RBDPool) create(ctx context.Context, v Volume) error {
	if v.Size == 0 || v.Size%512 != 0 || v.Size > qcow2.MaxVirtualSize {
		return fmt.Errorf("%w: the volume has %d bytes", ErrRefused, v.Size)
	}
	if p.registered != "" {
		return p.adopt(ctx, v)
	}
	header, err := p.headerOf(ctx, v)
	if err != nil {
		return err
	}
	r, text, err := p.read(ctx, v.ID)
	switch {
	case errors.Is(err, ErrNotFound):
		r = record{State: creating, Size: v.Size, Image: v.Image, Format: v.format(), Source: v.Source, Encrypted: v.Encrypted,
			Header: header}
		if err := p.checkDeleted(ctx, v.ID); err != nil {
			return err
		}
		if err := p.checkAbsent(ctx, v.ID); err != nil {
			return err
		}
	case err != nil:
		return err
	case r.State == ready:
		if err := r.matches(v); err != nil {
			return err
		}
		_, err := p.image(ctx, v.ID)
		return err
	}
	if err := r.matches(v); err != nil {
		return err
	}
	if v.Image != nil && !v.Encrypted {
		if err := p.ensureBase(ctx, *v.Image, v.Size); err != nil {
			return err
		}
	}
	if len(text) == 0 {
		text, err = p.claim(ctx, v.ID, r)
	} else {
		text, err = p.write(ctx, v.ID, text, r)
	}
	if err != nil {
		return err
	}
	if err := p.makeImage(ctx, v, r.Header+v.Size); err != nil {
		return err
	}
	r.State = ready
	if r.Image != nil && r.Encrypted {
		r.Image, r.Flattened = nil, true
	}
	_, err = p.write(ctx, v.ID, text, r)
	return err
}

// checkAbsent returns an error if the pool has an RBD image with the name of the volume id. The caller has found no
// record of the volume.
func (p *RBDPool) checkAbsent(ctx context.Context, id string) error {
	_, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: p.name(volumeImage(id))})
	switch {
	case err == nil:
		return fmt.Errorf("%w: the Ceph pool has an image with the name of the volume, and no record of it", ErrRefused)
	case isCode(err, codes.NotFound):
		return nil // The code is the same if the Ceph pool is missing; the next call reports that.
	}
	return rbdError(err)
}

// makeImage makes the RBD image of a volume with size bytes: a clone of the base image or of a snapshot, an encrypted
// image, or an empty one.
func (p *RBDPool) makeImage(ctx context.Context, v Volume, size uint64) error {
	name := p.name(volumeImage(v.ID))
	var parent *rbdv1.SnapshotName
	switch {
	case v.Source != nil:
		var err error
		if parent, err = p.source(ctx, *v.Source); err != nil {
			return err
		}
	case v.Encrypted:
		if err := p.makeEncrypted(ctx, v); err != nil {
			return err
		}
	case v.Image != nil:
		parent = p.base(*v.Image)
	default:
		_, err := p.o.Client.CreateImage(ctx, &rbdv1.CreateImageRequest{Name: name, Size: size})
		return rbdError(err)
	}
	if parent != nil {
		if _, err := p.o.Client.CloneImage(ctx, &rbdv1.CloneImageRequest{Parent: parent, Name: name}); err != nil {
			return rbdError(err)
		}
	}
	_, err := p.o.Client.ResizeImage(ctx, &rbdv1.ResizeImageRequest{Name: name, Size: size})
	return rbdError(err)
}

// Resize grows a volume to size bytes. The error wraps [ErrRefused] if the volume is larger already. If QEMU has the
// volume open, the guest sees the new size only after QEMU's block_resize.
func (p *RBDPool) Resize(ctx context.Context, id string, size uint64) error {
	if err := p.change(ctx, func() error { return p.resize(ctx, id, size) }); err != nil {
		return fmt.Errorf("resize volume %s: %w", id, err)
	}
	return nil
}

func (p *RBDPool) resize(ctx context.Context, id string, size uint64) error {
	if size%512 != 0 || size > qcow2.MaxVirtualSize {
		return fmt.Errorf("%w: a size of %d bytes", ErrRefused, size)
	}
	r, text, err := p.read(ctx, id)
	switch {
	case err != nil:
		return err
	case r.State != ready:
		return ErrNotFound
	case r.Size > size:
		return fmt.Errorf("%w: the volume has %d bytes and cannot shrink", ErrRefused, r.Size)
	}
	have, err := p.image(ctx, id)
	if err != nil {
		return err
	}
	if have.GetSize() < r.Header+size { // QEMU may have grown the image already
		request := &rbdv1.ResizeImageRequest{Name: p.name(p.imageOf(id)), Size: r.Header + size}
		if _, err := p.o.Client.ResizeImage(ctx, request); err != nil {
			return rbdError(err)
		}
	}
	r.Size = size
	_, err = p.write(ctx, id, text, r)
	return err
}

// Flatten makes a volume independent of its image, or of the snapshot that it was made from: the Ceph cluster copies
// the content that the volume shares with the base image or the snapshot into the volume. A VM may use the volume while
// Flatten runs. Flatten ignores the parameter progress, because the Ceph cluster does not report progress. A volume
// that shares no content is no error.
func (p *RBDPool) Flatten(ctx context.Context, id string, _ func(percent uint32)) error {
	if err := p.flatten(ctx, id); err != nil {
		return fmt.Errorf("flatten volume %s: %w", id, err)
	}
	return nil
}

func (p *RBDPool) flatten(ctx context.Context, id string) error {
	r, _, err := p.read(ctx, id)
	switch {
	case err != nil:
		return err
	case r.State != ready:
		return ErrNotFound
	case r.Image == nil && r.Source == nil:
		return nil
	}
	request := &rbdv1.FlattenImageRequest{Name: p.name(volumeImage(id))}
	if _, err := p.o.Client.FlattenImage(ctx, request); err != nil {
		return rbdError(err)
	}
	return p.change(ctx, func() error { // The record may have changed while the image was flattened.
		r, text, err := p.read(ctx, id)
		if err != nil {
			return err
		}
		if r.Source == nil {
			r.Image, r.Flattened = nil, true
		}
		r.Source = nil
		_, err = p.write(ctx, id, text, r)
		return err
	})
}

// Delete removes a volume and its content. It returns nil if the volume does not exist. Several hosts may call Delete
// for the same volume. After Delete has recorded the deletion, no host can make the volume again. The error wraps
// [ErrInUse] if a client has the volume's image open. The image of a registered volume is kept, and only its record is
// removed (see abandon).
func (p *RBDPool) Delete(ctx context.Context, id string) error {
	// The deletion is recorded first, even if the volume has no record, because another host may be about to make the
	// volume.
	if err := p.recordDeletion(ctx, id); err != nil {
		return fmt.Errorf("delete volume %s: %w", id, err)
	}
	return p.changeRecord(ctx, "delete", id, func(r record, text []byte) error { return p.delete(ctx, id, r, text) })
}

func (p *RBDPool) delete(ctx context.Context, id string, r record, text []byte) error {
	if p.registered != "" && !mutant.On(mutant.DeleteRegistered) {
		return p.abandon(ctx, id, r, text)
	}
	if r.State == ready {
		// ErrRefused means that the image is missing.
		if _, err := p.closed(ctx, id, nil); err != nil && !errors.Is(err, ErrRefused) {
			return err
		}
	}
	r.State = deleting
	text, err := p.write(ctx, id, text, r)
	if err != nil {
		return err
	}
	if err := p.removeSnapshots(ctx, id, snapshots); err != nil {
		return err
	}
	if r.Encrypted {
		if err := p.removeImports(ctx, id); err != nil {
			return err
		}
	}
	if _, err := p.o.Client.RemoveImage(ctx, &rbdv1.RemoveImageRequest{Name: p.name(p.imageOf(id))}); err != nil {
		return rbdError(err)
	}
	_, err = p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: p.name(p.imageOf(id)), Before: text})
	return rbdError(err)
}
