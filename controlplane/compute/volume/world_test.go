package volume

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node/nodetest"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	acme  = cloud.Tenant{Org: "acme", Project: "web"}
	other = cloud.Tenant{Org: "evil", Project: "lair"}
)

const (
	vmA = cloud.VMID("0190a000-0000-7000-8000-00000000000a")
	vmB = cloud.VMID("0190a000-0000-7000-8000-00000000000b")
)

// world is a nodetest.World (one member, the leader, with simulated hosts) with the volume service.
type world struct {
	*nodetest.World
	t       testing.TB
	volumes *Service
	classes *storageclass.Service
}

func newWorld(t testing.TB) *world {
	base := nodetest.New(t, nil, acme, other)
	key := clusterkey.Generate()
	w := &world{
		World: base, t: t, volumes: New(Options{Store: base.Store, Commands: base.Commands, Key: key, Log: base.Log}),
		classes: storageclass.New(base.Store, base.Commands, key),
	}
	require.NoError(t, w.classes.Bootstrap(t.Context()))
	w.Nodes.AttachVolumes(w.volumes)
	w.Go(w.Nodes.Follow)
	return w
}

// host adds a host with a storage pool local of the given size.
func (w *world) host(name string, gib uint64) cloud.NodeID {
	return w.AddHost(name, cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: gib, Encryption: true}}
	})
}

// as returns the context of a call by a project member of the tenant t. If key is not empty, it is the call's
// idempotency key.
func (w *world) as(t cloud.Tenant, key string) context.Context {
	c := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, IdempotencyKey: key,
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}
	return auth.With(w.t.Context(), c, auth.RPC)
}

func (w *world) create(name string, gib uint64) *cloud.Volume {
	w.t.Helper()
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: gib}, "", [32]byte{})
	require.NoError(w.t, err)
	return &out.Volume
}

func (w *world) get(id cloud.VolumeID) *cloud.Volume {
	w.t.Helper()
	v, err := w.volumes.Get(w.t.Context(), acme, id)
	require.NoError(w.t, err)
	return v
}

// attach attaches a volume to a VM on a host.
func (w *world) attach(id cloud.VolumeID, vm cloud.VMID, on cloud.NodeID) error {
	_, err := w.Store.Update(w.t.Context(), func(tx *store.Tx) error { return Attach(tx, acme, id, vm, "data", on) })
	return err
}

func (w *world) release(id cloud.VolumeID, vm cloud.VMID) {
	w.t.Helper()
	w.Update(func(tx *store.Tx) error { return Release(tx, acme.Project, id, vm) })
}

// report reports an observation about a volume as a host, and returns the number of records that it changed.
func (w *world) report(on cloud.NodeID, o cloud.VolumeObservation) int {
	w.t.Helper()
	n, err := w.volumes.ObservedVolumes(w.t.Context(), on, []cloud.VolumeObservation{o})
	require.NoError(w.t, err)
	return n
}

// assigned returns the desired state of all volumes of a host.
func (w *world) assigned(on cloud.NodeID) (out []*agentv1.AssignedVolume) {
	w.t.Helper()
	require.NoError(w.t, w.Store.Local(func(v *store.View) (err error) {
		out, err = w.volumes.AssignedVolumes(v, on)
		return err
	}))
	return out
}

// image stores the image number n as AVAILABLE, with a virtual size in bytes.
func (w *world) image(n int, virtual uint64) cloud.ImageID {
	i := cloud.Image{
		ID: cloud.ImageID(fmt.Sprintf("00000000-0000-7000-8000-%012d", n)), Name: "image", Org: acme.Org, Visibility: cloud.Private,
		Format: cloud.FormatRaw, SizeBytes: virtual, VirtualSize: virtual, SHA256: fmt.Sprintf("%064d", n), Status: cloud.ImageAvailable,
	}
	w.Update(func(tx *store.Tx) error { image.Images.Put(tx, &i, string(i.ID)); return nil })
	return i.ID
}
