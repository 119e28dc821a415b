package volume

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const cephKey = "AQDq3rNlAAAAABAAv7k8q5Yq1mYc2o0J7l5h3g=="

// rbdHost adds a host. Its guests can use RBD images if problem is empty.
func (w *world) rbdHost(name, problem string) cloud.NodeID {
	return w.AddHost(name, cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.RBD, n.RBDProblem = problem == "", problem
	})
}

// rbdClass creates the class ceph of the driver RBD.
func (w *world) rbdClass() { w.createRBDClass("ceph", false) }

func (w *world) createRBDClass(name string, encrypted bool) {
	w.t.Helper()
	_, err := w.classes.Create(w.asAdmin(), cloud.StorageClass{
		Name: name, Driver: cloud.DriverRBD, Encrypted: encrypted, RBD: &cloud.RBDPool{
			FSID: "0190a000-0000-4000-8000-000000000001", Monitors: []string{"192.0.2.1"}, Pool: "vms", User: "trivet",
		},
	}, cephKey, [32]byte{})
	require.NoError(w.t, err)
}

// deleteClass deletes the class ceph.
func (w *world) deleteClass() error {
	_, err := w.classes.Delete(w.asAdmin(), "ceph", [32]byte{})
	return err
}

// asAdmin returns the context of a call by an administrator of the cloud.
func (w *world) asAdmin() context.Context {
	admin := &cloud.Caller{User: "admin", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	return auth.With(w.t.Context(), admin, auth.RPC)
}

// place runs Place. Only the hosts in ready are READY.
func (w *world) place(ready ...cloud.NodeID) {
	w.t.Helper()
	var fleet []HostState
	for _, id := range ready {
		fleet = append(fleet, HostState{Node: *w.Node(id), Ready: true})
	}
	require.NoError(w.t, w.volumes.Place(w.t.Context(), fleet))
}

// only requires that exactly one of hosts is sent volumes, and returns this host and its volumes.
func (w *world) only(hosts ...cloud.NodeID) (on cloud.NodeID, all []*agentv1.AssignedVolume) {
	w.t.Helper()
	for _, h := range hosts {
		if found := w.assigned(h); len(found) > 0 {
			require.Empty(w.t, on, "two hosts have the volume")
			on, all = h, found
		}
	}
	require.NotEmpty(w.t, on, "no host has the volume")
	return on, all
}

// TestRBDVolumeFollowsHosts creates a volume of the driver RBD. The volume's host is lost three times: before it has
// made the image, while the volume is detached, and before it has deleted the image. Each time another host must get
// the volume. Only the host of the volume may get the key. While the volume is attached to a VM, it keeps its host.
func TestRBDVolumeFollowsHosts(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	a, b, c := w.rbdHost("a", ""), w.rbdHost("b", ""), w.rbdHost("c", "trivet-rbd is missing")
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "data", SizeGiB: 3, Class: "ceph"}, w.image(1, 1<<20), [32]byte{})
	require.NoError(t, err)
	v := &out.Volume
	require.Equal(t, []any{cloud.DriverRBD, cloud.VolumeRaw, cloud.VolumePending, ""}, []any{v.Driver, v.Format, v.Status(), v.Pool})
	require.Equal(t, "volume-"+string(v.ID), convert.Volume(v).GetBacking().GetRbd().GetImage())
	w.place(c)
	require.Empty(t, w.get(v.ID).Node, "a host that does not serve RBD gets no volume")
	w.place(a, b, c)
	first, assigned := w.only(a, b, c)
	require.Equal(t, []any{cephKey, "vms", false}, []any{assigned[0].GetRbd().GetKey(), assigned[0].GetRbd().GetPool(), assigned[0].GetMustExist()})
	second := map[cloud.NodeID]cloud.NodeID{a: b, b: a}[first]
	w.place(a, b, c)
	require.Equal(t, first, w.get(v.ID).Node, "a volume on a READY host stays there")

	w.place(second, c)
	on, _ := w.only(a, b, c)
	require.Equal(t, second, on, "the first host was lost before it has made the image")
	require.Zero(t, w.report(first, cloud.VolumeObservation{Volume: v.ID, Generation: 9, Error: "late"}), "its report does not count any more")
	w.report(second, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true})
	require.Equal(t, cloud.VolumeAvailable, w.get(v.ID).Status())

	err = w.attach(v.ID, vmA, c)
	require.True(t, fault.Is(err, fault.FailedPrecondition))
	require.ErrorContains(t, err, "trivet-rbd is missing")
	require.NoError(t, w.attach(v.ID, vmA, first))
	on, assigned = w.only(a, b, c)
	require.Equal(t, first, on, "the volume follows its VM")
	require.EqualValues(t, 1, assigned[0].GetAttachmentGeneration())
	w.place(second)
	require.Equal(t, first, w.get(v.ID).Node, "an attached volume keeps its host")
	w.release(v.ID, vmA)
	w.place(second)
	require.Equal(t, first, w.get(v.ID).Node, "a volume that is not flushed keeps its host")
	require.ErrorContains(t, w.attach(v.ID, vmB, second), "has not flushed")
	w.report(first, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1})
	w.place(second)
	require.Equal(t, second, w.get(v.ID).Node)

	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	w.place(first)
	on, assigned = w.only(a, b, c)
	require.Equal(t, first, on, "the second host was lost before it has deleted the image")
	require.Equal(t, []any{true, cephKey}, []any{assigned[0].GetDeleted(), assigned[0].GetRbd().GetKey()})
	require.ErrorContains(t, w.deleteClass(), "has volumes", "the host needs the key until it has deleted the image")
	require.Equal(t, 1, w.report(first, cloud.VolumeObservation{Volume: v.ID, Generation: assigned[0].GetGeneration()}))
	require.NoError(t, w.deleteClass())
}

