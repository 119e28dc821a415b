package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// sector is the unit of the size of a disk, in bytes.
const sector = 512

// eachData calls visit with the parts of a file between two offsets that are not holes, in pieces of at most 1 MiB.
func eachData(ctx context.Context, f *os.File, from, to int64, visit func(at int64, data []byte) error) error {
	buffer := make([]byte, 1<<20)
	for at := from; at < to; {
		begin, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
		for at = begin; at < min(end, to); {
			if err := ctx.Err(); err != nil {
				return err
			}
			piece := buffer[:min(int64(len(buffer)), min(end, to)-at)]
			if _, err := f.ReadAt(piece, at); err != nil && err != io.EOF {
				return fmt.Errorf("read %s: %w", f.Name(), err)
			}
			if err := visit(at, piece); err != nil {
				return err
			}
			at += int64(len(piece))
		}
	}
	return nil
}

// copyData copies the parts of from that are not holes to the empty file to.
func copyData(ctx context.Context, to, from *os.File, size int64) error {
	err := eachData(ctx, from, 0, size, func(at int64, data []byte) error {
		_, err := to.WriteAt(data, at)
		return err
	})
	if err != nil {
		return fmt.Errorf("copy %s: %w", from.Name(), err)
	}
	return to.Truncate(size)
}

// pack writes the first size bytes of a raw file to the empty file out, as a QCOW2 image. Parts that are zero take no
// space in it.
func pack(ctx context.Context, raw *os.File, size uint64, out io.WriterAt) error {
	w, err := qcow2.NewWriter(out, (size+sector-1)/sector*sector)
	if err != nil {
		return err
	}
	if err := eachData(ctx, raw, 0, int64(size), func(at int64, data []byte) error { return w.Write(uint64(at), data) }); err != nil {
		return err
	}
	_, err = w.Close()
	return err
}
