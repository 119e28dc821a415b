package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Files are the open files of a volume for QEMU, or its RBD image.
type Files struct {
	// RBD is the RBD image that QEMU opens. RBD is set for a volume of an RBDPool, which has no files, and nil for
	// other volumes.
	RBD     *RBDImage
	Content *os.File     // the volume's own file, open for reading and writing
	Format  qcow2.Format // of Content
	Base    *os.File     // the image, open for reading; nil without an image
	// BaseFormat is the format of Base.
	BaseFormat qcow2.Format
	// Size is the size in bytes that the guest must see. QEMU must grow a QCOW2 file to this size.
	Size uint64
	// Encrypted means that Content or the RBD image has LUKS encryption. Key is the passphrase. The caller of Open sets
	// Key, because the pool does not store keys.
	Encrypted bool
	Key       []byte
}

// Close closes the files. A process that inherited the files keeps its duplicates, which also keep the lock of the
// volume.
func (f Files) Close() {
	for _, one := range []*os.File{f.Content, f.Base} {
		if one != nil {
			_ = one.Close()
		}
	}
}

// closeTimeout is how long Open and Release wait for a process to close the volume. A process that is just ending, or a
// child of the agent between fork and execve, may have the file open for a moment.
const closeTimeout = 2 * time.Second

// Open opens a volume for a VM. Before Open returns, it writes the attachment to the record and syncs the record. The
// error wraps [ErrStale] if the volume was opened for a later attachment, and [ErrInUse] if a process has the volume
// open. The caller passes duplicates of the files to QEMU and closes the files.
func (p *Pool) Open(ctx context.Context, id string, a Attachment) (Files, error) {
	files, err := p.openVolume(ctx, id, a)
	if err != nil {
		return Files{}, fmt.Errorf("open volume %s: %w", id, plainSpace(err))
	}
	return files, nil
}

func (p *Pool) openVolume(ctx context.Context, id string, a Attachment) (files Files, err error) {
	if err := checkID(id); err != nil {
		return Files{}, err
	}
	r, err := p.read(id)
	if err != nil {
		return Files{}, err
	}
	if files.Base, files.BaseFormat, err = p.openBase(ctx, r); err != nil {
		return Files{}, err
	}
	err = p.change(ctx, func() error {
		r, err := p.read(id)
		if err != nil {
			return err
		}
		if r.State != ready {
			return ErrNotFound
		}
		if err := r.admit(a); err != nil {
			return err
		}
		if files.Content, err = p.waitLocked(ctx, r.fileName(id)); err != nil {
			return p.elsewhere(missing(err), r)
		}
		if err := p.leaveStandbyByte(files.Content); err != nil {
			return err
		}
		files.Format, files.Size, files.Encrypted = r.Format, r.Size, r.Encrypted
		flushed := min(r.Flushed, a.Generation-1)
		host := ""
		if p.o.Shared {
			host = p.o.Host
		}
		if r.Attachment == a && r.Flushed == flushed && r.Host == host {
			return nil
		}
		if r.Attachment != a {
			r.Activated = 0
		}
		r.Attachment, r.Flushed, r.Host = a, flushed, host
		return p.write(id, r)
	})
	if err != nil {
		files.Close()
		return Files{}, err
	}
	return files, nil
}

// openBase opens the image of a volume, and fetches it first if the host does not have it. It returns nil if the volume
// has no image. Fetching may take long, so the caller must not have locked the pool.
func (p *Pool) openBase(ctx context.Context, r record) (*os.File, qcow2.Format, error) {
	if r.Image == nil {
		return nil, "", nil
	}
	if err := p.o.Images.Ensure(ctx, *r.Image); err != nil {
		return nil, "", err
	}
	f, err := p.o.Images.Open(*r.Image)
	return f, r.Image.Format, err
}

// waitLocked is like openLocked, but waits up to closeTimeout for the process that has the file open.
func (p *Pool) waitLocked(ctx context.Context, name string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	for {
		f, err := p.openLocked(name)
		if !errors.Is(err, ErrInUse) {
			return f, err
		}
		if sleep(ctx, lockPause) != nil {
			return nil, err
		}
	}
}

// Release records that the content of a volume is complete and durable up to the generation of a. The error wraps
// [ErrInUse] if a process still has the volume open, and [ErrStale] if the volume was opened for a later attachment. A
// volume that does not exist is no error. A second call does nothing.
func (p *Pool) Release(ctx context.Context, id string, a Attachment) error {
	if err := p.release(ctx, id, a); err != nil {
		return fmt.Errorf("release volume %s: %w", id, plainSpace(err))
	}
	return nil
}

func (p *Pool) release(ctx context.Context, id string, a Attachment) error {
	if err := checkID(id); err != nil {
		return err
	}
	return p.change(ctx, func() error {
		r, err := p.read(id)
		switch {
		case errors.Is(err, ErrNotFound):
			return nil
		case err != nil:
			return err
		case r.State != ready:
			return nil
		}
		if r.Flushed >= a.Generation && a.Generation >= r.Attachment.Generation {
			return nil
		}
		if err := r.admit(a); err != nil {
			return err
		}
		if err := p.sync(ctx, r.fileName(id)); err != nil {
			return p.elsewhere(err, r)
		}
		r.Attachment, r.Flushed = a, a.Generation
		return p.write(id, r)
	})
}

// Detach ends the attachments up to a generation: no VM may open the volume for them any more. It records that the
// content is complete and durable, also if the volume was never opened. The errors are those of Release. A second call
// does nothing.
func (p *Pool) Detach(ctx context.Context, id string, generation uint64) error {
	if err := p.detach(ctx, id, generation); err != nil {
		return fmt.Errorf("detach volume %s: %w", id, plainSpace(err))
	}
	return nil
}

func (p *Pool) detach(ctx context.Context, id string, generation uint64) error {
	if err := checkID(id); err != nil {
		return err
	}
	return p.change(ctx, func() error {
		r, err := p.read(id)
		switch {
		case errors.Is(err, ErrNotFound):
			return nil
		case err != nil:
			return err
		case r.State != ready || r.Detached >= generation && r.Flushed >= generation:
			return nil
		case generation < r.Attachment.Generation:
			return fmt.Errorf("%w: generation %d is older than %d", ErrStale, generation, r.Attachment.Generation)
		}
		if err := p.sync(ctx, r.fileName(id)); err != nil {
			return p.elsewhere(err, r)
		}
		r.Detached, r.Flushed = max(r.Detached, generation), max(r.Flushed, generation)
		return p.write(id, r)
	})
}

// sync writes the content of a file to the disk, after every process has closed the file.
func (p *Pool) sync(ctx context.Context, name string) error {
	if mutant.On(mutant.FlushOpenVolume) {
		return nil
	}
	f, err := p.waitLocked(ctx, name)
	if err != nil {
		return missing(err)
	}
	return errors.Join(f.Sync(), f.Close())
}