// TestRBDSnapshots takes a snapshot of a volume of the driver RBD, which takes no room of a host. The volume moves to
// another host while the snapshot is PENDING. A new volume from the snapshot can be made by any host, and does not need
// the image. The volume is flattened although it has a snapshot.
func TestRBDSnapshots(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	a, b := w.rbdHost("a", ""), w.rbdHost("b", "")
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "data", SizeGiB: 3, Class: "ceph"}, w.image(1, 1<<20), [32]byte{})
	require.NoError(t, err)
	v := out.Volume.ID
	report := func(on cloud.NodeID, snapshots ...cloud.SnapshotObservation) {
		now := w.get(v)
		w.report(on, cloud.VolumeObservation{
			Volume: v, Generation: now.Generation, Present: true, FlushedGeneration: now.AttachmentGeneration, Snapshots: snapshots,
		})
	}
	w.place(a)
	report(a)
	s := w.snapshot(v, "one")
	w.place(b)
	on, sent := w.only(a, b)
	require.Equal(t, b, on, "a volume with a PENDING snapshot follows the hosts")
	require.Equal(t, string(s), sent[0].GetSnapshots()[0].GetSnapshotId())
	done := cloud.SnapshotObservation{Snapshot: s, State: cloud.SnapshotComplete, TakenAt: 7, Format: cloud.VolumeRaw}
	report(b, done)
	copied := cloud.Volume{ID: cloud.VolumeID(vmA), Name: "copy"}
	w.Update(func(tx *store.Tx) error { return w.volumes.CreateFrom(tx, acme, &copied, s) })
	require.Equal(t, []any{cloud.NodeID(""), uint64(3), "ceph", (*cloud.ImageRef)(nil)},
		[]any{w.get(copied.ID).Node, w.get(copied.ID).SizeGiB, w.get(copied.ID).Class, w.get(copied.ID).Image})
	w.place(a)
	require.Equal(t, a, w.get(copied.ID).Node)
	require.Equal(t, string(s), w.assigned(a)[0].GetSource().GetSnapshotId())
	drop := func() error {
		_, err := w.Store.Update(t.Context(), func(tx *store.Tx) error { _, err := DropSnapshot(tx, acme, s); return err })
		return err
	}
	require.ErrorContains(t, drop(), "is being made from snapshot one")
	w.report(a, cloud.VolumeObservation{Volume: copied.ID, Generation: w.get(copied.ID).Generation, Present: true})

	_, err = w.volumes.Flatten(w.as(acme, ""), acme, v, [32]byte{})
	require.NoError(t, err)
	require.ErrorContains(t, w.addSnapshot(v, "two"), "is being made independent")
	on = w.get(v).Node
	w.report(on, cloud.VolumeObservation{Volume: v, Generation: w.get(v).Generation, Present: true, Flattened: true, Format: cloud.VolumeRaw})
	require.Nil(t, w.get(v).Image)

	require.NoError(t, drop())
	report(on, cloud.SnapshotObservation{Snapshot: s, State: cloud.SnapshotAbsent})
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		left, err := SnapshotsOf(r, w.get(v))
		require.Empty(t, left)
		return err
	}))
	for _, host := range []cloud.NodeID{a, b} {
		require.Empty(t, w.Node(host).PoolAllocated)
	}
}

