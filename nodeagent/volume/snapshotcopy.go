package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// SnapshotCopy is a copy of a volume in progress. The caller must end the copy with Finish, Fail or Abandon. If the
// program ends earlier, the record of the snapshot keeps the state Copying.
type SnapshotCopy struct {
	pool   *Pool
	ref    SnapshotRef
	record Snapshot
	key    []byte // key of an encrypted volume; may be empty
	name   string // name of the volume's file
	// source is the volume's locked file if no process has the volume open. source is nil if QEMU has the volume open:
	// QEMU must then copy the volume to Target.
	source *os.File
	target *os.File
}

// Attached reports whether a process has the volume open, so that QEMU must make the copy.
func (c *SnapshotCopy) Attached() bool { return c.source == nil }

// Target returns the file that QEMU must fill, an empty QCOW2 image. If the volume has an image, the copy contains only
// the differences from the image.
func (c *SnapshotCopy) Target() *os.File { return c.target }

// HasImage reports whether the copy contains only the differences from an image.
func (c *SnapshotCopy) HasImage() bool { return c.record.Image != nil }

// Key returns the key of an encrypted volume, with which QEMU must open Target. It returns nil for other volumes.
func (c *SnapshotCopy) Key() []byte {
	if !c.record.Encrypted {
		return nil
	}
	return c.key
}

// Size returns the size of the volume in bytes, as the guest sees it.
func (c *SnapshotCopy) Size() uint64 { return c.record.Size }

// BeginSnapshot records that a snapshot of a volume is being made, and makes the file for the copy. If no process has
// the volume open, BeginSnapshot locks the volume until the copy ends, so that the content does not change: Open of the
// volume fails with [ErrInUse] until then. If QEMU has the volume open, BeginSnapshot reserves space in the pool for
// the copy. The error wraps [ErrRefused] if the snapshot has a record already, and [ErrNotNow] if another host of a
// shared pool had opened the volume and the attachment is not ended (see [Pool.Detach]).
//
// The copy of an encrypted volume is encrypted too. The parameter key is the key of the volume. It is needed only if
// QEMU has the volume open: QEMU then writes the copy with a new master key. The error wraps [ErrNotNow] if the key is
// needed and empty.
func (p *Pool) BeginSnapshot(ctx context.Context, ref SnapshotRef, key []byte) (*SnapshotCopy, error) {
	c := &SnapshotCopy{pool: p, ref: ref, key: key}
	err := p.change(ctx, c.begin)
	if err == nil && c.Attached() {
		if err = c.prepareTarget(ctx); err != nil {
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
			defer cancel()
			err = errors.Join(err, p.change(late, c.remove))
		}
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("snapshot volume %s: %w", ref.Volume, plainSpace(err))
	}
	return c, nil
}

func (c *SnapshotCopy) begin() error {
	p := c.pool
	if _, err := p.readSnapshot(c.ref); err == nil {
		return fmt.Errorf("%w: the snapshot exists", ErrRefused)
	} else if !errors.Is(err, ErrNoSnapshot) {
		return err
	}
	r, err := p.read(c.ref.Volume)
	switch {
	case err != nil:
		return err
	case r.State != ready:
		return ErrNotFound
	case p.o.Shared && r.Host != "" && r.Host != p.o.Host && r.Flushed < r.Attachment.Generation:
		// The copy would lock the volume. Detach, which must end the attachment first, would then fail.
		return fmt.Errorf("%w: host %s opened the volume for VM %s, and the attachment is not ended yet", ErrNotNow, r.Host, r.Attachment.VM)
	}
	if c.source, err = p.openLocked(r.fileName(c.ref.Volume)); errors.Is(err, ErrInUse) {
		c.source = nil
	} else if err != nil {
		return missing(err)
	}
	c.record = Snapshot{State: Copying, Size: r.Size, Format: r.Format, Image: r.Image, Encrypted: r.Encrypted}
	if c.Attached() {
		c.record.Format = qcow2.QCOW2
	}
	if err := p.removeCopy(c.ref); err != nil { // An abandoned copy may have left a file.
		return err
	}
	if err := p.writeSnapshot(c.ref, c.record); err != nil {
		return err
	}
	c.name = r.fileName(c.ref.Volume)
	if c.target, err = p.openFile(c.ref.file(c.record.Format), unix.O_RDWR|unix.O_CREAT|unix.O_EXCL); err != nil {
		return errors.Join(err, p.deleteSnapshot(c.ref))
	}
	return nil
}

// remove removes the copy and its record, unless another host of a shared pool has recorded the snapshot as failed.
func (c *SnapshotCopy) remove() error {
	if err := c.checkCopying(); err != nil {
		return err
	}
	return c.pool.deleteSnapshot(c.ref)
}

// reserveSlack is the additional space in bytes that reserve allocates for the copy's QCOW2 tables, and for clusters
// that the guest writes before QEMU begins the copy.
const reserveSlack = 4 << 20

// prepareTarget makes Target an empty QCOW2 image, which is encrypted if the volume is. Beyond the end of this image,
// it allocates as many bytes as the volume's file occupies, and some more for tables (see reserveSlack). Without this
// space, a copy that fills the pool would make writes of the guest fail.
func (c *SnapshotCopy) prepareTarget(ctx context.Context) (err error) {
	var length int64
	if c.record.Encrypted {
		length, err = c.formatTarget(ctx, c.key)
	} else {
		length, err = qcow2.Create(c.target, c.record.Size)
	}
	if err != nil {
		return err
	}
	f, err := c.pool.openFile(c.name, unix.O_RDONLY)
	if err != nil {
		return missing(err)
	}
	defer f.Close()
	occupied, err := occupiedBytes(f)
	if err != nil {
		return err
	}
	want := int64(occupied + c.record.Size/8192 + reserveSlack)
	err = unix.Fallocate(int(c.target.Fd()), unix.FALLOC_FL_KEEP_SIZE, length, want)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // Some file systems cannot reserve space, for example NFS before version 4.2.
	}
	return os.NewSyscallError("fallocate", err)
}

