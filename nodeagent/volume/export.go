package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// Export describes which part of a snapshot's content is written.
type Export struct {
	Snapshot SnapshotRef
	// Since is the ID of an older snapshot of the same volume. If it is set, only the ranges are written that differ
	// from this snapshot.
	Since string
	// Offset is the offset in the volume, in bytes, at which the first range begins. A caller that was interrupted
	// continues at the end of the last range that it has received.
	Offset uint64
	// Scanned is called after each part of the snapshot that was compared or skipped, even if nothing of that part is
	// written. While the host fetches the image of the snapshot, Scanned is called once every imagePause. An error ends
	// the export.
	Scanned func() error
}

const (
	// exportPiece is the length in bytes of the ranges of an export. It is also the cluster size of the pool's QCOW2
	// files.
	exportPiece = qcow2.WriterCluster
	// scanned is the number of bytes between two calls of Export.Scanned. It is so small that the calls are frequent on
	// slow storage too: the leader ends an export from which it receives nothing for 30 seconds.
	scanned = 1 << 20
	// imagePause is the time between two calls of Export.Scanned while an image is fetched.
	imagePause = time.Second
)

// ExportSnapshot writes the content of a complete snapshot to w, as a stream in the format of package rbddiff. The
// names of the snapshots in the stream are their IDs. Ranges of zeros are written only if Since is set. The error wraps
// [ErrNoSnapshot] if one of the snapshots does not exist, and [ErrRefused] if one is not complete, is encrypted or has
// an invalid file. A snapshot that is deleted during the export is exported completely.
func (p *Pool) ExportSnapshot(ctx context.Context, e Export, w io.Writer) error {
	if err := p.exportSnapshot(ctx, e, w); err != nil {
		return fmt.Errorf("export snapshot %s: %w", e.Snapshot.ID, err)
	}
	return nil
}

func (p *Pool) exportSnapshot(ctx context.Context, e Export, w io.Writer) error {
	newer, err := p.openContent(ctx, e.Snapshot, e.Scanned)
	if err != nil {
		return err
	}
	defer newer.Close()
	older := &content{}
	if e.Since != "" {
		if older, err = p.openContent(ctx, SnapshotRef{Volume: e.Snapshot.Volume, ID: e.Since}, e.Scanned); err != nil {
			return fmt.Errorf("older snapshot %s: %w", e.Since, err)
		}
		defer older.Close()
	}
	out, err := rbddiff.NewWriter(w, rbddiff.Header{From: e.Since, To: e.Snapshot.ID, Size: newer.size})
	if err != nil {
		return err
	}
	if err := exportRanges(ctx, e, newer, older, out); err != nil {
		return err
	}
	return out.Close()
}

// exportRanges writes the ranges of newer that differ from older. If older is empty, these are the ranges that are not
// zero.
func exportRanges(ctx context.Context, e Export, newer, older *content, out *rbddiff.Writer) error {
	a, b := make([]byte, exportPiece), make([]byte, exportPiece)
	reported := e.Offset
	for at := e.Offset / exportPiece * exportPiece; at < newer.size; at += exportPiece {
		if err := ctx.Err(); err != nil {
			return err
		}
		next, err := nextDifferent(newer, older, at)
		if err != nil {
			return err
		}
		if at = next; at >= newer.size {
			return nil
		}
		if at >= reported+scanned {
			reported = at
			if err := e.Scanned(); err != nil {
				return err
			}
		}
		if newer.sharesImage(older, at) {
			continue
		}
		length := min(exportPiece, newer.size-at)
		has, err := newer.read(at, a, a[:length])
		if err != nil {
			return err
		}
		had, err := older.read(at, b, b[:length])
		if err != nil {
			return err
		}
		has, had = has && !isZero(a[:length]), had && !isZero(b[:length])
		if !has && !had || has && had && bytes.Equal(a[:length], b[:length]) {
			continue
		}
		skip := uint64(0) // bytes of the first piece that are before e.Offset
		if at < e.Offset {
			skip = e.Offset - at
		}
		r := rbddiff.Range{Offset: at + skip, Length: length - skip}
		if has {
			r.Data = a[skip:length]
		}
		if mutant.On(mutant.ExportWithoutZeros) && !has {
			continue
		}
		if err := out.Write(r); err != nil {
			return err
		}
	}
	return nil
}

// nextDifferent returns the lowest offset, at or after at, at which one of the contents may have bytes that are not
// zero.
func nextDifferent(newer, older *content, at uint64) (uint64, error) {
	n, err := newer.next(at)
	if err != nil {
		return 0, err
	}
	o, err := older.next(at)
	if err != nil {
		return 0, err
	}
	switch {
	case at >= older.size:
		return n, nil
	case o >= older.size:
		return n, nil
	}
	return min(n, o), nil
}

