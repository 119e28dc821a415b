package snapshot

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/node/nodetest"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	acme  = cloud.Tenant{Org: "acme", Project: "web"}
	other = cloud.Tenant{Org: "evil", Project: "lair"}
)

const vm = cloud.VMID("0190a000-0000-7000-8000-00000000000a")

// world is a nodetest.World with the services for volumes and snapshots, and one host with a pool of 100 GiB.
type world struct {
	*nodetest.World
	t         testing.TB
	volumes   *volume.Service
	snapshots *Service
	host      cloud.NodeID
	reads     []Content // the calls of read
}

// read is the Reader of the service.
func (w *world) read(_ context.Context, c Content, send func([]byte) error) error {
	w.reads = append(w.reads, c)
	return send([]byte("content"))
}

func newWorld(t testing.TB) *world {
	base := nodetest.New(t, nil, acme, other)
	w := &world{World: base, t: t, volumes: volume.New(volume.Options{
		Store: base.Store, Commands: base.Commands, Key: clusterkey.Generate(), Log: base.Log,
	})}
	w.snapshots = New(base.Store, base.Commands, w.volumes, w.read)
	require.NoError(t, storageclass.New(base.Store, base.Commands, clusterkey.Generate()).Bootstrap(t.Context()))
	w.Nodes.AttachVolumes(w.volumes)
	w.Go(w.Nodes.Follow)
	w.host = w.AddHost("h1", cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 100}}
	})
	return w
}

// as returns the context of a call by a project member of the tenant t with an idempotency key, unless key is empty.
func (w *world) as(t cloud.Tenant, key string) context.Context {
	c := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, IdempotencyKey: key,
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}
	return auth.With(w.t.Context(), c, auth.RPC)
}

// volume creates a volume and attaches it to the VM as a disk with the same name.
func (w *world) volume(name string, gib uint64) cloud.VolumeID {
	w.t.Helper()
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: gib}, "", [32]byte{})
	require.NoError(w.t, err)
	w.Update(func(tx *store.Tx) error { return volume.Attach(tx, acme, out.Volume.ID, vm, name, w.host) })
	return out.Volume.ID
}

func (w *world) create(of cloud.VolumeID, name string) (cloud.Snapshot, error) {
	out, err := w.snapshots.Create(w.as(acme, ""), acme, cloud.Snapshot{Name: name, Volume: of}, [32]byte{})
	if err != nil {
		return cloud.Snapshot{}, err
	}
	return out.Snapshots[0], nil
}

// assigned returns the desired state of a volume on the host.
func (w *world) assigned(id cloud.VolumeID) *agentv1.AssignedVolume {
	w.t.Helper()
	var out []*agentv1.AssignedVolume
	require.NoError(w.t, w.Store.Local(func(v *store.View) (err error) {
		out, err = w.volumes.AssignedVolumes(v, w.host, id)
		return err
	}))
	require.Len(w.t, out, 1)
	return out[0]
}

// report reports a snapshot as the host, with the present generation of its volume. It returns the number of changed
// volumes.
func (w *world) report(s cloud.Snapshot, o cloud.SnapshotObservation) int {
	w.t.Helper()
	return w.reportAt(s, w.assigned(s.Volume).Generation, o)
}

func (w *world) reportAt(s cloud.Snapshot, generation uint64, o cloud.SnapshotObservation) int {
	w.t.Helper()
	o.Snapshot = s.ID
	n, err := w.volumes.ObservedVolumes(w.t.Context(), w.host, []cloud.VolumeObservation{{
		Volume: s.Volume, Generation: generation, Present: true, Snapshots: []cloud.SnapshotObservation{o},
	}})
	require.NoError(w.t, err)
	return n
}

func (w *world) get(id cloud.SnapshotID) *cloud.Snapshot {
	w.t.Helper()
	s, err := w.snapshots.Get(w.t.Context(), acme, id)
	require.NoError(w.t, err)
	return s
}

func (w *world) allocated() uint64 { return w.Node(w.host).PoolAllocated["local"] }

// complete is the report of a complete copy of the instant 1000.
var complete = cloud.SnapshotObservation{
	State: cloud.SnapshotComplete, TakenAt: 1000, Consistency: cloud.ConsistencyCrash, Format: cloud.VolumeQCOW2, StoredBytes: 5,
}

