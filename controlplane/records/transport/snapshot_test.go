package transport

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// dial returns a gRPC client of the member to, with the client certificate own.
func (w *testCluster) dial(to uint64, own mtls.Source) peerv1.PeerServiceClient {
	config := mtls.Client(own, w.authority.Certificate(), mtls.OnlyKind(mtls.Member))
	conn, err := grpc.NewClient("passthrough:///"+w.addresses[to], grpc.WithTransportCredentials(credentials.NewTLS(config)))
	require.NoError(w.t, err)
	w.t.Cleanup(func() { conn.Close() })
	return peerv1.NewPeerServiceClient(conn)
}

func (w *testCluster) as(id string) mtls.Source {
	return issued(w.t, w.authority, mtls.Member, id, time.Now())
}

// calls makes one empty call of each method and returns the first error of each, by method name.
func calls(ctx context.Context, c peerv1.PeerServiceClient) map[string]error {
	out := map[string]error{}
	_, out["Call"] = c.Call(ctx, &peerv1.CallRequest{Command: "test"})
	snapshot, err := c.SendSnapshot(ctx)
	if err == nil {
		_, err = snapshot.CloseAndRecv()
	}
	out["SendSnapshot"] = err
	open, err := c.Open(ctx, &peerv1.CallRequest{Command: "test"})
	if err == nil {
		_, err = open.Recv()
	}
	out["Open"] = err
	image, err := c.ReadImage(ctx, &peerv1.ReadImageRequest{Sha256: "x"})
	if err == nil {
		_, err = image.Recv()
	}
	out["ReadImage"] = err
	part, err := c.StoreImagePart(ctx)
	if err == nil {
		_, err = part.CloseAndRecv()
	}
	out["StoreImagePart"] = err
	return out
}

// TestWrongCertificatesAreRefused checks that the peer port refuses every certificate except that of another current
// member.
func TestWrongCertificatesAreRefused(t *testing.T) {
	w := newTestCluster(t, 2, 2)
	ctx := limited(t)
	now := time.Now()
	forTenants, err := w.authority.IssueTenants([]string{"127.0.0.1"}, now, time.Hour)
	require.NoError(t, err)
	tenants := func() (*tls.Certificate, error) { return forTenants, nil }
	for name, c := range map[string]struct {
		own  mtls.Source
		code codes.Code
	}{
		"no certificate":                                      {nil, codes.Unavailable},
		"certificate of a host":                               {issued(t, w.authority, mtls.Node, "2", now), codes.Unavailable},
		"certificate of the ports for tenants":                {tenants, codes.Unavailable},
		"a member of another cluster":                         {issued(t, authority(t, "other"), mtls.Member, "2", now), codes.Unavailable},
		"certificate of another authority with the same name": {issued(t, authority(t, "test"), mtls.Member, "2", now), codes.Unavailable},
		"expired certificate":                                 {issued(t, w.authority, mtls.Member, "2", now.Add(-2*time.Hour)), codes.Unavailable},
		"a member that is not in the cluster":                 {w.as("3"), codes.PermissionDenied},
		"the certificate of the member itself":                {w.as("1"), codes.PermissionDenied},
		"a name that is not a number":                         {w.as("two"), codes.PermissionDenied},
	} {
		for method, err := range calls(ctx, w.dial(1, c.own)) {
			require.Equal(t, c.code, status.Code(err), "%s: %s: %v", name, method, err)
		}
		err := w.sendBytes(1, c.own, raftProtocol, nil)
		require.Error(t, err, name)
		require.Equal(t, c.code == codes.PermissionDenied, fault.Is(err, fault.PermissionDenied), "%s: %v", name, err)
	}
	got := calls(ctx, w.dial(1, w.as("2")))
	require.NoError(t, got["Call"])
	require.Equal(t, codes.NotFound, status.Code(got["ReadImage"]))
	require.Equal(t, codes.InvalidArgument, status.Code(got["StoreImagePart"]))
}

