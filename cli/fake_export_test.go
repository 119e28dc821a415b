package main

import (
	"bytes"
	"fmt"

	"google.golang.org/grpc"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// ExportSnapshot sends two ranges: 4 KiB of data at the beginning of the volume, and at 1 MiB. A fault of
// ExportSnapshot "after" breaks the stream between them.
func (f *fakeSnapshots) ExportSnapshot(in *storagev1.ExportSnapshotRequest, stream grpc.ServerStreamingServer[storagev1.ExportSnapshotResponse]) error {
	f.cloud.mu.Lock()
	f.cloud.calls = append(f.cloud.calls, fmt.Sprintf("  from %d", in.GetOffset()))
	one, err := f.find(in.GetSnapshotId())
	f.cloud.mu.Unlock()
	if err == nil {
		err = f.cloud.fault("", "ExportSnapshot", false)
	}
	if err != nil {
		return err
	}
	var out bytes.Buffer
	w, err := rbddiff.NewWriter(&out, rbddiff.Header{From: in.GetSinceSnapshotId(), To: in.GetSnapshotId(), Size: one.GetSizeGib() << 30})
	if err != nil {
		return err
	}
	if in.GetOffset() == 0 {
		if err := w.Write(rbddiff.Range{Length: 4096, Data: bytes.Repeat([]byte("a"), 4096)}); err != nil {
			return err
		}
	}
	if err := stream.Send(&storagev1.ExportSnapshotResponse{Data: bytes.Clone(out.Bytes())}); err != nil {
		return err
	}
	out.Reset()
	if err := f.cloud.fault("", "ExportSnapshot", true); err != nil {
		return err
	}
	if in.GetOffset() <= 1<<20 {
		if err := w.Write(rbddiff.Range{Offset: 1 << 20, Length: 4096, Data: bytes.Repeat([]byte("b"), 4096)}); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return stream.Send(&storagev1.ExportSnapshotResponse{Data: out.Bytes()})
}
