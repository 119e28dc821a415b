package vm

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/node/nodetest"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// world is a nodetest.World, a member that leads with simulated hosts, and the VM controller on it.
type world struct {
	*nodetest.World
	t     testing.TB
	store *store.Store
	nodes *node.Service
	vms   *Service
	// volumes creates the volumes that tests attach to VMs.
	volumes *volume.Service
	// networks creates the ports and VPCs that tests give to VMs.
	networks *network.Service
}

var (
	acme  = cloud.Tenant{Org: "acme", Project: "web"}
	other = cloud.Tenant{Org: "evil", Project: "lair"}
)

func newWorld(t testing.TB) *world {
	base := nodetest.New(t, nil, acme, other)
	w := &world{World: base, t: t, store: base.Store, nodes: base.Nodes}
	key := clusterkey.Generate()
	w.volumes = volume.New(volume.Options{Store: w.store, Commands: w.Commands, Key: key, Log: w.Log})
	w.vms = New(Options{Store: w.store, Commands: w.Commands, Nodes: w.nodes, Volumes: w.volumes, Log: w.Log})
	w.networks = network.New(network.Options{Store: w.store, Commands: w.Commands, Log: w.Log})
	require.NoError(t, storageclass.New(w.store, w.Commands, key).Bootstrap(t.Context()))
	w.Attach(w.vms)
	w.nodes.AttachVolumes(w.volumes)
	w.Go(w.vms.Follow)
	return w
}

// delayCommits delays each commit by 2 ms, about as long as on a disk, so that concurrent transactions read the same
// records and conflict.
func (w *world) delayCommits() {
	w.Quorum.Lose = func(after bool) bool {
		if !after {
			time.Sleep(2 * time.Millisecond)
		}
		return false
	}
}

// update runs f in one transaction on the records.
func (w *world) update(f func(tx *store.Tx)) {
	w.t.Helper()
	w.Update(func(tx *store.Tx) error { f(tx); return nil })
}

func (w *world) allocated(id cloud.NodeID) cloud.Capacity { return w.Node(id).Allocated }

// image stores the image number n as AVAILABLE, with a virtual size in bytes. change may modify it.
func (w *world) image(n int, virtual uint64, change ...func(*cloud.Image)) cloud.ImageID {
	w.t.Helper()
	i := cloud.Image{
		ID: cloud.ImageID(fmt.Sprintf("00000000-0000-7000-8000-%012d", n)), Name: fmt.Sprintf("image-%d", n), Org: acme.Org,
		Visibility: cloud.Private, Format: cloud.FormatRaw, SizeBytes: virtual, VirtualSize: virtual,
		SHA256: fmt.Sprintf("%064d", n), Architecture: cloud.X8664, Status: cloud.ImageAvailable,
	}
	for _, f := range change {
		f(&i)
	}
	w.update(func(tx *store.Tx) { image.Images.Put(tx, &i, string(i.ID)) })
	return i.ID
}

// as returns the context of a call by a project member of the tenant t, with the idempotency key key if it is not
// empty.
func (w *world) as(t cloud.Tenant, key string) context.Context {
	c := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, IdempotencyKey: key,
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}
	return auth.With(w.t.Context(), c, auth.RPC)
}

// small returns the request for a VM with 2 vCPUs, 512 MiB of memory and one blank disk of 5 GiB. change may modify it.
func small(name string, change ...func(*CreateRequest)) CreateRequest {
	w := CreateRequest{Name: name, Spec: cloud.Spec{
		CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 512}, Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 5}},
	}}
	for _, f := range change {
		f(&w)
	}
	return w
}

var taken = cloud.Capacity{VCPUs: 2, MemoryMiB: 512, StorageGiB: 5}

func plenty() cloud.Capacity { return cloud.Capacity{VCPUs: 64, MemoryMiB: 64 << 10, StorageGiB: 1000} }

func (w *world) create(name string, change ...func(*CreateRequest)) *cloud.VM {
	w.t.Helper()
	made, err := w.vms.Create(w.as(acme, ""), acme, small(name, change...), [32]byte{})
	require.NoError(w.t, err)
	return &made.VM
}

func (w *world) get(id cloud.VMID) *cloud.VM {
	w.t.Helper()
	vm, err := w.vms.Get(w.t.Context(), acme, id)
	require.NoError(w.t, err)
	return vm
}

// report reports an observation for the VM's current generation, as its host, and returns the VM's record after that.
// change may modify the observation.
func (w *world) report(id cloud.VMID, level cloud.Observed, change ...func(*cloud.Observation)) *cloud.VM {
	w.t.Helper()
	vm := w.get(id)
	o := cloud.Observation{
		VM: id, Generation: vm.Generation, Observed: level, StartsDone: vm.Desired.Starts, RebootsDone: vm.Desired.Reboots, ResetsDone: vm.Desired.Resets,
	}
	for _, f := range change {
		f(&o)
	}
	_, err := w.vms.Observed(w.t.Context(), vm.Node, []cloud.Observation{o})
	require.NoError(w.t, err)
	return w.get(id)
}

// reportAbsent reports, as a host, that nothing is left of a deleted VM, with the given generation.
func (w *world) reportAbsent(on cloud.NodeID, id cloud.VMID, generation uint64) {
	w.t.Helper()
	_, err := w.vms.Observed(w.t.Context(), on, []cloud.Observation{{VM: id, Generation: generation, Observed: cloud.ObservedAbsent}})
	require.NoError(w.t, err)
}

func failed(why string) func(*cloud.Observation) {
	return func(o *cloud.Observation) { o.Exit, o.LastError = cloud.ExitFailed, why }
}

// createInState creates a VM, brings it into the given state by calls and reports, and returns it.
func (w *world) createInState(state cloud.State, name string) *cloud.VM {
	w.t.Helper()
	id := w.create(name).ID
	wish := func(a powerAction, grace uint64) {
		_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: id, Action: a, GraceMS: grace})
		require.NoError(w.t, err)
	}
	switch state {
	case cloud.Creating:
	case cloud.Failed:
		w.report(id, cloud.ObservedBuildFailed, failed("the image is corrupt"))
	default:
		w.report(id, cloud.ObservedBuilt)
		if state == cloud.Stopped {
			break
		}
		wish(start, 0)
		switch state {
		case cloud.Error:
			w.report(id, cloud.ObservedEnded, failed("no memory"))
		case cloud.Running, cloud.Stopping:
			w.report(id, cloud.ObservedRunning)
		}
		if state == cloud.Stopping {
			wish(stop, cloud.DefaultStop)
		}
	}
	vm := w.get(id)
	require.Equal(w.t, state, vm.State)
	return vm
}

func newID() cloud.VMID { return cloud.VMID(uuid.Must(uuid.NewV7()).String()) }