// TestRBDVolumesAfterLeaderChange lets a new leader place volumes of the driver RBD when only one host has sent it a
// heartbeat. Volumes of hosts that may be READY must stay where they are, and new volumes must be placed.
func TestRBDVolumesAfterLeaderChange(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	a, b, c := w.rbdHost("a", ""), w.rbdHost("b", ""), w.rbdHost("c", "")
	create := func(name string) cloud.VolumeID {
		out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: 1, Class: "ceph"}, "", [32]byte{})
		require.NoError(t, err)
		return out.Volume.ID
	}
	data, gone, fresh := create("data"), create("gone"), cloud.VolumeID("")
	w.place(a)
	_, err := w.volumes.Delete(w.as(acme, ""), acme, gone, [32]byte{})
	require.NoError(t, err)
	fresh = create("fresh")
	fleet := []HostState{{Node: *w.Node(a), Awaited: true}, {Node: *w.Node(b), Ready: true}, {Node: *w.Node(c)}}
	require.NoError(t, w.volumes.Place(t.Context(), fleet))
	require.Equal(t, a, w.get(data).Node, "the volume moved although its host may be READY")
	require.Len(t, w.assigned(a), 2)
	require.Equal(t, b, w.get(fresh).Node)
	fleet[0].Awaited = false
	require.NoError(t, w.volumes.Place(t.Context(), fleet))
	require.Equal(t, b, w.get(data).Node)
	require.Empty(t, w.assigned(a))
}

// TestScheduleWithoutSnapshots checks that a registered volume, which cannot have snapshots, cannot get a schedule of
// snapshots.
func TestScheduleWithoutSnapshots(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	v, err := w.registerAs(acme, "data", "ceph", "disk")
	require.NoError(t, err)
	_, err = w.volumes.Update(w.as(acme, ""), acme, v.ID, "", map[string]string{cloud.SnapshotEvery: "24h"}, nil, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "the schedule would never create a snapshot: %v", err)
	require.ErrorContains(t, err, "registered volumes cannot have snapshots")
	require.Empty(t, w.get(v.ID).Metadata)
}

// TestUnreadableCephKey stores a class whose key the member cannot open, as after a mistake with cluster keys. The host
// must get the other volumes, and the RBD volume with its pool but without the key.
func TestUnreadableCephKey(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	host := w.AddHost("h1", cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools, n.RBD = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10}}, true
	})
	_, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "image", SizeGiB: 1, Class: "ceph"}, "", [32]byte{})
	require.NoError(t, err)
	w.place(host)
	require.NoError(t, w.attach(w.create("file", 1).ID, vmA, host))
	w.Update(func(tx *store.Tx) error {
		c, err := storageclass.Classes.Get(tx, "ceph")
		require.NoError(t, err)
		c.RBD.SealedKey[0] ^= 1
		storageclass.Classes.Put(tx, c, "ceph")
		return nil
	})
	sent := w.assigned(host)
	require.Len(t, sent, 2)
	for _, one := range sent {
		if one.GetPool() == "" {
			require.Equal(t, []any{"vms", ""}, []any{one.GetRbd().GetPool(), one.GetRbd().GetKey()})
		}
	}
}

