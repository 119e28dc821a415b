package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// exportWithin is the maximum time of one export of an RBD snapshot. The caller can continue an export at an offset.
const exportWithin = 6 * time.Hour

// ExportSnapshot writes the content of a complete snapshot to w, like [Pool.ExportSnapshot]. The Ceph cluster finds the
// ranges that differ from an older snapshot. Ranges whose content was written again without a change are also written.
func (p *RBDPool) ExportSnapshot(ctx context.Context, e Export, w io.Writer) error {
	if err := p.exportSnapshot(ctx, e, w); err != nil {
		return fmt.Errorf("export snapshot %s: %w", e.Snapshot.ID, err)
	}
	return nil
}

func (p *RBDPool) exportSnapshot(ctx context.Context, e Export, w io.Writer) error {
	name, err := p.source(ctx, e.Snapshot)
	if err != nil {
		return err
	}
	if r, _, err := p.read(ctx, e.Snapshot.Volume); err != nil {
		return err
	} else if r.Encrypted {
		return fmt.Errorf("%w: the volume is encrypted", ErrRefused)
	}
	newer, err := p.existingSnapshot(ctx, e.Snapshot)
	if err != nil {
		return err
	}
	request := &rbdv1.ExportImageRequest{Snapshot: name, Offset: e.Offset}
	if e.Since != "" {
		older, err := p.source(ctx, SnapshotRef{Volume: e.Snapshot.Volume, ID: e.Since})
		if err != nil {
			return fmt.Errorf("older %w", err)
		}
		request.FromSnapshot = older.GetSnapshot()
	}
	out, err := rbddiff.NewWriter(w, rbddiff.Header{From: e.Since, To: e.Snapshot.ID, Size: newer.Size})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, exportWithin)
	defer cancel()
	stream, err := p.o.Client.ExportImage(ctx, request)
	if err != nil {
		return rbdError(err)
	}
	if err := exportExtents(e, newer.Size, stream, out); err != nil {
		return err
	}
	return out.Close()
}

// exportExtents writes the extents of a stream to out. It leaves out what is before the offset of the export, and zeros
// of an export without an older snapshot.
func exportExtents(e Export, size uint64, stream grpc.ServerStreamingClient[rbdv1.Extent], out *rbddiff.Writer) error {
	reported := e.Offset
	for {
		extent, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return rbdError(err)
		}
		data := extent.GetData()
		begin := extent.GetOffset()
		end := min(begin+max(uint64(len(data)), extent.GetZeros()), size)
		if end >= reported+scanned {
			reported = end
			if err := e.Scanned(); err != nil {
				return err
			}
		}
		if end <= max(begin, e.Offset) {
			continue
		}
		if skip := max(begin, e.Offset) - begin; skip > 0 {
			begin += skip
			data = data[min(skip, uint64(len(data))):]
		}
		if err := exportExtent(e, begin, end, data, out); err != nil {
			return err
		}
	}
}

// exportExtent writes the range from begin to end, whose content is data, or zeros if data is empty. It writes pieces
// of at most exportPiece bytes, and zeros without their bytes.
func exportExtent(e Export, begin, end uint64, data []byte, out *rbddiff.Writer) error {
	withZeros := e.Since != "" && !mutant.On(mutant.ExportWithoutZeros)
	if len(data) == 0 {
		if !withZeros {
			return nil
		}
		return out.Write(rbddiff.Range{Offset: begin, Length: end - begin})
	}
	for begin < end {
		next := min(begin/exportPiece*exportPiece+exportPiece, end)
		r := rbddiff.Range{Offset: begin, Length: next - begin}
		if piece := data[:r.Length]; !isZero(piece) {
			r.Data = piece
		}
		if r.Data != nil || withZeros {
			if err := out.Write(r); err != nil {
				return err
			}
		}
		begin, data = next, data[r.Length:]
	}
	return nil
}
