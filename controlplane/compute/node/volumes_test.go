package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// fakeVolumes is a VolumeController whose volumes have only the fields of their Bound records.
type fakeVolumes struct {
	mu      sync.Mutex
	reports []cloud.VolumeObservation
}

func (f *fakeVolumes) AssignedVolumes(v *store.View, on cloud.NodeID, ids ...cloud.VolumeID) (out []*agentv1.AssignedVolume, err error) {
	all, _, err := BoundVolumes.List(v, 0, string(on))
	for _, r := range all {
		if id := cloud.VolumeID(r.Path[1]); len(ids) == 0 || slices.Contains(ids, id) {
			out = append(out, &agentv1.AssignedVolume{VolumeId: string(id), Generation: r.Value.Generation, Deleted: r.Value.Gone})
		}
	}
	return out, err
}

func (f *fakeVolumes) ObservedVolumes(_ context.Context, _ cloud.NodeID, reports []cloud.VolumeObservation) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports = append(f.reports, reports...)
	return 0, nil
}

func (f *fakeVolumes) VolumesUseImage(_ *store.View, _ cloud.NodeID, sum string) (bool, error) {
	return sum == "sum", nil
}

func (f *fakeVolumes) ServedClasses(_ store.Reader, n *cloud.Node) (names []string, err error) {
	for _, p := range n.StoragePools {
		names = append(names, "class-"+p.Name)
	}
	return names, nil
}

func (f *fakeVolumes) RemoveHost(*store.Tx, cloud.NodeID) error { return nil }

func testVolume(n int) string { return fmt.Sprintf("00000000-0000-7000-c000-%012d", n) }

func (w *world) bind(on cloud.NodeID, id string, b *Bound) {
	w.t.Helper()
	w.update(func(tx *store.Tx) error {
		if b == nil {
			BoundVolumes.Delete(tx, string(on), id)
		} else {
			BoundVolumes.Put(tx, b, string(on), id)
		}
		return nil
	})
}

// TestWatchVolumes checks that a session sends the volumes of its host: first all of them in the chunks of the
// snapshot, then each volume that changes.
func TestWatchVolumes(t *testing.T) {
	w := newWorld(t)
	w.members[1].AttachVolumes(&fakeVolumes{})
	a, b := w.host(1, 1), w.host(1, 2)
	w.update(func(tx *store.Tx) error {
		for n := range 250 {
			BoundVolumes.Put(tx, &Bound{Generation: 1, Gone: n == 7}, string(a.id), testVolume(n))
		}
		BoundVolumes.Put(tx, &Bound{Generation: 1}, string(b.id), testVolume(300))
		return nil
	})
	s := a.watch(t)
	seen := map[string]bool{}
	for {
		m := s.next()
		require.LessOrEqual(t, len(m.GetVolumes()), snapshotChunk)
		for _, v := range m.GetVolumes() {
			require.NotContains(t, seen, v.GetVolumeId())
			seen[v.GetVolumeId()] = v.GetDeleted()
		}
		if m.GetComplete() {
			break
		}
	}
	require.Len(t, seen, 250)
	require.True(t, seen[testVolume(7)])

	w.bind(b.id, testVolume(301), &Bound{Generation: 1})
	w.bind(a.id, testVolume(1), &Bound{Generation: 2})
	m := s.next()
	require.Len(t, m.GetVolumes(), 1)
	require.EqualValues(t, 2, m.GetVolumes()[0].GetGeneration())
	require.Equal(t, w.records.Revision(), m.GetRevision())
	w.bind(a.id, testVolume(1), nil)
	m = s.next()
	require.Empty(t, m.GetVolumes())
	require.Equal(t, []string{testVolume(1)}, m.GetReleasedVolumes())
}