// TestRBDPlacement checks which hosts can have a VM with an RBD volume.
func TestRBDPlacement(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	good, bad, old := w.rbdHost("good", ""), w.rbdHost("bad", "QEMU has no block driver rbd"), w.host("old", 10)
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "data", SizeGiB: 500, Class: "ceph"}, "", [32]byte{})
	require.NoError(t, err)
	require.NoError(t, w.Store.Local(func(v *store.View) error {
		p, err := PlacementOf(v, acme, []cloud.VolumeID{out.Volume.ID})
		require.NoError(t, err)
		require.Empty(t, p.Shortage(w.Node(good)))
		require.Equal(t, "does not serve RBD volumes: QEMU has no block driver rbd", p.Shortage(w.Node(bad)))
		require.Equal(t, "does not serve RBD volumes", p.Shortage(w.Node(old)))
		return nil
	}))
}

// TestEncryptedRBDVolume creates a volume of an encrypted class from an image. Only a host that can encrypt RBD volumes
// makes it, and gets its key. The volume does not need the image when the host has made it.
func TestEncryptedRBDVolume(t *testing.T) {
	w := newWorld(t)
	w.createRBDClass("secret", true)
	old := w.rbdHost("old", "")
	able := w.AddHost("able", cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.RBD, n.RBDEncryption = true, true
	})
	image := w.image(1, 1<<20)
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "data", SizeGiB: 3, Class: "secret"}, image, [32]byte{})
	require.NoError(t, err)
	v := &out.Volume
	require.Equal(t, []any{true, cloud.VolumeRaw, true}, []any{v.Encrypted, v.Format, v.Flatten})
	w.place(old)
	require.Empty(t, w.get(v.ID).Node, "the agent of the host is too old")
	w.place(old, able)
	on, assigned := w.only(old, able)
	require.Equal(t, able, on)
	require.True(t, assigned[0].GetEncrypted())
	key := assigned[0].GetEncryptionKey()
	require.NotEmpty(t, key)
	require.ErrorContains(t, w.attach(v.ID, vmA, old), "cannot encrypt RBD volumes: its agent is too old")
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		p, err := PlacementOf(r, acme, []cloud.VolumeID{v.ID})
		require.NoError(t, err)
		require.Contains(t, p.Shortage(w.Node(old)), "cannot encrypt RBD volumes")
		require.Empty(t, p.Shortage(w.Node(able)))
		served, err := w.volumes.ServedClasses(r, w.Node(old))
		require.NoError(t, err)
		require.NotContains(t, served, "secret")
		return nil
	}))
	w.report(able, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, Flattened: true})
	require.Nil(t, w.get(v.ID).Image)
	require.Empty(t, w.assigned(able)[0].GetEncryptionKey(), "the volume is made and detached")
}

// TestVolumesAvoidOldAgents checks that volumes are moved to a host whose agent cannot migrate volumes only if there is no
// other host, and that the volumes of such a host stay there.
func TestVolumesAvoidOldAgents(t *testing.T) {
	old := HostState{Node: cloud.Node{ID: "old", RBD: true}, Ready: true}
	able := HostState{Node: cloud.Node{ID: "able", RBD: true, Features: map[string]string{cloud.FeatureVolumeMigration: ""}}, Ready: true}
	both := &fleet{[]HostState{old, able}, map[kind]*candidates{}}
	require.Equal(t, &candidates{ready: []cloud.NodeID{"able"}, keep: []cloud.NodeID{"old", "able"}}, both.candidates(kind{}))
	alone := &fleet{[]HostState{old}, map[kind]*candidates{}}
	require.Equal(t, &candidates{ready: []cloud.NodeID{"old"}, keep: []cloud.NodeID{"old"}}, alone.candidates(kind{}))
	upgraded := old
	upgraded.Node.Features = able.Node.Features
	require.NotEqual(t, alone.key(), (&fleet{hosts: []HostState{upgraded}}).key())
}