// TestServerWithAnotherCertificate checks that connecting to a member fails if the server at its address presents
// another member's certificate.
func TestServerWithAnotherCertificate(t *testing.T) {
	w := newTestCluster(t, 3, 2, 3)
	m, err := New(Options{
		Self: 2, Members: map[uint64]string{2: w.addresses[2], 3: w.addresses[1]}, Certificate: w.as("2"), Authority: w.authority,
		Log: w.servers[1].mesh.opts.Log,
	})
	require.NoError(t, err)
	_, err = m.Call(limited(t), 3, "test", nil, nil)
	require.ErrorContains(t, err, "cannot be reached")
	_, err = m.connect(limited(t), m.link(3))
	require.ErrorContains(t, err, "member/1 answers at the address of member 3")
}

func chunkOf(name, data string, last bool) *peerv1.SnapshotChunk {
	return &peerv1.SnapshotChunk{File: name, Data: []byte(data), Last: last, Crc32C: crc32.Checksum([]byte(data), castagnoli)}
}

// TestInvalidSnapshotsAreRefused sends invalid snapshots. The receiver must refuse each, delete its files, and write
// none outside of the snapshot's directory.
func TestInvalidSnapshotsAreRefused(t *testing.T) {
	w := newTestCluster(t, 3, 2, 3)
	s := w.servers[1]
	ctx := limited(t)
	head := func(from, to uint64) *peerv1.SnapshotChunk {
		kind := raftpb.MsgSnap
		e := message.Envelope{From: from, To: to, Kind: message.KindRaft, Group: 1, Raft: &raftpb.Message{Type: &kind, From: &from, To: &to}}
		b, err := e.AppendTo(nil)
		require.NoError(t, err)
		return &peerv1.SnapshotChunk{Envelope: b}
	}
	good := head(2, 1)
	damaged := chunkOf("tape", "data", true)
	damaged.Crc32C++
	for name, c := range map[string]struct {
		chunks []*peerv1.SnapshotChunk
		code   codes.Code
	}{
		"no chunks":                                        {nil, codes.Internal},
		"no envelope":                                      {[]*peerv1.SnapshotChunk{chunkOf("tape", "data", true)}, codes.InvalidArgument},
		"an envelope from another member":                  {[]*peerv1.SnapshotChunk{head(3, 1), chunkOf("tape", "data", true)}, codes.PermissionDenied},
		"an envelope to another member":                    {[]*peerv1.SnapshotChunk{head(2, 3), chunkOf("tape", "data", true)}, codes.PermissionDenied},
		"a path above the directory":                       {[]*peerv1.SnapshotChunk{good, chunkOf("../evil", "data", true)}, codes.InvalidArgument},
		"a path above the directory, below a subdirectory": {[]*peerv1.SnapshotChunk{good, chunkOf("a/../../evil", "data", true)}, codes.InvalidArgument},
		"an absolute path":                                 {[]*peerv1.SnapshotChunk{good, chunkOf(filepath.Join(s.dir, "evil"), "data", true)}, codes.InvalidArgument},
		"a file without a name":                            {[]*peerv1.SnapshotChunk{good, chunkOf("", "data", true)}, codes.InvalidArgument},
		"the directory itself":                             {[]*peerv1.SnapshotChunk{good, chunkOf(".", "data", true)}, codes.Internal},
		"a zero byte in a name":                            {[]*peerv1.SnapshotChunk{good, chunkOf("tape\x00", "data", true)}, codes.Internal},
		"a wrong checksum":                                 {[]*peerv1.SnapshotChunk{good, damaged}, codes.InvalidArgument},
		"a file twice":                                     {[]*peerv1.SnapshotChunk{good, chunkOf("tape", "data", true), chunkOf("tape", "data", true)}, codes.Internal},
		"a file as a directory":                            {[]*peerv1.SnapshotChunk{good, chunkOf("tape", "data", true), chunkOf("tape/x", "data", true)}, codes.Internal},
		"an incomplete file":                               {[]*peerv1.SnapshotChunk{good, chunkOf("tape", "data", false)}, codes.Internal},
		"a file after an incomplete file":                  {[]*peerv1.SnapshotChunk{good, chunkOf("a", "data", false), chunkOf("b", "data", true)}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			stream, err := w.dial(1, w.as("2")).SendSnapshot(ctx)
			require.NoError(t, err)
			for _, chunk := range c.chunks {
				if err := stream.Send(chunk); err != nil {
					require.ErrorIs(t, err, io.EOF)
				}
			}
			_, err = stream.CloseAndRecv()
			require.Equal(t, c.code, status.Code(err), "%v", err)
			require.Empty(t, s.snapshots())
			require.NoFileExists(t, filepath.Join(s.dir, "evil"))
			require.NoFileExists(t, filepath.Join(s.runner.SnapshotDir(), "evil"))
		})
	}
	require.NoError(t, s.runner.Err(), "the member continues to run")
}

