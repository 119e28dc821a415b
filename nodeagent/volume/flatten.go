package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Flatten makes a volume that no process has open independent of its image: it copies the content of the overlay and of
// the image to a new raw file, which then replaces the overlay. Flatten calls progress with the finished part in
// percent. Flatten locks the volume like Open does, so Open fails with [ErrInUse] until Flatten has returned. To open
// the volume earlier, cancel ctx. The error wraps [ErrInUse] if a process has the volume open, or if Release was not
// called for the last attachment. The error wraps [ErrRefused] if the overlay cannot be read or the volume is
// encrypted. An interrupted call has no effect, and the next call begins again. A volume without an image is no error.
func (p *Pool) Flatten(ctx context.Context, id string, progress func(percent uint32)) error {
	if err := p.flatten(ctx, id, progress); err != nil {
		return fmt.Errorf("flatten volume %s: %w", id, plainSpace(err))
	}
	return nil
}

func (p *Pool) flatten(ctx context.Context, id string, progress func(uint32)) error {
	r, from, err := p.beginFlatten(ctx, id)
	if err != nil || from == nil {
		return err
	}
	defer from.Close() // The lock must last until the new file has replaced the overlay.
	if err := p.o.Images.Ensure(ctx, *r.Image); err != nil {
		return err
	}
	base, err := p.o.Images.Open(*r.Image)
	if err != nil {
		return err
	}
	defer base.Close()
	source, err := openSource(from, base, *r.Image, qcow2.NewReader)
	if err != nil {
		return err
	}
	var to *os.File
	if err := p.change(ctx, func() (err error) { to, err = p.newFile(rawName(id)); return err }); err != nil {
		return err
	}
	defer to.Close()
	err = source.copyTo(ctx, to, r.Size, progress)
	if err == nil {
		err = to.Sync() // endFlatten has little left to sync, while the volumes of other VMs wait
	}
	if err == nil {
		err = p.change(ctx, func() error { return p.endFlatten(id, r, to) })
	}
	if err != nil {
		// Open waits for the lock of the overlay while it has locked the pool. If the removal fails, the file may stay:
		// the next call makes a new one.
		_ = from.Close()
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		return errors.Join(err, p.change(late, func() error { return p.removeRaw(id, to) }))
	}
	return nil
}

// removeRaw removes the unfinished raw file f of a volume, unless the record names the raw file or f was replaced.
func (p *Pool) removeRaw(id string, f *os.File) error {
	if r, err := p.read(id); err != nil || r.fileName(id) == rawName(id) {
		return nil
	}
	return p.removeOwn(f, rawName(id))
}

// errEncrypted is the error of Flatten for an encrypted volume, because only QEMU encrypts and decrypts data.
var errEncrypted = fmt.Errorf("%w now: an encrypted volume is flattened while a VM runs with it", ErrRefused)

func rawName(id string) string { return id + ".raw" }

// beginFlatten returns the record of a volume, and the volume's locked file. If the volume has no image, the file is
// nil, and beginFlatten removes a file of the volume that an interrupted Flatten left.
func (p *Pool) beginFlatten(ctx context.Context, id string) (r record, from *os.File, err error) {
	if err := checkID(id); err != nil {
		return r, nil, err
	}
	err = p.change(ctx, func() error {
		r, err = p.read(id)
		switch {
		case err != nil:
			return err
		case r.State != ready:
			return ErrNotFound
		case r.Image == nil && r.Flattened && r.Format == qcow2.Raw:
			return p.removeFile(id + "." + string(qcow2.QCOW2))
		case r.Image == nil && r.Flattened: // QEMU flattened it. An interrupted Flatten may have left a file.
			return p.removeFile(rawName(id))
		case r.Image == nil:
			return nil
		case r.Encrypted:
			return errEncrypted
		case r.Flushed < r.Attachment.Generation:
			return fmt.Errorf("%w, or had it open and has not released it", ErrInUse)
		}
		from, err = p.openLocked(r.fileName(id))
		return p.elsewhere(missing(err), r)
	})
	if err != nil && from != nil {
		_ = from.Close()
		from = nil
	}
	return r, from, err
}

