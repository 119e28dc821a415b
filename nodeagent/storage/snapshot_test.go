package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const vol2 = cloud.VolumeID("00000000-0000-4000-8000-000000000002")

func snapshotID(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-0000000000%02d", 50+n) }

// wanted returns the desired state of the snapshot n, which may begin until an hour from now.
func wanted(n int) *agentv1.AssignedSnapshot {
	return &agentv1.AssignedSnapshot{SnapshotId: snapshotID(n), Deadline: time.Now().Add(time.Hour).UnixMilli()}
}

// withSnapshots returns want with these snapshots.
func withSnapshots(want *agentv1.AssignedVolume, all ...*agentv1.AssignedSnapshot) *agentv1.AssignedVolume {
	return next(want, func(v *agentv1.AssignedVolume) { v.Snapshots = all })
}

// seesSnapshot waits until the snapshot n of a volume is reported in this state, and returns the report.
func (h *host) seesSnapshot(of cloud.VolumeID, n int, state cloud.SnapshotState) (out cloud.SnapshotObservation) {
	h.Helper()
	require.Eventually(h, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, s := range h.seen[of].Snapshots {
			if string(s.Snapshot) == snapshotID(n) {
				out = s
			}
		}
		return out.State == state
	}, within, time.Millisecond, "snapshot %d is reported in the state %d, last %+v", n, state, &out)
	return out
}

// snapshotFiles returns the number of files of snapshots in the pool.
func (h *host) snapshotFiles() int {
	h.Helper()
	files, err := filepath.Glob(filepath.Join(h.dir, "local", "*.snapshot.*"))
	require.NoError(h, err)
	return len(files)
}

// TestSnapshotOfDetachedVolume makes a snapshot, a volume from it, and deletes both. An assignment that was read from
// disk must make and delete no snapshot.
func TestSnapshotOfDetachedVolume(t *testing.T) {
	h := newHost(t)
	v := withSnapshots(detached(), wanted(1))
	h.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{vol: v}, true)
	h.seesSnapshot(vol, 1, cloud.SnapshotCopying)
	require.Zero(t, h.snapshotFiles(), "a stored assignment makes no snapshot")
	h.assign(v)
	done := h.seesSnapshot(vol, 1, cloud.SnapshotComplete)
	require.Equal(t, []any{cloud.ConsistencyDetached, cloud.VolumeRaw}, []any{done.Consistency, done.Format})
	require.InDelta(t, time.Now().UnixMilli(), done.TakenAt, float64(within.Milliseconds()))
	made, failed := h.SnapshotCounts()
	require.Equal(t, []uint64{1, 0}, []uint64{made, failed})

	restored := &agentv1.AssignedVolume{
		VolumeId: string(vol2), Generation: 1, Pool: "local", SizeBytes: 2 * mib,
		Source: &agentv1.SnapshotSource{VolumeId: string(vol), SnapshotId: snapshotID(1)},
	}
	h.assign(v, restored)
	h.sees(cloud.VolumeObservation{Volume: vol2, Generation: 1, Present: true, SizeBytes: 2 * mib})

	must := wanted(1)
	must.MustExist = true
	v = withSnapshots(v, must, &agentv1.AssignedSnapshot{SnapshotId: snapshotID(2), Deadline: 1})
	h.assign(v, restored)
	require.Equal(t, done, h.seesSnapshot(vol, 1, cloud.SnapshotComplete))
	late := h.seesSnapshot(vol, 2, cloud.SnapshotFailed)
	require.Equal(t, "the host could not begin the copy in time", late.Error)

	gone := withSnapshots(v, &agentv1.AssignedSnapshot{SnapshotId: snapshotID(1), Deleted: true}, &agentv1.AssignedSnapshot{SnapshotId: snapshotID(2), Deleted: true})
	h.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{vol: gone}, true)
	h.seesSnapshot(vol, 1, cloud.SnapshotCopying)
	require.Equal(t, 3, h.snapshotFiles(), "a stored assignment deletes no snapshot")
	h.assign(gone)
	h.seesSnapshot(vol, 1, cloud.SnapshotAbsent)
	h.seesSnapshot(vol, 2, cloud.SnapshotAbsent)
	require.Zero(t, h.snapshotFiles())

	lost := withSnapshots(v, must)
	lost.Generation = gone.Generation + 1
	h.assign(lost)
	require.Contains(t, h.seesSnapshot(vol, 1, cloud.SnapshotFailed).Error, "is missing now")
	require.Zero(t, h.snapshotFiles(), "a snapshot that was complete is not made again")
}