// TestInterruptedSnapshots checks that an interrupted transfer leaves no files, and that a sender that starts over
// again and again uses at most two directories.
func TestInterruptedSnapshots(t *testing.T) {
	w := newTestCluster(t, 2, 2)
	s := w.servers[1]
	var streams []peerv1.PeerService_SendSnapshotClient
	var cancels []context.CancelFunc
	e := message.Envelope{From: 2, To: 1, Kind: message.KindDirIDRequest}
	frame, err := e.AppendTo(nil)
	require.NoError(t, err)
	l := s.mesh.links[2]
	for n := 1; n <= 2; n++ {
		ctx, cancel := context.WithCancel(limited(t))
		stream, err := w.dial(1, w.as("2")).SendSnapshot(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(&peerv1.SnapshotChunk{Envelope: frame}))
		require.NoError(t, stream.Send(chunkOf("half", "data", false)))
		require.Eventually(t, func() bool { return len(s.snapshots()) == n }, 10*time.Second, time.Millisecond)
		streams, cancels = append(streams, stream), append(cancels, cancel)
	}
	third, err := w.dial(1, w.as("2")).SendSnapshot(limited(t))
	require.NoError(t, err)
	_, err = third.CloseAndRecv()
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	for i := range streams {
		cancels[i]()
	}
	require.Eventually(t, func() bool { return len(s.snapshots()) == 0 && len(l.arriving) == 0 }, 10*time.Second, time.Millisecond)
}

// TestSnapshotResultIsReported checks the errors of sendSnapshot, from which the result that consensus gets is derived.
func TestSnapshotResultIsReported(t *testing.T) {
	w := newTestCluster(t, 2)
	m := w.servers[1].mesh
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tape"), large, 0o600))
	ctx := limited(t)
	// The receiver refuses envelopes in the name of another member than the sender. sendSnapshot must return that
	// refusal, not only that the stream was broken.
	err := m.sendSnapshot(ctx, message.Envelope{From: 7, To: 2, Kind: message.KindDirIDRequest}, dir)
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	require.Empty(t, w.servers[2].snapshots())
	m.links[2].snapshots <- struct{}{}
	require.ErrorContains(t, m.sendSnapshot(ctx, message.Envelope{From: 1, To: 2}, dir), "under way")
	<-m.links[2].snapshots
	require.ErrorContains(t, m.sendSnapshot(ctx, message.Envelope{From: 1, To: 5}, dir), "no such member")
	stopped, stop := context.WithCancel(ctx)
	stop()
	require.ErrorContains(t, m.sendSnapshot(stopped, message.Envelope{From: 1, To: 2, Kind: message.KindDirIDRequest}, dir), "canceled")
	require.Empty(t, m.links[2].snapshots, "another snapshot can be sent")
}