// TestSnapshotLife creates a snapshot of a volume, makes a volume from it, and deletes all of them.
func TestSnapshotLife(t *testing.T) {
	w := newWorld(t)
	data := w.volume("data", 6)
	generation := w.assigned(data).Generation
	out, err := w.snapshots.Create(w.as(acme, "k"), acme, cloud.Snapshot{Name: "daily", Volume: data}, [32]byte{1})
	require.NoError(t, err)
	s := out.Snapshots[0]
	again, err := w.snapshots.Create(w.as(acme, "k"), acme, cloud.Snapshot{Name: "daily", Volume: data}, [32]byte{1})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, s.ID, again.Snapshots[0].ID)
	require.Equal(t, []any{cloud.SnapshotPending, uint64(6), w.host, "ada"}, []any{s.Status, s.SizeGiB, s.Node, s.CreatedBy[:3]})
	require.Equal(t, uint64(12), w.allocated(), "a snapshot takes the room of its volume")
	sent := w.assigned(data)
	require.Greater(t, sent.Generation, generation, "the host must receive the snapshot")
	require.Equal(t, []any{string(s.ID), false, false, s.Deadline},
		[]any{sent.Snapshots[0].SnapshotId, sent.Snapshots[0].MustExist, sent.Snapshots[0].Deleted, sent.Snapshots[0].Deadline})

	_, err = w.create(data, "second")
	require.ErrorContains(t, err, "is PENDING")
	_, err = w.volumes.Resize(w.as(acme, ""), acme, data, 7, [32]byte{})
	require.ErrorContains(t, err, "is PENDING")
	_, err = w.snapshots.CreateVolume(w.as(acme, ""), acme, s.ID, cloud.Volume{Name: "early"}, [32]byte{})
	require.ErrorContains(t, err, "is PENDING, not AVAILABLE")
	require.Equal(t, 1, w.report(s, cloud.SnapshotObservation{State: cloud.SnapshotCopying}), "the volume is present")
	require.Zero(t, w.report(s, cloud.SnapshotObservation{State: cloud.SnapshotCopying}))
	require.Equal(t, 1, w.report(s, complete))
	require.Zero(t, w.report(s, complete), "an equal report changes nothing")
	require.True(t, w.assigned(data).Snapshots[0].MustExist)
	have := w.get(s.ID)
	require.Equal(t, []any{cloud.SnapshotAvailable, int64(1000), cloud.ConsistencyCrash, cloud.VolumeQCOW2},
		[]any{have.Status, have.TakenAt, have.Consistency, have.Format})
	_, err = w.create(data, "daily")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)

	w.restore(s)
	w.Update(func(tx *store.Tx) error { return volume.Release(tx, acme.Project, data, vm) })
	_, err = w.volumes.Delete(w.as(acme, ""), acme, data, [32]byte{})
	require.ErrorContains(t, err, "has 1 snapshots: delete them first")
	w.deleteSnapshot(s)
}

// TestUpdateSnapshot renames a snapshot and changes its labels. The old name is free then, and the host gets nothing.
func TestUpdateSnapshot(t *testing.T) {
	w := newWorld(t)
	data := w.volume("data", 6)
	s, err := w.create(data, "daily")
	require.NoError(t, err)
	w.report(s, complete)
	second, err := w.create(data, "second")
	require.NoError(t, err)
	generation := w.assigned(data).Generation
	update := func(at cloud.Tenant, name string, labels map[string]string) (Result, error) {
		return w.snapshots.Update(w.as(at, ""), at, s.ID, name, labels, [32]byte{})
	}

	out, err := update(acme, "release", map[string]string{"env": "prod", "team": "shop"})
	require.NoError(t, err)
	require.Equal(t, "release", out.Snapshots[0].Name)
	_, err = update(acme, "", map[string]string{"team": ""})
	require.NoError(t, err)
	have := w.get(s.ID)
	require.Equal(t, []any{"release", map[string]string{"env": "prod"}, cloud.SnapshotAvailable}, []any{have.Name, have.Labels, have.Status})
	require.Equal(t, generation, w.assigned(data).Generation, "the host does not know names and labels")

	for says, c := range map[string]struct {
		at     cloud.Tenant
		name   string
		labels map[string]string
		kind   fault.Kind
	}{
		"the name of another snapshot": {acme, "second", nil, fault.AlreadyExists},
		"an invalid name":              {acme, "Not A Name", nil, fault.InvalidArgument},
		"an invalid label":             {acme, "", map[string]string{"": "x"}, fault.InvalidArgument},
		"a snapshot of another org":    {other, "mine", nil, fault.NotFound},
	} {
		_, err := update(c.at, c.name, c.labels)
		require.True(t, fault.Is(err, c.kind), "%s: %v", says, err)
	}
	w.report(second, complete)
	third, err := w.create(data, "daily")
	require.NoError(t, err, "the old name is not free")
	w.report(third, complete)
	_, err = w.create(data, "release")
	require.True(t, fault.Is(err, fault.AlreadyExists), "the new name is free: %v", err)
}