// TestEvictWithVolumes checks that a host with volumes in its storage pools can be evicted only with force. Deleted
// volumes and RBD volumes must not prevent the eviction.
func TestEvictWithVolumes(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	ctx := limited(t)
	h, err := w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	w.bind(h.id, testVolume(1), &Bound{Generation: 1, Pool: "local"})
	w.bind(h.id, testVolume(2), &Bound{Generation: 1, Pool: "local", Gone: true})
	w.bind(h.id, testVolume(3), &Bound{Generation: 1, Class: "ceph"})
	_, err = w.members[1].Evict(ctx, h.id, false)
	f, ok := fault.From(err)
	require.True(t, ok, "the content of a volume is lost without a warning")
	require.Equal(t, []any{fault.FailedPrecondition, ReasonHasVolumes}, []any{f.Kind, f.Reason})
	require.Contains(t, f.Message, "1 volumes")
	require.NotNil(t, w.node(h.id))
	_, err = w.members[1].Evict(ctx, h.id, true)
	require.NoError(t, err)
	require.Nil(t, w.node(h.id))

	h, err = w.join(ctx, newKey(t), "rack-2")
	require.NoError(t, err)
	w.bind(h.id, testVolume(2), &Bound{Generation: 1, Pool: "local", Gone: true})
	w.bind(h.id, testVolume(3), &Bound{Generation: 1, Class: "ceph"})
	_, err = w.members[1].Evict(ctx, h.id, false)
	require.NoError(t, err)
}

// TestReportVolumes checks that a host's reports about its volumes and storage pools are stored, and that reports
// beyond the limits are refused.
func TestReportVolumes(t *testing.T) {
	w := newWorld(t)
	volumes := &fakeVolumes{}
	w.members[1].AttachVolumes(volumes)
	w.follow(1)
	a := w.host(1, 1)
	report := func(r *agentv1.ReportRequest) error {
		s, err := a.Report(limited(t))
		require.NoError(t, err)
		require.NoError(t, s.Send(r))
		_, err = s.CloseAndRecv()
		return err
	}
	require.NoError(t, report(&agentv1.ReportRequest{
		Facts: &agentv1.NodeFacts{StoragePools: []*agentv1.StoragePool{
			{Name: "local", AllocatableGib: 10, Shared: true}, {Name: "nfs", PoolId: testVolume(9), Shared: true},
		}},
		Volumes: []*agentv1.VolumeObservation{{VolumeId: testVolume(1), Generation: 3, Present: true, FlushedGeneration: 2}},
	}))
	require.Equal(t, []cloud.VolumeObservation{{Volume: cloud.VolumeID(testVolume(1)), Generation: 3, Present: true, FlushedGeneration: 2}}, volumes.reports)
	require.Eventually(t, func() bool { return len(w.node(a.id).StoragePools) == 2 }, 10*time.Second, time.Millisecond)
	n := w.node(a.id)
	require.Equal(t, []cloud.StoragePool{
		{Name: "local", AllocatableGiB: 10}, {Name: "nfs", ID: testVolume(9), Shared: true},
	}, n.StoragePools, "a pool without an ID is not shared")
	require.NoError(t, w.members[1].addClasses(n))
	require.Equal(t, []string{"class-local", "class-nfs"}, n.StorageClasses)
	require.Equal(t, []cloud.VolumeDriver{cloud.DriverManaged}, n.VolumeDrivers)

	refused(t, report(&agentv1.ReportRequest{Volumes: make([]*agentv1.VolumeObservation, maxObservations+1)}), codes.InvalidArgument, "at most 1000")
	for _, bad := range [][]*agentv1.StoragePool{
		{{Name: "../etc"}}, {{Name: "a"}, {Name: "a"}}, {{Name: "a", PoolId: "../etc", Shared: true}}, {{Name: "a", AllocatableGib: 1<<32 + 1}}, make([]*agentv1.StoragePool, maxPools+1),
	} {
		refused(t, report(&agentv1.ReportRequest{Facts: &agentv1.NodeFacts{StoragePools: bad}}), codes.InvalidArgument, "storage_pools")
	}
}