// TestImages checks that ReadImage returns the bytes of an image from any offset, and reports errors.
func TestImages(t *testing.T) {
	w := newTestCluster(t, 2)
	images := filepath.Join(w.servers[1].dir, "images")
	require.NoError(t, os.MkdirAll(images, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(images, "sum"), large, 0o600))
	ctx := limited(t)
	m := w.servers[2].mesh
	for _, at := range []int{0, 1, chunk, len(large) - 1, len(large), len(large) + 1} {
		r, err := m.ReadImage(ctx, 1, "sum", uint64(at))
		require.NoError(t, err)
		got, err := io.ReadAll(r)
		require.NoError(t, err)
		require.True(t, bytes.Equal(large[min(at, len(large)):], got), at)
		require.NoError(t, r.Close())
	}
	for sum, code := range map[string]codes.Code{"none": codes.NotFound} {
		r, err := m.ReadImage(ctx, 1, sum, 0)
		require.NoError(t, err)
		_, err = io.ReadAll(r)
		require.Equal(t, code, status.Code(err), "%v", err)
		require.NoError(t, r.Close())
	}
	r, err := m.ReadImage(ctx, 1, "sum", 1<<63)
	require.NoError(t, err)
	_, err = io.ReadAll(r)
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.NoError(t, r.Close())
	_, err = m.ReadImage(ctx, 9, "sum", 0)
	require.Error(t, err)

	// A read error in the middle of the image must not look like its end.
	w.servers[1].mesh.images = broken{}
	r, err = m.ReadImage(ctx, 1, "sum", 0)
	require.NoError(t, err)
	got, err := io.ReadAll(r)
	require.Equal(t, codes.Internal, status.Code(err), "%v", err)
	require.Equal(t, "some", string(got))
	require.NoError(t, r.Close())
}

// broken implements Images with files whose first Read succeeds and whose later ones fail.
type broken struct{ reads int }

func (broken) Open(string) (io.ReadSeekCloser, error) { return &broken{}, nil }
func (broken) StorePart(_ context.Context, _ string, r io.Reader) error {
	return errors.New("input/output error")
}
func (*broken) Seek(offset int64, _ int) (int64, error) { return offset, nil }
func (*broken) Close() error                            { return nil }
func (b *broken) Read(p []byte) (int, error) {
	if b.reads++; b.reads > 1 {
		return 0, errors.New("input/output error")
	}
	return copy(p, "some"), nil
}

// TestStorePart checks that StorePart stores all bytes of a part on another member, and reports that member's errors.
func TestStorePart(t *testing.T) {
	w := newTestCluster(t, 2)
	images := filepath.Join(w.servers[1].dir, "images")
	require.NoError(t, os.MkdirAll(images, 0o700))
	m := w.servers[2].mesh
	for i, part := range [][]byte{large, large[:1], large[:chunk], large[:chunk+1]} {
		name := strconv.Itoa(i)
		require.NoError(t, m.StorePart(limited(t), 1, name, part))
		got, err := os.ReadFile(filepath.Join(images, name))
		require.NoError(t, err)
		require.True(t, bytes.Equal(part, got), name)
	}
	w.servers[1].mesh.images = broken{}
	require.Equal(t, codes.Internal, status.Code(errors.Unwrap(m.StorePart(limited(t), 1, "sum", large))))
	require.ErrorContains(t, m.StorePart(limited(t), 9, "sum", large), "member 9")
}

// TestImageStalls checks that reading an image fails if the member stops sending.
func TestImageStalls(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	gave := false
	r := &imageReader{member: 3, ctx: ctx, cancel: cancel, stall: time.Millisecond, recv: func() (*peerv1.ReadImageResponse, error) {
		if !gave {
			gave = true
			return &peerv1.ReadImageResponse{Data: []byte("some")}, nil
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	got, err := io.ReadAll(r)
	require.Equal(t, "some", string(got))
	require.ErrorIs(t, err, errStalled)
	require.ErrorContains(t, err, "member 3")
}

func TestChunks(t *testing.T) {
	send := func([]byte) error { return errors.New("the reader has gone") }
	require.ErrorContains(t, Chunks(bytes.NewReader(large), 0, send), "gone")
	require.NoError(t, Chunks(bytes.NewReader(nil), 0, send), "an empty reader is not an error")
	require.True(t, fault.Is(Chunks(bytes.NewReader(large), 1<<63, send), fault.InvalidArgument))
	require.NoError(t, Chunks(bytes.NewReader(large), uint64(len(large)), send))
}