// restore makes a volume from an AVAILABLE snapshot of 6 GiB. Until the host has made it, the snapshot cannot be
// deleted.
func (w *world) restore(s cloud.Snapshot) {
	_, err := w.snapshots.CreateVolume(w.as(acme, ""), acme, s.ID, cloud.Volume{Name: "small", SizeGiB: 5}, [32]byte{})
	require.True(w.t, fault.Is(err, fault.InvalidArgument), "%v", err)
	out, err := w.snapshots.CreateVolume(w.as(acme, ""), acme, s.ID, cloud.Volume{Name: "copy"}, [32]byte{})
	require.NoError(w.t, err)
	require.Equal(w.t, []any{uint64(6), "local", cloud.VolumeQCOW2, w.host, cloud.VolumePending},
		[]any{out.Volume.SizeGiB, out.Volume.Class, out.Volume.Format, out.Volume.Node, out.Volume.Status()})
	sent := w.assigned(out.Volume.ID)
	require.Equal(w.t, []string{string(s.Volume), string(s.ID)}, []string{sent.Source.VolumeId, sent.Source.SnapshotId})
	require.Equal(w.t, uint64(18), w.allocated())
	_, err = w.snapshots.Delete(w.as(acme, ""), acme, s.ID, [32]byte{})
	require.ErrorContains(w.t, err, "volume copy is being made from snapshot daily")
	_, err = w.volumes.ObservedVolumes(w.t.Context(), w.host, []cloud.VolumeObservation{{Volume: out.Volume.ID, Generation: 1, Present: true}})
	require.NoError(w.t, err)
	v, err := w.volumes.Get(w.t.Context(), acme, out.Volume.ID)
	require.NoError(w.t, err)
	require.Equal(w.t, cloud.VolumeAvailable, v.Status())
}

