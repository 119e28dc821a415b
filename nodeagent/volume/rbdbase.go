package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// baseSnapshot is the name of the protected snapshot of each base image, from which volumes are cloned. The snapshot is
// made after the base image is complete.
const baseSnapshot = "base"

// importWithin is the maximum time to import a base image.
const importWithin = 8 * time.Minute

// base returns the name of the RBD snapshot from which volumes with the image i are cloned. The snapshot's RBD image is
// called a base image.
func (p *RBDPool) base(i disk.Image) *rbdv1.SnapshotName {
	return &rbdv1.SnapshotName{Image: p.name("image-" + i.SHA256), Snapshot: baseSnapshot}
}

// ensureBase imports an image into the Ceph pool, unless the pool has it. It returns an error that wraps ErrRefused if
// a volume of size bytes is smaller than the image.
func (p *RBDPool) ensureBase(ctx context.Context, i disk.Image, size uint64) error {
	snapshot := p.base(i)
	have, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: snapshot.Image})
	if isCode(err, codes.NotFound) {
		err = p.withLease(ctx, snapshot.Image, func(ctx context.Context) error { return p.importBase(ctx, i, snapshot.Image) })
		if err != nil {
			return err
		}
		have, err = p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: snapshot.Image})
	}
	if err != nil {
		return rbdError(err)
	}
	if have.GetSize() > size {
		return errTooSmall(have.GetSize(), size)
	}
	for _, s := range have.GetSnapshots() {
		if s.GetName() == baseSnapshot && s.GetProtected() {
			return nil
		}
	}
	_, err = p.o.Client.CreateSnapshot(ctx, &rbdv1.CreateSnapshotRequest{Name: snapshot, Protect: true})
	return rbdError(err)
}

// importBase copies the content of an image to a new RBD image. The RBD image gets its name only when the content is
// complete. If another host has made the RBD image in the meantime, importBase returns nil.
func (p *RBDPool) importBase(ctx context.Context, i disk.Image, name *rbdv1.ImageName) error {
	ctx, cancel := context.WithTimeout(ctx, importWithin)
	defer cancel()
	if err := p.o.Images.Ensure(ctx, i); err != nil {
		return err
	}
	f, err := p.o.Images.Open(i)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := virtualSize(f, i)
	if err != nil {
		return err
	}
	content := io.Reader(f)
	if i.Format == qcow2.QCOW2 {
		r, err := qcow2.NewReader(f, i.Size)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		content = io.NewSectionReader(r, 0, int64(r.Size()))
	}
	err = rbd.Import(ctx, p.o.Client, name, size, content)
	if isCode(err, codes.AlreadyExists) {
		return nil
	}
	return rbdError(err)
}

// virtualSize returns the number of bytes that a guest sees of an image, rounded up to a multiple of 512. The parameter
// f is the file of the image.
func virtualSize(f *os.File, i disk.Image) (uint64, error) {
	size := uint64(i.Size)
	if i.Format == qcow2.QCOW2 {
		r, err := qcow2.NewReader(f, i.Size)
		if err != nil {
			return 0, fmt.Errorf("%w: %w", ErrRefused, err)
		}
		size = r.Size()
	}
	return (size + 511) / 512 * 512, nil
}

// errTooSmall returns the error for a volume of size bytes whose image has more.
func errTooSmall(image, size uint64) error {
	return fmt.Errorf("%w: the image has %d bytes, which do not fit in %d", ErrRefused, image, size)
}

// lease is the content of a base image's record while a host imports the image. The lease prevents a second concurrent
// import, because two concurrent imports would delete each other's temporary image.
type lease struct {
	Holder string    `json:"holder"` // a random id of the import
	Until  time.Time `json:"until"`  // by the clock of the holder's host
}

const (
	leaseTime  = time.Minute
	leaseRenew = 10 * time.Second
)

// ErrImporting means that another host, or another call, is importing the same image into the Ceph pool. The caller
// should try again later.
var ErrImporting = errors.New("another import of the image is in progress")

// withLease acquires the lease of a base image, calls f, and removes the lease. It renews the lease while f runs, and
// cancels the context of f if a renewal fails. It returns ErrImporting if another import has the lease.
func (p *RBDPool) withLease(ctx context.Context, image *rbdv1.ImageName, f func(context.Context) error) error {
	out, err := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: image})
	if err != nil {
		return rbdError(err)
	}
	var other lease
	if json.Unmarshal(out.GetData(), &other) == nil && time.Now().Before(other.Until) {
		return ErrImporting
	}
	record, holder := out.GetData(), uuid.NewString()
	renew := func(ctx context.Context) error {
		text, err := json.Marshal(lease{holder, time.Now().Add(leaseTime)})
		if err != nil {
			return err
		}
		text = append(text, '\n')
		if _, err := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: image, Before: record, After: text}); err != nil {
			return rbdError(err)
		}
		record = text
		return nil
	}
	if err := renew(ctx); err != nil {
		return err
	}
	inner, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sleep(inner, leaseRenew) == nil {
			if err := renew(inner); err != nil {
				cancel(err)
			}
		}
	}()
	err = f(inner)
	cancel(nil)
	<-done
	// An error is ignored: a lease that is not removed expires after leaseTime.
	_, _ = p.o.Client.SetRecord(context.WithoutCancel(ctx), &rbdv1.SetRecordRequest{Name: image, Before: record})
	return err
}
