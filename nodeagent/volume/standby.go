package volume

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// leaveStandbyByte unlocks all locked bytes of f but the first, so that the target of a migration can lock one of them.
func (p *Pool) leaveStandbyByte(f *os.File) error {
	if !p.o.Shared {
		return nil
	}
	return setLockOf(f, unix.F_UNLCK, 1, lockedBytes-1)
}

// OpenStandby opens a volume of a shared pool for the target of a migration of the VM that has the volume open. The
// process that gets the files must not write before Activate. OpenStandby does not change the record. The error wraps
// [ErrStale] if the VM does not have the volume, or had it with a later generation, and [ErrInUse] if already two
// processes have the volume open. The caller passes duplicates of the files to QEMU and closes the files.
func (p *Pool) OpenStandby(ctx context.Context, id string, a Attachment) (Files, error) {
	files, err := p.openStandby(ctx, id, a)
	if err != nil {
		return Files{}, fmt.Errorf("open volume %s for a migration: %w", id, err)
	}
	return files, nil
}

func (p *Pool) openStandby(ctx context.Context, id string, a Attachment) (files Files, err error) {
	if err := checkID(id); err != nil {
		return Files{}, err
	}
	if !p.o.Shared {
		return Files{}, fmt.Errorf("%w: other hosts do not use the pool", ErrRefused)
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
		if err := r.admitStandby(a); err != nil {
			return err
		}
		files.Content, err = p.openFile(r.fileName(id), unix.O_RDWR)
		if err != nil {
			return missing(err)
		}
		files.Format, files.Size, files.Encrypted = r.Format, r.Size, r.Encrypted
		if mutant.On(mutant.StandbyWithoutLock) {
			return nil
		}
		return lockOneByte(files.Content)
	})
	if err != nil {
		files.Close()
		return Files{}, err
	}
	return files, nil
}

// lockOneByte locks the first byte of f that no other process has locked. The caller must have locked the pool.
func lockOneByte(f *os.File) (err error) {
	for start := int64(0); start < lockedBytes; start++ {
		if err = setLockOf(f, unix.F_WRLCK, start, 1); !errors.Is(err, ErrInUse) {
			return err
		}
	}
	return err
}

// admitStandby returns nil if the volume may be opened for the attachment a, which another host of a migration will hand
// over. The error wraps ErrStale if the volume belongs to another VM, or if a is not later than all attachments.
func (r record) admitStandby(a Attachment) error {
	last := r.Attachment
	switch {
	case r.State != ready:
		return ErrNotFound
	case a.VM != last.VM && !mutant.On(mutant.StandbyOfOtherVM):
		return fmt.Errorf("%w: VM %s has it", ErrStale, last.VM)
	case a.Generation <= last.Generation || a.Generation <= r.Detached:
		return fmt.Errorf("%w: generation %d is not later than %d", ErrStale, a.Generation, max(last.Generation, r.Detached))
	}
	return nil
}

// Activate records that the attachment a, for which OpenStandby has opened a volume, is the present attachment: from now
// on, the process may write, and the process on the other host of the migration may not. The error wraps [ErrStale] if
// the other host has taken the volume back. A second call does nothing.
func (p *Pool) Activate(ctx context.Context, id string, a Attachment) error {
	err := p.changeRecord(ctx, id, func(r record) (record, error) {
		if r.Attachment == a {
			return r, nil
		}
		r, err := p.handOver(r, a)
		r.Activated = a.Generation
		return r, err
	})
	if err != nil {
		return fmt.Errorf("activate volume %s: %w", id, plainSpace(err))
	}
	return nil
}

// TakeBack records that the attachment a is the present attachment of a volume that a process of this host has open with
// an earlier generation. A migration to another host has failed. The error wraps [ErrInUse] while a process of the other
// host has the volume open, [ErrStale] if the volume was opened for a later attachment, and [ErrActivated] if the target
// has activated the volume. After ErrActivated, the caller must end the process of this host. A second call does nothing.
// The parameter from is the generation with which the process of this host has opened the volume.
func (p *Pool) TakeBack(ctx context.Context, id string, a Attachment, from uint64) error {
	err := p.changeRecord(ctx, id, func(r record) (record, error) {
		if r.Attachment == a {
			return r, nil
		}
		if err := r.admit(a); err != nil {
			return r, err
		}
		if r.activatedAfter(from) {
			return r, ErrActivated
		}
		n, err := p.processes(r.fileName(id))
		if err != nil {
			return r, err
		}
		if n > 1 && !mutant.On(mutant.TakeBackUnproven) {
			return r, fmt.Errorf("%w: the target of the migration has not closed it", ErrElsewhere)
		}
		return p.handOver(r, a)
	})
	if err != nil {
		return fmt.Errorf("take back volume %s: %w", id, plainSpace(err))
	}
	return nil
}

// handOver returns the record r after the attachment a has begun on this host, for a process that has the file open.
func (p *Pool) handOver(r record, a Attachment) (record, error) {
	if r.State != ready {
		return r, ErrNotFound
	}
	if err := r.admit(a); err != nil && !mutant.On(mutant.ActivateStale) {
		return r, err
	}
	r.Attachment, r.Flushed, r.Host = a, min(r.Flushed, a.Generation-1), p.o.Host
	return r, nil
}

// processes returns the number of processes that have the file of a volume open for a VM. The caller must have locked
// the pool.
func (p *Pool) processes(name string) (n int, err error) {
	f, err := p.openFile(name, unix.O_RDWR)
	if err != nil {
		return 0, missing(err)
	}
	defer f.Close() // ends the locks
	for start := int64(0); start < lockedBytes; start++ {
		switch err := setLockOf(f, unix.F_WRLCK, start, 1); {
		case errors.Is(err, ErrInUse):
			n++
		case err != nil:
			return 0, err
		}
	}
	return n, nil
}

// changeRecord replaces the record of a volume by the result of f.
func (p *Pool) changeRecord(ctx context.Context, id string, f func(record) (record, error)) error {
	if err := checkID(id); err != nil {
		return err
	}
	return p.change(ctx, func() error {
		before, err := p.read(id)
		if err != nil {
			return err
		}
		after, err := f(before)
		if err != nil || after.Attachment == before.Attachment {
			return err
		}
		return p.write(id, after)
	})
}