// deleteSnapshot deletes a snapshot, whose room becomes free when the host has deleted the bytes.
func (w *world) deleteSnapshot(s cloud.Snapshot) {
	before, generation := w.allocated(), w.assigned(s.Volume).Generation
	_, err := w.snapshots.Delete(w.as(other, ""), other, s.ID, [32]byte{})
	require.True(w.t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = w.snapshots.Delete(w.as(acme, ""), acme, s.ID, [32]byte{})
	require.NoError(w.t, err)
	_, err = w.snapshots.Get(w.t.Context(), acme, s.ID)
	require.True(w.t, fault.Is(err, fault.NotFound), "%v", err)
	require.True(w.t, w.assigned(s.Volume).Snapshots[0].Deleted)
	absent := cloud.SnapshotObservation{State: cloud.SnapshotAbsent}
	require.Zero(w.t, w.reportAt(s, generation, absent), "a report from before the deletion must not end it")
	require.Zero(w.t, w.report(s, complete))
	require.Equal(w.t, before, w.allocated())
	require.Equal(w.t, 1, w.report(s, absent))
	require.Equal(w.t, before-s.SizeGiB, w.allocated())
	require.Empty(w.t, w.assigned(s.Volume).Snapshots)
	_, err = w.create(s.Volume, s.Name)
	require.NoError(w.t, err, "the name is free again")
}

// TestHostLosesSnapshot checks that a failed copy, a lost one, and one of another instant become ERROR and stay so.
func TestHostLosesSnapshot(t *testing.T) {
	w := newWorld(t)
	data := w.volume("data", 6)
	s, err := w.create(data, "a")
	require.NoError(t, err)
	failed := cloud.SnapshotObservation{State: cloud.SnapshotFailed, Error: "the storage pool is full"}
	require.Equal(t, 1, w.report(s, failed))
	require.Zero(t, w.report(s, complete), "a failed copy is not replaced by a later one")
	require.Equal(t, []any{cloud.SnapshotError, failed.Error}, []any{w.get(s.ID).Status, w.get(s.ID).Reason})
	_, err = w.snapshots.Delete(w.as(acme, ""), acme, s.ID, [32]byte{})
	require.NoError(t, err)

	s, err = w.create(data, "b")
	require.NoError(t, err)
	require.Equal(t, 1, w.report(s, complete))
	later := complete
	later.TakenAt++
	w.report(s, later)
	require.Equal(t, cloud.SnapshotError, w.get(s.ID).Status, "a copy of a later instant is not the snapshot")
	require.Contains(t, w.get(s.ID).Reason, "another one of a later instant")
	require.Equal(t, 1, w.report(s, complete), "the host has the file again")
	require.Equal(t, cloud.SnapshotAvailable, w.get(s.ID).Status)
	require.Zero(t, w.report(cloud.Snapshot{ID: s.ID, Volume: w.volume("other", 1)}, failed)-1, "a report about another volume's snapshot")
	require.Equal(t, cloud.SnapshotAvailable, w.get(s.ID).Status)
}

// TestSnapshotsOfVM creates snapshots of the two volumes of a VM.
func TestSnapshotsOfVM(t *testing.T) {
	w := newWorld(t)
	a, b := w.volume("data", 1), w.volume("logs", 2)
	_, err := w.snapshots.CreateOfVM(w.as(acme, ""), acme, "0190a000-0000-7000-8000-00000000000b", cloud.Snapshot{Name: "all"}, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = w.snapshots.CreateOfVM(w.as(other, ""), other, vm, cloud.Snapshot{Name: "all"}, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	out, err := w.snapshots.CreateOfVM(w.as(acme, ""), acme, vm, cloud.Snapshot{Name: "all"}, [32]byte{})
	require.NoError(t, err)
	require.Len(t, out.Snapshots, 2)
	require.Equal(t, []string{"all-data", "all-logs"}, []string{out.Snapshots[0].Name, out.Snapshots[1].Name})
	for _, id := range []cloud.VolumeID{a, b} {
		sent := w.assigned(id).Snapshots[0]
		require.Equal(t, []string{string(a), string(b)}, sent.GroupVolumes)
		require.Equal(t, out.Snapshots[0].Group, sent.GroupId)
	}
	list, _, err := w.snapshots.List(t.Context(), acme, 0, "", Filter{Volume: b})
	require.NoError(t, err)
	require.Len(t, list, 1)
	_, err = w.snapshots.CreateOfVM(w.as(acme, ""), acme, vm, cloud.Snapshot{Name: "second"}, [32]byte{})
	require.ErrorContains(t, err, "is PENDING", "no snapshot is created if one cannot be")
	list, _, err = w.snapshots.List(t.Context(), acme, 0, "", Filter{})
	require.NoError(t, err)
	require.Len(t, list, 2)
}

// TestSnapshotQuota checks the quota on the number of snapshots. A snapshot that an earlier version created does not
// count, and its deletion does not give anything back.
func TestSnapshotQuota(t *testing.T) {
	w := newWorld(t)
	a, b := w.volume("a", 1), w.volume("b", 1)
	earlier, err := w.create(b, "earlier")
	require.NoError(t, err)
	require.Equal(t, 1, w.report(earlier, complete))
	w.Update(func(tx *store.Tx) error {
		s, err := volume.LookupSnapshot(tx, acme, earlier.ID)
		s.Counted = false
		volume.Snapshots.Put(tx, s, string(s.Project), string(s.ID))
		return errors.Join(err, tenant.Give(tx, acme, tenant.Storage, tenant.Amount{Snapshots: 1}))
	})
	one := uint64(1)
	w.Update(func(tx *store.Tx) error { return tenant.SetQuota(tx, acme.Project, tenant.Quota{Snapshots: &one}) })
	s, err := w.create(a, "first")
	require.NoError(t, err)
	require.Equal(t, 1, w.report(s, complete))
	drop := func(s cloud.Snapshot) {
		_, err := w.snapshots.Delete(w.as(acme, ""), acme, s.ID, [32]byte{})
		require.NoError(t, err)
	}
	drop(earlier)
	_, err = w.create(a, "second")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "allows 1 snapshots")
	drop(s)
	_, err = w.create(a, "second")
	require.NoError(t, err)
}

// TestRefusedSnapshots checks the errors of a snapshot that cannot be created.
func TestRefusedSnapshots(t *testing.T) {
	w := newWorld(t)
	fresh, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "fresh", SizeGiB: 1}, "", [32]byte{})
	require.NoError(t, err)
	_, err = w.create(fresh.Volume.ID, "a")
	require.ErrorContains(t, err, "was never attached")
	_, err = w.create(fresh.Volume.ID, "No")
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	_, err = w.create("00000000-0000-7000-8000-000000000000", "a")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)

	big := w.volume("big", 60)
	_, err = w.create(big, "a")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "has 40 GiB free in the storage pool local, 60 needed")
	five := uint64(65)
	w.Update(func(tx *store.Tx) error { return tenant.SetQuota(tx, acme.Project, tenant.Quota{VolumeGiB: &five}) })
	small := w.volume("small", 2)
	s, err := w.create(small, "a")
	require.NoError(t, err)
	require.Equal(t, 1, w.report(s, complete))
	_, err = w.create(small, "b")
	require.ErrorContains(t, err, "allows 65 volume_gib")
	w.Update(func(tx *store.Tx) error { return tenant.SetQuota(tx, acme.Project, tenant.Quota{}) })
	for text, change := range map[string]func(*cloud.Volume){
		"registered volumes cannot have snapshots": func(v *cloud.Volume) { v.ExternalImage = "pool/image" },
		"no host has made volume":                  func(v *cloud.Volume) { v.Driver, v.Present = cloud.DriverRBD, false },
	} {
		other := w.volume("v"+text[:2], 1)
		w.Update(func(tx *store.Tx) error {
			v, err := volume.Lookup(tx, acme, other)
			change(v)
			volume.Volumes.Put(tx, v, string(v.Project), string(v.ID))
			return err
		})
		_, err = w.create(other, "c")
		require.ErrorContains(t, err, text)
	}
	tiny := w.volume("tiny", 1)
	for n := range cloud.MaxSnapshots {
		s, err := w.create(tiny, "t"+string(rune('a'+n/26))+string(rune('a'+n%26)))
		require.NoError(t, err)
		require.Equal(t, 1, w.report(s, complete))
	}
	_, err = w.create(tiny, "last")
	require.ErrorContains(t, err, "has 32 snapshots, which is the maximum")
}