var zeroPiece [exportPiece]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeroPiece[:len(b)]) }

// content reads the content of a complete snapshot. The zero content is an empty disk.
type content struct {
	size   uint64
	format qcow2.Format
	file   *os.File
	source source // of a QCOW2 file
	image  *disk.Image
	base   *os.File // the file of the image, or nil
}

// openContent opens a complete snapshot. If the snapshot has only the differences from an image, openContent fetches
// the image if the host does not have it, and calls scanned meanwhile (see [Export]).
func (p *Pool) openContent(ctx context.Context, ref SnapshotRef, scanned func() error) (_ *content, err error) {
	s, err := p.readSnapshot(ref)
	if err != nil {
		return nil, err
	}
	if s.State != Complete {
		return nil, fmt.Errorf("%w: the snapshot is not complete", ErrRefused)
	}
	c := &content{size: s.Size, format: s.Format, image: s.Image}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.file, err = p.openFile(ref.file(s.Format), unix.O_RDONLY); err != nil {
		return nil, missing(err)
	}
	if s.Format == qcow2.Raw {
		return c, nil
	}
	if s.Image == nil {
		st, err := c.file.Stat()
		if err != nil {
			return nil, err
		}
		if c.source.overlay, err = qcow2.NewReader(c.file, st.Size()); err != nil {
			return nil, refused(err)
		}
		return c, c.checkClusters()
	}
	if err := p.fetchImage(ctx, *s.Image, scanned); err != nil {
		return nil, err
	}
	if c.base, err = p.o.Images.Open(*s.Image); err != nil {
		return nil, err
	}
	if c.source, err = openSource(c.file, c.base, *s.Image, qcow2.NewReader); err != nil {
		return nil, err
	}
	return c, c.checkClusters()
}

// fetchImage fetches an image if the host does not have it. While it fetches the image, it calls scanned once every
// imagePause. An error of scanned ends the fetch.
func (p *Pool) fetchImage(ctx context.Context, image disk.Image, scanned func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	fetched := make(chan error, 1)
	go func() { fetched <- p.o.Images.Ensure(ctx, image) }()
	for tick := time.Tick(imagePause); ; {
		select {
		case err := <-fetched:
			return err
		case <-tick:
			if err := scanned(); err != nil {
				cancel()
				<-fetched
				return err
			}
		}
	}
}

// checkClusters returns an error unless the clusters of the QCOW2 file have exportPiece bytes, as in all files that
// this package makes.
func (c *content) checkClusters() error {
	if size := c.source.overlay.ClusterSize(); size != exportPiece {
		return fmt.Errorf("%w: the clusters of the file have %d bytes", ErrRefused, size)
	}
	return nil
}

// Close closes the files.
func (c *content) Close() {
	for _, f := range []*os.File{c.file, c.base} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// next returns the lowest offset of a piece, at or after at, that may have bytes that are not zero. It returns at least
// the size if there is none. The offset at is a multiple of exportPiece.
func (c *content) next(at uint64) (uint64, error) {
	switch {
	case at >= c.size:
		return max(at, c.size), nil
	case c.format == qcow2.Raw:
		found, err := unix.Seek(int(c.file.Fd()), int64(at), unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return c.size, nil
		}
		if err != nil {
			return 0, os.NewSyscallError("lseek", err)
		}
		return max(at, uint64(found)/exportPiece*exportPiece), nil
	case at < c.source.baseSize:
		return at, nil
	}
	return c.source.overlay.NextMapped(at/exportPiece) * exportPiece, nil
}

// read reads the piece at an offset into buffer. The parameter piece is the part of buffer that is within the newer
// snapshot. read returns false, and may leave buffer unchanged, if the piece has only zeros.
func (c *content) read(at uint64, buffer, piece []byte) (bool, error) {
	if at >= c.size {
		return false, nil
	}
	if c.format == qcow2.Raw {
		n, err := c.file.ReadAt(piece, int64(at))
		clear(piece[n:])
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return true, err
	}
	if at >= c.source.overlay.Size() {
		return false, nil
	}
	has, err := c.source.read(at, buffer, piece)
	return has, refused(err)
}

// sharesImage reports whether both contents have the bytes of the same image at an offset.
func (c *content) sharesImage(other *content, at uint64) bool {
	if c.image == nil || other.image == nil || *c.image != *other.image || at >= c.source.overlay.Size() || at >= other.source.overlay.Size() {
		return false
	}
	for _, one := range []*content{c, other} {
		if is, err := one.source.overlay.Lookup(at / exportPiece); err != nil || is != qcow2.Unallocated {
			return false
		}
	}
	return true
}