// TestSnapshotOfUnreachableCluster assigns a snapshot of an RBD volume whose Ceph cluster does not answer. The snapshot
// must fail after its deadline, and not earlier.
func TestSnapshotOfUnreachableCluster(t *testing.T) {
	h := newHost(t)
	h.ceph.options.Program = "/bin/false" // a trivet-rbd that never connects
	h.ceph.options.Log = slog.New(slog.DiscardHandler)
	v := detached()
	v.Pool, v.Rbd = "", &agentv1.RbdPool{Fsid: "f", Monitors: []string{"192.0.2.1"}, Pool: "p", User: "u", Key: "k"}
	late, early, complete := wanted(1), wanted(2), wanted(3)
	late.Deadline, complete.Deadline, complete.MustExist = 1, 1, true
	v = withSnapshots(v, late, early, complete)
	h.assign(v)
	require.Contains(t, h.seesSnapshot(vol, 1, cloud.SnapshotFailed).Error, "the snapshot was not complete in time: ")
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Len(t, h.seen[vol].Snapshots, 1)
	require.False(t, h.seen[vol].Present)
}

// openedCopy is a snapshot of a detached volume. A VM may open the volume while the snapshot is taken.
type openedCopy struct {
	snapshotCopy
	opens, attached bool
}

func (c *openedCopy) Attached() bool { return c.attached }

func (c *openedCopy) copyDetached(context.Context) error {
	c.attached = c.opens
	return nil
}

// TestVMStartsDuringSnapshots takes snapshots of the volumes of a stopped VM, which starts meanwhile. The snapshots
// must be taken again if there are several, because they must have the content of one instant.
func TestVMStartsDuringSnapshots(t *testing.T) {
	quiet, opened := &openedCopy{}, &openedCopy{opens: true}
	require.NoError(t, copyAllDetached(t.Context(), []snapshotCopy{quiet, quiet}))
	require.NoError(t, copyAllDetached(t.Context(), []snapshotCopy{opened}))
	opened.attached = false
	require.ErrorIs(t, copyAllDetached(t.Context(), []snapshotCopy{quiet, opened}), volume.ErrNotNow, "the snapshots are of two instants")
}

// boundedClient fails each call after it has checked the deadline of the call.
type boundedClient struct {
	rbdv1.RbdServiceClient
	t *testing.T
}

func (c boundedClient) GetRecord(ctx context.Context, _ *rbdv1.GetRecordRequest, _ ...grpc.CallOption) (*rbdv1.Record, error) {
	end, bounded := ctx.Deadline()
	require.True(c.t, bounded)
	require.False(c.t, end.After(time.Now().Add(rbdSnapshotWithin)), "a call may wait as long as the copy of a file")
	return nil, status.Error(codes.Unavailable, "the cluster is away")
}

// TestRBDSnapshotIsBounded begins a snapshot of an RBD volume with the deadline that the copy of a file has, 12 hours.
// The calls to the Ceph cluster must have an earlier deadline.
func TestRBDSnapshotIsBounded(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), copyWithin)
	defer cancel()
	p := rbdSnapshots{volume.NewRBDPool(volume.RBDOptions{Client: boundedClient{t: t}, Pool: "p"})}
	_, err := p.begin(ctx, copyMember{detached(), volume.SnapshotRef{Volume: string(vol), ID: snapshotID(1)}})
	require.ErrorContains(t, err, "the cluster is away")
}

// fakeQEMU copies volumes in place of the QEMU of a VM.
type fakeQEMU struct {
	refusals atomic.Int32 // how many calls still fail with ErrNotNow
	calls    atomic.Int32
	err      error
	block    chan struct{} // if it is not nil, a copy waits until it is closed or the context ends
	frozen   bool
}

var taken = time.UnixMilli(1_800_000_000_000)

func (q *fakeQEMU) copy(ctx context.Context, of cloud.VMID, targets []volume.CopyTarget) (volume.Copied, error) {
	if q.refusals.Add(-1) >= 0 || of != vm {
		return volume.Copied{}, volume.ErrNotNow
	}
	q.calls.Add(1)
	if q.block != nil {
		select {
		case <-q.block:
		case <-ctx.Done():
			return volume.Copied{}, ctx.Err()
		}
	}
	return volume.Copied{Taken: taken, Frozen: q.frozen}, q.err
}

// open attaches a volume to the VM, and opens it like the VM's QEMU.
func (h *host) open(want *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	h.Helper()
	want = attach(want)
	h.assign(want)
	files, err := h.Open(h.Context(), vm, "data", want)
	require.NoError(h, err)
	h.Cleanup(files.Close)
	return want
}