// TestSnapshotNeedsImage checks that a volume with snapshots, which contain only the differences from its image, is not
// made independent of the image, and that a volume gets no snapshot while it is made independent.
func TestSnapshotNeedsImage(t *testing.T) {
	w := newWorld(t)
	root := w.volume("root", 1)
	w.Update(func(tx *store.Tx) error {
		v, err := volume.Lookup(tx, acme, root)
		v.Image = &cloud.ImageRef{ID: "00000000-0000-7000-8000-000000000001", SHA256: "sum", SizeBytes: 1, Format: cloud.FormatRaw}
		volume.Volumes.Put(tx, v, string(v.Project), string(v.ID))
		return err
	})
	s, err := w.create(root, "a")
	require.NoError(t, err)
	require.Equal(t, 1, w.report(s, complete))
	_, err = w.volumes.Flatten(w.as(acme, ""), acme, root, [32]byte{})
	require.ErrorContains(t, err, "has 1 snapshots, which need its image")
	_, err = w.snapshots.Delete(w.as(acme, ""), acme, s.ID, [32]byte{})
	require.NoError(t, err)
	_, err = w.volumes.Flatten(w.as(acme, ""), acme, root, [32]byte{})
	require.Error(t, err, "the host has not deleted the snapshot yet")
	require.Equal(t, 1, w.report(s, cloud.SnapshotObservation{State: cloud.SnapshotAbsent}))
	_, err = w.volumes.Flatten(w.as(acme, ""), acme, root, [32]byte{})
	require.NoError(t, err)
	_, err = w.create(root, "b")
	require.ErrorContains(t, err, "is being made independent of its image")
}