// removeFile removes a file of the pool, if it exists, and syncs the directory.
func (p *Pool) removeFile(name string) error {
	err := os.Remove(p.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, p.dir.Sync())
}

// endFlatten makes the raw file to the file of the volume, and removes the overlay. The raw file must have the complete
// content. Until the new record is written, the overlay is the volume's file; afterwards, the raw file is. The parameter
// begun is the record at the beginning of the copy. If a VM has opened the volume since, because this host has lost its
// locks, endFlatten returns errReplaced. The caller must have locked the pool.
func (p *Pool) endFlatten(id string, begun record, to *os.File) error {
	r, err := p.read(id)
	if err != nil {
		return err
	}
	if r.State != ready || r.Image == nil {
		return ErrNotFound
	}
	used := r.Attachment != begun.Attachment || r.Flushed != begun.Flushed || r.Detached != begun.Detached
	if used && !mutant.On(mutant.FlattenUsedVolume) {
		return errReplaced
	}
	if err := p.checkName(to, rawName(id)); err != nil {
		return err
	}
	if err := to.Truncate(int64(r.Size)); err != nil { // The volume may have grown since beginFlatten.
		return err
	}
	if err := errors.Join(to.Sync(), p.dir.Sync()); err != nil {
		return err
	}
	old := r.fileName(id)
	r.Image, r.Format, r.Flattened = nil, qcow2.Raw, true
	if err := p.write(id, r); err != nil {
		return err
	}
	return p.removeFile(old)
}

// RecordFlattened records that QEMU has copied the whole content of the image into the volume, which a VM has open for
// the attachment a, and has flushed its caches. RecordFlattened syncs the volume's file, and checks in the file's
// tables that no data of the image is missing: a wrong record would lose data. The error wraps [ErrStale] if the volume
// was opened for a later attachment. A second call does nothing.
func (p *Pool) RecordFlattened(ctx context.Context, id string, a Attachment) error {
	if err := p.recordFlattened(ctx, id, a); err != nil {
		return fmt.Errorf("record volume %s as flattened: %w", id, plainSpace(err))
	}
	return nil
}

func (p *Pool) recordFlattened(ctx context.Context, id string, a Attachment) error {
	if err := checkID(id); err != nil {
		return err
	}
	r, err := p.read(id)
	if err != nil {
		return err
	}
	if r.State == ready && r.Image != nil {
		if err := p.checkCopied(ctx, id, r); err != nil {
			return err
		}
	}
	return p.change(ctx, func() error {
		r, err := p.read(id)
		switch {
		case err != nil:
			return err
		case r.State != ready:
			return ErrNotFound
		case r.Image == nil:
			return nil
		}
		if err := r.admit(a); err != nil {
			return err
		}
		r.Image, r.Flattened = nil, true
		if err := p.write(id, r); err != nil {
			return err
		}
		return p.removeFile(rawName(id)) // An interrupted Flatten may have left this file.
	})
}

var errIncomplete = errors.New("the file of the volume lacks a part of the image")

// checkCopied syncs the overlay of a volume, and returns errIncomplete if the overlay lacks a cluster of the image that
// is not zero. A QEMU may have the overlay open and write to it, because QEMU only adds clusters to the overlay and
// removes none.
func (p *Pool) checkCopied(ctx context.Context, id string, r record) error {
	overlay, err := p.openFile(r.fileName(id), unix.O_RDWR)
	if err != nil {
		return missing(err)
	}
	defer overlay.Close()
	if err := overlay.Sync(); err != nil {
		return err
	}
	base, err := p.o.Images.Open(*r.Image)
	if err != nil {
		return err
	}
	defer base.Close()
	s, err := openSource(overlay, base, *r.Image, qcow2.NewTableReader)
	if err != nil {
		return err
	}
	cluster := s.overlay.ClusterSize()
	buffer, zeros := make([]byte, cluster), make([]byte, cluster)
	for at := uint64(0); at < s.baseSize; at += cluster {
		if err := ctx.Err(); err != nil {
			return err
		}
		content, err := s.overlay.Lookup(at / cluster)
		if err != nil {
			return refused(err)
		}
		if content != qcow2.Unallocated || mutant.On(mutant.RecordIncomplete) {
			continue
		}
		piece := buffer[:min(cluster, s.baseSize-at)]
		if _, err := s.base.ReadAt(piece, int64(at)); err != nil && !errors.Is(err, io.EOF) {
			return refused(err)
		}
		if !bytes.Equal(piece, zeros[:len(piece)]) {
			return fmt.Errorf("%w at offset %d", errIncomplete, at)
		}
	}
	return nil
}