// TestSnapshotOfAttachedVolume makes snapshots of a volume that QEMU has open. A copy that QEMU cannot begin is tried
// again, one that fails is not.
func TestSnapshotOfAttachedVolume(t *testing.T) {
	h := newHost(t)
	q := &fakeQEMU{}
	h.o.Copy = q.copy
	q.refusals.Store(1)
	v := h.open(detached())
	v = withSnapshots(v, wanted(1))
	h.assign(v)
	done := h.seesSnapshot(vol, 1, cloud.SnapshotComplete)
	require.Equal(t, []any{taken.UnixMilli(), cloud.ConsistencyCrash, cloud.VolumeQCOW2}, []any{done.TakenAt, done.Consistency, done.Format})
	q.frozen = true
	v = withSnapshots(v, wanted(1), wanted(2))
	h.assign(v)
	require.Equal(t, cloud.ConsistencyFileSystem, h.seesSnapshot(vol, 2, cloud.SnapshotComplete).Consistency)
	q.err = errors.New("write: No space left on device")
	v = withSnapshots(v, wanted(1), wanted(2), wanted(3))
	h.assign(v)
	require.Equal(t, "the storage pool is full", h.seesSnapshot(vol, 3, cloud.SnapshotFailed).Error)
	require.Equal(t, int32(3), q.calls.Load())
	require.Equal(t, 5, h.snapshotFiles(), "a failed snapshot has a record and no content")
	_, failed := h.SnapshotCounts()
	require.Equal(t, uint64(1), failed)
}

// TestSnapshotsOfOneInstant makes snapshots of two volumes by one call of QEMU, and of a group of which one volume is
// not open. If one copy of a group fails, all fail.
func TestSnapshotsOfOneInstant(t *testing.T) {
	h := newHost(t)
	q := &fakeQEMU{}
	h.o.Copy = q.copy
	group := func(n int, id string) *agentv1.AssignedSnapshot {
		s := wanted(n)
		s.GroupId, s.GroupVolumes = id, []string{string(vol), string(vol2)}
		return s
	}
	second := detached()
	second.VolumeId = string(vol2)
	a := h.open(detached())
	a = withSnapshots(a, group(1, "g"))
	h.assign(a, second)
	h.seesSnapshot(vol, 1, cloud.SnapshotCopying)
	require.Zero(t, q.calls.Load(), "nothing is copied before all volumes of the group are known")
	b := withSnapshots(second, group(2, "g"))
	h.assign(a, b)
	first, other := h.seesSnapshot(vol, 1, cloud.SnapshotComplete), h.seesSnapshot(vol2, 2, cloud.SnapshotComplete)
	require.Equal(t, first.TakenAt, other.TakenAt)
	require.Equal(t, []cloud.SnapshotConsistency{cloud.ConsistencyCrash, cloud.ConsistencyDetached}, []cloud.SnapshotConsistency{first.Consistency, other.Consistency})

	q.err = errors.New("broken")
	a, b = withSnapshots(a, group(3, "h")), withSnapshots(b, group(4, "h"))
	h.assign(a, b)
	h.seesSnapshot(vol, 3, cloud.SnapshotFailed)
	require.Equal(t, "broken", h.seesSnapshot(vol2, 4, cloud.SnapshotFailed).Error)
}

// TestSnapshotEndsEarly deletes a snapshot and stops the agent while QEMU copies. The deleted one is removed, and the
// other one fails and is not repeated by the next agent.
func TestSnapshotEndsEarly(t *testing.T) {
	h := newHost(t)
	q := &fakeQEMU{block: make(chan struct{})}
	h.o.Copy = q.copy
	v := withSnapshots(h.open(detached()), wanted(1))
	h.assign(v)
	require.Eventually(t, func() bool { return q.calls.Load() == 1 }, within, time.Millisecond)
	h.assign(withSnapshots(v, &agentv1.AssignedSnapshot{SnapshotId: snapshotID(1), Deleted: true}))
	h.seesSnapshot(vol, 1, cloud.SnapshotAbsent)
	require.Zero(t, h.snapshotFiles())

	v = withSnapshots(v, wanted(2))
	v.Generation++
	h.assign(v)
	require.Eventually(t, func() bool { return q.calls.Load() == 2 }, within, time.Millisecond)
	h.stop()
	require.Equal(t, 1, h.snapshotFiles(), "the copy is removed when the agent stops")

	// An agent that is killed leaves the copy behind. The file of the snapshot is then removed by the next agent.
	ref := volume.SnapshotRef{Volume: string(vol), ID: snapshotID(3)}
	_, err := h.Pools()[0].BeginSnapshot(t.Context(), ref, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	finished := make(chan struct{})
	go func() { defer close(finished); _ = h.Storage.Run(ctx) }()
	defer func() { cancel(); <-finished }()
	h.assign(withSnapshots(v, wanted(2), wanted(3)))
	h.seesSnapshot(vol, 2, cloud.SnapshotFailed)
	require.Equal(t, "the agent of the host ended during the copy", h.seesSnapshot(vol, 3, cloud.SnapshotFailed).Error)
	require.Equal(t, int32(2), q.calls.Load())
	_, err = os.Lstat(filepath.Join(h.dir, "local", string(vol)+"."+snapshotID(3)+".snapshot.qcow2"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
