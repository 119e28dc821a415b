package uplink

import (
	"bufio"
	"context"
	"io"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

const (
	// maxSnapshots is the maximum number of snapshots that are sent concurrently. The control plane has the same limit,
	// and a lower one for each tenant.
	maxSnapshots = 16
	// snapshotChunk is the maximum size of one message, in bytes.
	snapshotChunk = 256 << 10
	// snapshotSilence is the time after which an empty message is sent while the host compares snapshots and has no
	// data to send. The member ends a transfer that is silent for longer than 30 s.
	snapshotSilence = 2 * time.Second
)

// SnapshotWriter receives the content of a snapshot.
type SnapshotWriter interface {
	io.Writer
	// Scanned must be called regularly while nothing is written. An error means that the reader is gone.
	Scanned() error
}

// sendSnapshot starts to send the snapshot that r requests, or stops it if r is a cancellation.
func (l *Link) sendSnapshot(r *agentv1.SnapshotRequest) {
	if r.GetCancel() {
		l.snapshots.cancel(r.GetRequestId())
		return
	}
	one := transfer{id: r.GetRequestId(), log: []any{"volume", r.GetVolumeId(), "snapshot", r.GetSnapshotId()}}
	one.open = func(ctx context.Context, agent agentv1.AgentServiceClient) (sendStream, error) {
		stream, err := agent.SendSnapshot(ctx)
		return &memberStream[agentv1.SendSnapshotRequest, agentv1.SendSnapshotResponse]{stream, snapshotMessage}, err
	}
	if l.o.Snapshot != nil {
		one.write = func(ctx context.Context, stream sendStream) error {
			w := newSnapshotWriter(ctx, stream)
			if err := l.o.Snapshot(ctx, r, w); err != nil {
				return err
			}
			return w.Flush()
		}
	}
	l.snapshots.begin(one)
}

func snapshotMessage(id string, data []byte, problem, _ string) *agentv1.SendSnapshotRequest {
	return &agentv1.SendSnapshotRequest{RequestId: id, Data: data, Error: problem}
}

// snapshotWriter is the SnapshotWriter of a stream.
type snapshotWriter struct {
	*bufio.Writer
	stream sendStream
	last   time.Time // of the last message
}

func newSnapshotWriter(ctx context.Context, stream sendStream) *snapshotWriter {
	w := &snapshotWriter{stream: stream, last: time.Now()}
	w.Writer = bufio.NewWriterSize(&pieces{stream, snapshotChunk, func(int) error {
		w.last = time.Now()
		return ctx.Err()
	}}, snapshotChunk)
	return w
}

func (w *snapshotWriter) Scanned() error {
	if time.Since(w.last) < snapshotSilence {
		return nil
	}
	w.last = time.Now()
	if w.Buffered() > 0 {
		return w.Flush()
	}
	return w.stream.sendData(nil)
}
