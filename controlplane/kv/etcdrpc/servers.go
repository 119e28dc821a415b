package etcdrpc

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
)

// keys implements pb.KVServer.
type keys struct {
	pb.UnsafeKVServer
	*kv.Service
}

// RangeStream implements pb.KVServer.
func (k *keys) RangeStream(r *pb.RangeRequest, stream pb.KV_RangeStreamServer) error {
	return k.Service.RangeStream(stream.Context(), r, func(piece *pb.RangeResponse) error {
		return stream.Send(&pb.RangeStreamResponse{RangeResponse: piece})
	})
}

// watches implements pb.WatchServer.
type watches struct {
	pb.UnsafeWatchServer
	service *kv.Service
}

// Watch implements pb.WatchServer.
func (w *watches) Watch(stream pb.Watch_WatchServer) error {
	err := w.service.Watch(stream.Context(), stream.Recv, func(make func() (*pb.WatchResponse, error)) error {
		return stream.SendMsg(rpc.Lazy(func() (*rpc.Encoded, error) {
			r, err := make()
			if r == nil || err != nil {
				return nil, err
			}
			return rpc.Encode(r)
		}))
	})
	if errors.Is(err, context.Canceled) {
		return rpctypes.ErrGRPCWatchCanceled
	}
	return err
}

// leases implements pb.LeaseServer.
type leases struct {
	pb.UnsafeLeaseServer
	*kv.Service
}

// LeaseKeepAlive implements pb.LeaseServer. It renews a lease for each request of the stream.
func (l *leases) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	ended := make(chan error, 1)
	// The goroutine ends with the stream: Recv fails once this function has returned.
	go func() { ended <- l.keepAlive(stream) }()
	select {
	case err := <-ended:
		return err
	case <-stream.Context().Done():
		return context.Cause(stream.Context())
	}
}

func (l *leases) keepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		out, err := l.Service.LeaseKeepAlive(stream.Context(), r)
		if err != nil {
			return err
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// users implements pb.AuthServer.
type users struct {
	pb.UnsafeAuthServer
	*kv.Service
}

// maintenance implements pb.MaintenanceServer.
type maintenance struct {
	pb.UnsafeMaintenanceServer
	*kv.Service
	dir string
}

// Snapshot implements pb.MaintenanceServer. It sends a snapshot file for etcdutl in several messages; the last one
// contains the SHA-256.
func (m *maintenance) Snapshot(_ *pb.SnapshotRequest, stream pb.Maintenance_SnapshotServer) error {
	file, err := m.Service.Snapshot(stream.Context(), m.dir)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Stream(stream.Context(), &chunkWriter{stream: stream, remaining: file.Size()})
}

// chunkWriter is an io.Writer that sends its input as SnapshotResponse messages.
type chunkWriter struct {
	stream    pb.Maintenance_SnapshotServer
	remaining int64
}

// chunkBytes is the maximum size of the snapshot data in one message, in bytes, as in etcd.
const chunkBytes = 32 << 10

// Write implements io.Writer.
func (p *chunkWriter) Write(b []byte) (n int, err error) {
	for len(b) > 0 {
		size := min(len(b), chunkBytes)
		p.remaining = max(p.remaining-int64(size), 0)
		// gRPC may encode the message after Send has returned, so each message needs its own copy.
		blob := append([]byte(nil), b[:size]...)
		if err := p.stream.Send(&pb.SnapshotResponse{RemainingBytes: uint64(p.remaining), Blob: blob, Version: snapfile.StorageVersion}); err != nil {
			return n, err
		}
		n, b = n+size, b[size:]
	}
	return n, nil
}
