package volume

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// A registered volume is an RBD image that existed before the volume. Its record is that of the image name, and contains
// the ID of the volume. Create makes the record after it has checked the image, and Delete removes only the record.
// Two volumes, also of two Trivet clouds, therefore never use one image.

// ErrForeignClient means that a client of the Ceph cluster has a registered RBD image open, which is most likely a
// program that is not Trivet's. It wraps ErrInUse. A repeat does not help before the client has closed the image.
var ErrForeignClient = fmt.Errorf("%w: clients of the Ceph cluster have the registered RBD image open", ErrInUse)

// Registered returns the pool for a registered volume with the given image. Call the methods of the result only with the
// ID of this volume. If image is empty, Registered returns p.
func (p *RBDPool) Registered(image string) *RBDPool {
	if image == "" {
		return p
	}
	q := *p
	q.registered = image
	return &q
}

// imageOf returns the name of the RBD image of the volume id.
func (p *RBDPool) imageOf(id string) string {
	if p.registered != "" {
		return p.registered
	}
	return volumeImage(id)
}

// otherVolumeError means that a registered RBD image belongs to another volume than the requested one. It wraps
// ErrNotFound: nothing of the requested volume exists in the pool.
type otherVolumeError struct{ image, volume string }

func (e *otherVolumeError) Error() string {
	if e.volume == "" {
		return fmt.Sprintf("RBD image %s belongs to another volume", e.image)
	}
	return fmt.Sprintf("RBD image %s is registered as volume %s, possibly by another Trivet cloud", e.image, e.volume)
}

func (e *otherVolumeError) Unwrap() error { return ErrNotFound }

// checkOwner returns an otherVolumeError if r, the record of the image of the volume id, is the record of another
// volume.
func (p *RBDPool) checkOwner(id string, r record) error {
	want := ""
	if p.registered != "" {
		want = id
	}
	if r.Volume != want {
		return &otherVolumeError{p.imageOf(id), r.Volume}
	}
	return nil
}

// adopt makes the record of a registered volume. It changes nothing else. It returns an error if the image does not
// exist, belongs to another volume, has another size than v or no exclusive-lock, or if a client has the image open.
// ErrInUse is not in the error, because the client is none of this host.
func (p *RBDPool) adopt(ctx context.Context, v Volume) error {
	r, text, err := p.read(ctx, v.ID)
	var other *otherVolumeError
	switch {
	case err == nil:
		return r.matches(v)
	case errors.As(err, &other):
		if !mutant.On(mutant.AdoptTwice) {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
	case !errors.Is(err, ErrNotFound):
		return err
	}
	i, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: p.name(p.registered)})
	switch {
	case isCode(err, codes.NotFound) && !strings.Contains(err.Error(), "open pool"):
		return fmt.Errorf("%w: the Ceph pool %s has no RBD image %s", ErrRefused, p.o.Pool, p.registered)
	case err != nil:
		return rbdError(err)
	case i.GetSize() != v.Size:
		return fmt.Errorf("%w: RBD image %s has %d bytes, and the volume %d bytes: register the image with its size, which must be a multiple of 1 GiB",
			ErrRefused, p.registered, i.GetSize(), v.Size)
	case !i.GetExclusiveLock():
		return fmt.Errorf("%w: RBD image %s lacks the feature exclusive-lock: `rbd feature enable` adds it", ErrRefused, p.registered)
	case len(i.GetClients()) > 0 && !mutant.On(mutant.AdoptOpenImage):
		return fmt.Errorf("clients of the Ceph cluster have RBD image %s open (%s): end them first", p.registered, strings.Join(i.GetClients(), ", "))
	}
	made := record{State: ready, Size: v.Size, Format: qcow2.Raw, Volume: v.ID}
	if len(text) == 0 {
		_, err = p.claim(ctx, v.ID, made)
	} else { // only with the mutant AdoptTwice
		_, err = p.write(ctx, v.ID, text, made)
	}
	return err
}

// abandon removes the record of a registered volume, and keeps the image. If the last attachment is not flushed, the
// error wraps ErrInUse while a client has the image open. The Ceph cluster then refuses all requests of the clients in
// the record, because a client that has lost its connection is not listed, and could write later.
func (p *RBDPool) abandon(ctx context.Context, id string, r record, text []byte) error {
	if r.Flushed < r.Attachment.Generation {
		// ErrRefused means that the image is missing.
		if _, err := p.closed(ctx, id, nil); err != nil && !errors.Is(err, ErrRefused) {
			return err
		}
		if len(r.Clients) > 0 {
			request := &rbdv1.BlockClientsRequest{Clients: r.Clients, Seconds: fenceSeconds}
			if _, err := p.o.Client.BlockClients(ctx, request); err != nil {
				return rbdError(err)
			}
		}
	}
	_, err := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: p.name(p.imageOf(id)), Before: text})
	return rbdError(err)
}

// errOpen returns an error that names the clients that have the image of a volume open. It wraps ErrInUse, and for a
// registered volume ErrForeignClient.
func (p *RBDPool) errOpen(clients []string) error {
	all := strings.Join(clients, ", ")
	if p.registered == "" {
		return fmt.Errorf("%w (%s)", ErrInUse, all)
	}
	return fmt.Errorf("%w: %s (%s)", ErrForeignClient, p.registered, all)
}
