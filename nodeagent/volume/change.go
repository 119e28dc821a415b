package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Create makes a volume, unless the pool has it already. If the existing volume is larger than v, Create returns nil,
// because the volume may have grown. Create fetches the image if the cache does not have it. The error wraps
// [ErrRefused] if the volume cannot be made.
func (p *Pool) Create(ctx context.Context, v Volume) error {
	if err := p.create(ctx, v); err != nil {
		return fmt.Errorf("make volume %s: %w", v.ID, plainSpace(err))
	}
	return nil
}

func (p *Pool) create(ctx context.Context, v Volume) error {
	if err := checkID(v.ID); err != nil {
		return err
	}
	if v.Format != "" && v.Format != qcow2.Raw && v.Format != qcow2.QCOW2 {
		return fmt.Errorf("%w: the format %q is not known", ErrRefused, v.Format)
	}
	if v.Size == 0 || v.Size%512 != 0 || v.Size > qcow2.MaxVirtualSize {
		return fmt.Errorf("%w: the volume has %d bytes", ErrRefused, v.Size)
	}
	if r, err := p.read(v.ID); err == nil && r.State == ready {
		return p.checkComplete(v, r) // a complete volume needs neither the lock nor the image
	}
	if v.Image != nil {
		if err := p.o.Images.Ensure(ctx, *v.Image); err != nil {
			return err
		}
		size, err := p.o.Images.VirtualSize(ctx, *v.Image)
		if err != nil {
			return err
		}
		if size > v.Size {
			return fmt.Errorf("%w: the image has %d bytes, which do not fit in %d", ErrRefused, size, v.Size)
		}
	}
	switch {
	case v.Source != nil:
		return p.createFrom(ctx, v)
	case v.Encrypted:
		return p.createEncrypted(ctx, v)
	}
	return p.makeFile(ctx, v, fill)
}

// makeFile writes the record and the file of a new volume. The function content writes the content of the empty file.
func (p *Pool) makeFile(ctx context.Context, v Volume, content func(*os.File, record) error) error {
	return p.change(ctx, func() error {
		r, err := p.beginFile(v)
		if err != nil || r.State == ready {
			return err
		}
		f, err := p.newFile(r.fileName(v.ID))
		if err != nil {
			return err
		}
		defer f.Close()
		if err = content(f, r); err == nil {
			err = p.endFile(f, v.ID)
		}
		if err != nil {
			return errors.Join(err, p.removeOwn(f, r.fileName(v.ID)))
		}
		return nil
	})
}

// beginFile writes the record of a new volume before the volume's file is made, and returns the record. If the volume
// is complete already, beginFile checks the volume and returns the existing record.
func (p *Pool) beginFile(v Volume) (record, error) {
	r, err := p.read(v.ID)
	switch {
	case errors.Is(err, ErrNotFound):
		r = record{State: creating, Size: v.Size, Image: v.Image, Format: v.format(), Encrypted: v.Encrypted}
		if err := p.checkDeleted(v.ID); err != nil {
			return r, err
		}
		if err := p.checkAbsent(r.fileName(v.ID)); err != nil {
			return r, err
		}
		if err := p.claimRecord(v.ID); err != nil {
			return r, err
		}
	case err != nil:
		return r, err
	case r.State == ready:
		return r, p.checkComplete(v, r)
	}
	if err := r.matches(v); err != nil {
		return r, err
	}
	r.Size = v.Size
	return r, p.write(v.ID, r)
}

// endFile syncs the complete file f of a new volume, and then writes the record that the volume is complete. It returns
// errReplaced if another host has made or deleted the volume since beginFile.
func (p *Pool) endFile(f *os.File, id string) error {
	r, err := p.read(id)
	if errors.Is(err, ErrNotFound) || err == nil && r.State != creating && !mutant.On(mutant.ReuseUnfinished) {
		return errReplaced
	}
	if err != nil {
		return err
	}
	if err := p.checkName(f, r.fileName(id)); err != nil {
		return err
	}
	if r.Format == qcow2.Raw {
		if err := f.Truncate(int64(r.Size)); err != nil {
			return err
		}
	}
	if err := errors.Join(f.Sync(), p.dir.Sync()); err != nil {
		return err
	}
	r.State = ready
	return p.write(id, r)
}

// createFrom makes a volume with the content of a snapshot. The copy may take long, so createFrom does not lock the
// pool while it copies. It locks the volume's file, so no other call and no other host makes the volume meanwhile.
func (p *Pool) createFrom(ctx context.Context, v Volume) error {
	var r record
	var to *os.File
	err := p.change(ctx, func() (err error) {
		if r, err = p.beginFile(v); err == nil && r.State != ready {
			to, err = p.newFile(r.fileName(v.ID))
		}
		return err
	})
	if err != nil || r.State == ready {
		return err
	}
	defer to.Close()
	if err = p.copySnapshot(ctx, *v.Source, to, r); err == nil {
		err = to.Sync() // endFile has little left to sync, while the volumes of other VMs wait
	}
	if err == nil {
		err = p.change(ctx, func() error { return p.endFile(to, v.ID) })
	}
	if err != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		return errors.Join(err, p.change(late, func() error { return p.removeUnfinished(to, v.ID, r) }))
	}
	return nil
}

// removeUnfinished removes the file f of a new volume, unless the volume is complete or f was replaced.
func (p *Pool) removeUnfinished(f *os.File, id string, begun record) error {
	if r, err := p.read(id); err != nil || r.State != creating {
		return nil
	}
	return p.removeOwn(f, begun.fileName(id))
}