func occupiedBytes(f *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, os.NewSyscallError("fstat", err)
	}
	return uint64(st.Blocks) * 512, nil
}

// Copy copies a volume that no process has open. It must not be called if Attached returns true. When ctx ends, Copy
// stops soon and returns the error of ctx.
func (c *SnapshotCopy) Copy(ctx context.Context) error {
	if c.Attached() {
		return errors.New("a process has the volume open")
	}
	if err := copyFile(ctx, c.target, c.source); err != nil {
		return fmt.Errorf("copy volume %s: %w", c.ref.Volume, plainSpace(err))
	}
	return nil
}

// copyChunk is the number of bytes that are copied between two checks of the context.
const copyChunk = 8 << 20

// copyFile copies the file from to the empty file to. It makes a reflink copy if the file system has reflinks.
// Otherwise it copies the parts of from that are not holes.
func copyFile(ctx context.Context, to, from *os.File) error {
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return nil
	}
	st, err := from.Stat()
	if err != nil {
		return err
	}
	if err := to.Truncate(st.Size()); err != nil {
		return err
	}
	for at := int64(0); at < st.Size(); {
		begin, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return os.NewSyscallError("lseek", err)
		}
		end, err := unix.Seek(int(from.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return os.NewSyscallError("lseek", err)
		}
		for at = begin; at < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(end-at, copyChunk)
			if _, err := io.Copy(io.NewOffsetWriter(to, at), io.NewSectionReader(from, at, n)); err != nil {
				return err
			}
			at += n
		}
	}
	return nil
}

// Finish syncs the copy and records the snapshot as Complete. The parameter taken is the instant of the copy's content.
// The parameter consistency is stored as Snapshot.Consistency.
func (c *SnapshotCopy) Finish(ctx context.Context, taken time.Time, consistency string) error {
	defer c.close()
	err := c.syncTarget() // not within change, because it may take long and the volumes of other VMs would wait
	if err == nil {
		err = c.pool.change(ctx, func() error { return c.recordComplete(taken, consistency) })
	}
	if err != nil {
		return fmt.Errorf("finish snapshot %s: %w", c.ref.ID, plainSpace(err))
	}
	return nil
}

// checkCopying returns an error if another host of a shared pool has recorded the snapshot as failed during the copy.
func (c *SnapshotCopy) checkCopying() error {
	have, err := c.pool.readSnapshot(c.ref)
	if err != nil {
		return err
	}
	if have.State != Copying {
		return fmt.Errorf("%w: the snapshot was recorded as failed during the copy: %s", ErrRefused, have.Error)
	}
	return c.pool.checkName(c.target, c.ref.file(c.record.Format))
}

func (c *SnapshotCopy) recordComplete(taken time.Time, consistency string) (err error) {
	if err := c.checkCopying(); err != nil && !mutant.On(mutant.FinishFailed) {
		return err
	}
	done := c.record
	if done.Stored, err = occupiedBytes(c.target); err != nil {
		return err
	}
	done.State, done.TakenAt, done.Consistency = Complete, taken.UnixMilli(), consistency
	return c.pool.writeSnapshot(c.ref, done)
}

// syncTarget frees what was allocated beyond the end of the copy, and syncs the copy.
func (c *SnapshotCopy) syncTarget() error {
	st, err := c.target.Stat()
	if err != nil {
		return err
	}
	return errors.Join(c.target.Truncate(st.Size()), c.target.Sync())
}

// Fail removes the copy, and records the snapshot as Failed with the reason.
func (c *SnapshotCopy) Fail(ctx context.Context, reason string) error {
	c.close()
	return c.pool.FailSnapshot(ctx, c.ref, reason)
}

// Abandon removes the copy and its record, so that the copy can be begun again.
func (c *SnapshotCopy) Abandon(ctx context.Context) error {
	c.close()
	return c.pool.DeleteSnapshot(ctx, c.ref)
}

// close closes the files, which unlocks the volume.
func (c *SnapshotCopy) close() {
	for _, f := range []*os.File{c.source, c.target} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// CopyTarget is a volume of a VM of which a snapshot is made while the VM runs. Either QEMU copies the volume to File
// (see [SnapshotCopy.Target]), or Take makes the snapshot (see [RBDSnapshot.Take]).
type CopyTarget struct {
	Volume string
	Size   uint64 // size of the volume in bytes
	File   *os.File
	Key    []byte // key of File if File is encrypted
	Image  bool   // whether the volume has an image, and File receives only the differences from the image
	Take   func(ctx context.Context) error
}

// Copied describes a copy that QEMU has made.
type Copied struct {
	Taken  time.Time // the instant of the content of all copies
	Frozen bool      // whether the guest's file systems were frozen at this instant
}

// ErrNotNow means that a volume cannot be copied at the moment: no running QEMU has the volume as a disk, or the QEMU
// that has it is copying other disks. The caller may try again later.
var ErrNotNow = errors.New("the volume cannot be copied at the moment")