// source reads the content of a volume that was made from an image: an overlay, and the image as its backing file.
type source struct {
	overlay  *qcow2.Reader
	base     io.ReaderAt
	baseSize uint64
}

// openSource reads the headers of the overlay and the image. The overlay's tables are untrusted: QEMU wrote them, and a
// guest may have taken over its QEMU. The function newReader opens the overlay.
func openSource(
	overlay, base *os.File, img disk.Image, newReader func(io.ReaderAt, int64) (*qcow2.Reader, error),
) (s source, err error) {
	st, err := overlay.Stat()
	if err != nil {
		return s, err
	}
	if s.overlay, err = newReader(overlay, st.Size()); err != nil {
		return s, refused(err)
	}
	if s.overlay.Info().ExtendedL2 {
		return s, fmt.Errorf("%w: the overlay has extended L2 entries", ErrRefused)
	}
	s.base, s.baseSize = base, uint64(img.Size)
	if img.Format == qcow2.QCOW2 {
		below, err := qcow2.NewReader(base, img.Size)
		if err != nil {
			return s, refused(err)
		}
		s.base, s.baseSize = below, below.Size()
	}
	return s, nil
}

// refused makes an error wrap ErrRefused if it was caused by the content of a QCOW2 file.
func refused(err error) error {
	if errors.Is(err, qcow2.ErrRefused) {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return err
}

// copyTo writes the content to the empty file to, and makes the file size bytes long. Clusters of zeros become holes.
func (s source) copyTo(ctx context.Context, to *os.File, size uint64, progress func(uint32)) error {
	if err := to.Truncate(int64(size)); err != nil {
		return err
	}
	cluster := s.overlay.ClusterSize()
	buffer, zeros := make([]byte, cluster), make([]byte, cluster)
	end, last := min(s.overlay.Size(), size), uint32(0)
	for at := uint64(0); at < end; at += cluster {
		if at >= s.baseSize {
			if at = s.overlay.NextMapped(at/cluster) * cluster; at >= end {
				break
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if percent := uint32(at / (end/100 + 1)); percent > last {
			last = percent
			progress(percent)
		}
		piece := buffer[:min(cluster, end-at)]
		if has, err := s.read(at, buffer, piece); err != nil {
			return refused(err)
		} else if !has || bytes.Equal(piece, zeros[:len(piece)]) {
			continue
		}
		if _, err := to.WriteAt(piece, int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// read reads the cluster at an offset into buffer. The parameter piece is the part of buffer that is within the volume.
// read returns false, and may leave buffer unchanged, if the cluster has only zeros.
func (s source) read(at uint64, buffer, piece []byte) (bool, error) {
	content, err := s.overlay.ReadCluster(at/s.overlay.ClusterSize(), buffer)
	switch {
	case err != nil:
		return false, err
	case content != qcow2.Unallocated || mutant.On(mutant.FlattenOverlayOnly):
		return content == qcow2.Data, nil
	case at >= s.baseSize:
		return false, nil
	}
	n := min(uint64(len(piece)), s.baseSize-at)
	clear(piece[n:])
	if _, err := s.base.ReadAt(piece[:n], int64(at)); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return true, nil
}