// copySnapshot copies the file of a snapshot to the empty file of a new volume, whose record is r.
func (p *Pool) copySnapshot(ctx context.Context, ref SnapshotRef, to *os.File, r record) error {
	s, err := p.Snapshot(ref)
	if err != nil {
		return err
	}
	if s.State != Complete || s.Format != r.Format || s.Size > r.Size || (s.Image == nil) != (r.Image == nil) ||
		s.Image != nil && *s.Image != *r.Image {
		return fmt.Errorf("%w: snapshot %s is incomplete, larger than %d bytes, or has another image or format than %s", ErrRefused, ref.ID, r.Size, r.Format)
	}
	if s.Encrypted != r.Encrypted {
		return fmt.Errorf("%w: only one of snapshot %s and the required volume is encrypted", ErrRefused, ref.ID)
	}
	from, err := p.openFile(ref.file(s.Format), unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer from.Close()
	return copyFile(ctx, to, from)
}

// fill writes the content of a new volume to the empty file f.
func fill(f *os.File, r record) error {
	if r.Format == qcow2.Raw {
		return f.Truncate(int64(r.Size))
	}
	_, err := qcow2.Create(f, r.Size)
	return err
}

// checkComplete returns nil if r, the record of a complete volume, describes v, and the volume's file exists.
func (p *Pool) checkComplete(v Volume, r record) error {
	if err := r.matches(v); err != nil {
		return err
	}
	f, err := p.openFile(r.fileName(v.ID), unix.O_RDONLY)
	if err != nil {
		return missing(err)
	}
	return f.Close()
}

// missing returns err. If err means that the file of a complete volume does not exist, the returned error says so and
// wraps ErrRefused.
func missing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: the volume's file is missing from the pool", ErrRefused)
	}
	return err
}

func (p *Pool) checkAbsent(name string) error {
	if _, err := os.Lstat(p.path(name)); err == nil {
		return fmt.Errorf("%w: a file without a record has the name of the volume", ErrRefused)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Resize grows a volume to size bytes. The error wraps [ErrRefused] if the volume is larger already. If QEMU has the
// volume open, the guest sees the new size only after QEMU's block_resize. A QCOW2 file grows only by block_resize.
func (p *Pool) Resize(ctx context.Context, id string, size uint64) error {
	if err := p.resize(ctx, id, size); err != nil {
		return fmt.Errorf("resize volume %s: %w", id, plainSpace(err))
	}
	return nil
}

func (p *Pool) resize(ctx context.Context, id string, size uint64) error {
	if err := checkID(id); err != nil {
		return err
	}
	if size%512 != 0 || size > qcow2.MaxVirtualSize {
		return fmt.Errorf("%w: a size of %d bytes", ErrRefused, size)
	}
	return p.change(ctx, func() error {
		r, err := p.read(id)
		switch {
		case err != nil:
			return err
		case r.State != ready:
			return ErrNotFound
		case size < r.Size:
			return fmt.Errorf("%w: a volume of %d bytes cannot shrink to %d", ErrRefused, r.Size, size)
		case size == r.Size:
			return nil
		}
		if r.Format == qcow2.Raw {
			if err := p.grow(r.fileName(id), size); err != nil {
				return err
			}
		}
		r.Size = size
		return p.write(id, r)
	})
}

// grow extends a raw file to size bytes, and syncs it.
func (p *Pool) grow(name string, size uint64) error {
	f, err := p.openFile(name, unix.O_RDWR)
	if err != nil {
		return missing(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() < int64(size) {
		if err := f.Truncate(int64(size)); err != nil {
			return err
		}
	}
	return f.Sync()
}

// Delete removes a volume, its content and its snapshots. It returns nil if the volume does not exist. In a shared
// pool, Delete also records the deletion, so that no host makes the volume again. The error wraps [ErrInUse] if a
// process has the volume open.
func (p *Pool) Delete(ctx context.Context, id string) error {
	if err := p.delete(ctx, id); err != nil {
		return fmt.Errorf("delete volume %s: %w", id, err)
	}
	return nil
}

// removeEmptyRecord removes a record that claimRecord made, if the creation of the volume did not continue.
func (p *Pool) removeEmptyRecord(id string) error {
	st, err := os.Lstat(p.path(id + ".json"))
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() > 0 {
		return nil
	}
	if err != nil {
		return err
	}
	return p.removeFile(id + ".json")
}

func (p *Pool) delete(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	return p.change(ctx, func() error {
		r, err := p.read(id)
		if errors.Is(err, ErrNotFound) {
			return errors.Join(p.recordDeletion(id), p.removeEmptyRecord(id))
		}
		if err != nil {
			return err
		}
		name := r.fileName(id)
		f, err := p.openLocked(name)
		err = p.elsewhere(err, r)
		switch {
		case err == nil:
			defer f.Close() // the lock lasts until the file has lost its name
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		if r.State != deleting && f != nil {
			r.State = deleting
			// A full file system may have no room for this record. If the record cannot be written, an interruption
			// leaves a record whose file is missing. The next Delete then removes this record.
			if err := p.write(id, r); err != nil && !errors.Is(err, unix.ENOSPC) {
				return err
			}
		}
		if err := p.deleteSnapshots(id); err != nil {
			return err
		}
		// After an interrupted Flatten, a volume may have two files, so both names are removed.
		for _, name := range []string{id + "." + string(qcow2.QCOW2), rawName(id)} {
			if err := p.removeFile(name); err != nil {
				return err
			}
		}
		if err := p.recordDeletion(id); err != nil {
			return err
		}
		return p.removeFile(id + ".json")
	})
}
