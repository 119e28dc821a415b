package vm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// sharedHost adds a host that shares the storage pool local with other hosts, and has room for the given memory.
func (w *world) sharedHost(name string, memoryMiB uint64) cloud.NodeID {
	has := plenty()
	has.MemoryMiB = memoryMiB
	return w.AddHost(name, has, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 100, ID: "00000000-0000-7000-b000-000000000001", Shared: true}}
	})
}

func restartElsewhere(r *CreateRequest) {
	r.Metadata = map[string]string{cloud.HighAvailability: "restart"}
	r.Spec.Disks = nil
}

// running creates a VM with one volume in the shared pool, starts it, and reports it as running.
func (w *world) running(name string, change ...func(*CreateRequest)) *cloud.VM {
	w.t.Helper()
	v := w.volume(name)
	vm := w.create(name, append([]func(*CreateRequest){restartElsewhere, withVolumes(v)}, change...)...)
	w.report(vm.ID, cloud.ObservedBuilt)
	w.power(vm.ID, start, 0)
	return w.report(vm.ID, cloud.ObservedRunning, confirmed)
}

// confirmed is part of the report of a host that powers the VM off at the end of its lease, if it is told to do so.
func confirmed(o *cloud.Observation) { o.StopsWithLease = true }

// lose lets the host fall silent for so long that its lease has certainly ended. The other hosts send heartbeats.
func (w *world) lose(others ...cloud.NodeID) {
	w.t.Helper()
	w.Clock.Advance(node.LostTime*time.Millisecond + time.Second)
	for _, id := range others {
		w.Heartbeat(id)
	}
}

// recover runs the leader's task as often as it can make progress, with the task that moves volumes.
func (w *world) recover() {
	w.t.Helper()
	for range 4 {
		w.AwaitFleet()
		require.NoError(w.t, w.vms.Recover(w.t.Context()))
		var hosts []volume.HostState
		for _, c := range w.nodes.Fleet() {
			hosts = append(hosts, volume.HostState{Node: c.Node, Ready: c.State == cloud.NodeReady})
		}
		require.NoError(w.t, w.volumes.Place(w.t.Context(), hosts))
		w.Clock.Advance(rescanEvery / 4)
		w.followed()
	}
}

// followed waits until the service has seen the newest records.
func (w *world) followed() {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		pending := 0
		require.NoError(w.t, w.store.Local(func(v *store.View) error {
			all, _, err := VMs.List(v, 0)
			for _, r := range all {
				if r.Value.State == cloud.Pending {
					pending++
				}
			}
			return err
		}))
		w.vms.mu.Lock()
		defer w.vms.mu.Unlock()
		for _, r := range w.vms.recoveries {
			if r.pending {
				pending--
			}
		}
		return pending == 0
	}, 10*time.Second, time.Millisecond)
}

// TestVMOfLostHost loses the host of a running VM with a volume in a shared pool. The VM must start on another host, but
// not before that host has ended the attachment on the lost host. When the lost host returns, it must be told to destroy
// the VM, and the capacity there must stay allocated until it has done so.
func TestVMOfLostHost(t *testing.T) {
	w := newWorld(t)
	lost := w.sharedHost("n1", 4096)
	vm := w.running("web")
	require.Equal(t, lost, vm.Node)
	id := vm.Spec.Volumes()[0]
	w.flush(id) // as if the VM had been stopped and started again meanwhile: the attachment is still the same
	next := w.sharedHost("n2", 4096)

	w.Clock.Advance(cloud.HeartbeatTimeout*time.Millisecond + time.Second)
	w.Heartbeat(next)
	w.recover()
	require.Equal(t, lost, w.get(vm.ID).Node, "the lease of the host has not ended")

	w.lose(next)
	w.recover()
	vm = w.get(vm.ID)
	require.Equal(t, cloud.Pending, vm.State, "the VM waits until another host has ended the attachment")
	require.Empty(t, vm.Node)
	require.Contains(t, vm.Status.LastError, "waits until another host has ended the attachment of volume web")
	v := w.getVolume(id)
	require.Equal(t, []any{vm.ID, next, true, false}, []any{v.VM, v.Node, v.Ending, v.Flushed()}, "the VM keeps its volume")
	_, err := w.vms.Create(w.as(acme, ""), acme, small("thief", withVolumes(id)), [32]byte{})
	require.ErrorContains(t, err, "attached to VM")
	_, err = w.volumes.Delete(w.as(acme, ""), acme, id, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)

	generation := v.AttachmentGeneration
	w.flush(id)
	w.recover()
	vm = w.get(vm.ID)
	require.Equal(t, []any{cloud.Creating, next, ""}, []any{vm.State, vm.Node, vm.Status.LastError})
	v = w.getVolume(id)
	require.Equal(t, []any{next, false, generation + 1}, []any{v.Node, v.Ending, v.AttachmentGeneration})
	require.True(t, w.assigned(vm).GetStopsWithLease())
	require.EqualValues(t, 2, vm.Desired.Starts, "the VM must be started again")
	w.report(vm.ID, cloud.ObservedBuilt, func(o *cloud.Observation) { o.StartsDone = 0 })
	vm = w.report(vm.ID, cloud.ObservedRunning)
	require.Equal(t, cloud.Running, vm.State)
	require.Nil(t, vm.Recovery)

	require.Equal(t, cloud.Capacity{VCPUs: 2, MemoryMiB: 512}, w.allocated(lost), "the lost host may still run the VM")
	w.Heartbeat(lost)
	var fence *node.Fence
	require.NoError(t, w.store.Local(func(v *store.View) (err error) {
		fence, err = node.FenceOf(v, lost)
		return err
	}))
	require.Nil(t, fence, "the host answers again")
	var placed *node.Placed
	require.NoError(t, w.store.Local(func(v *store.View) (err error) {
		placed, err = node.PlacedVMs.Get(v, string(lost), string(vm.ID))
		return err
	}))
	require.True(t, placed.Gone)
	w.reportAbsent(lost, vm.ID, placed.Generation)
	require.Zero(t, w.allocated(lost))
	require.Equal(t, next, w.get(vm.ID).Node)
}

// TestVMsThatStayOnLostHost checks that the control plane does not move a VM by itself that could run twice, or that
// another host cannot run.
func TestVMsThatStayOnLostHost(t *testing.T) {
	w := newWorld(t)
	lost := w.sharedHost("n1", 8192)
	var stay []cloud.VMID
	stay = append(stay, w.running("policy", func(r *CreateRequest) { r.Metadata = nil }).ID)
	stay = append(stay, w.running("disk", func(r *CreateRequest) {
		r.Spec.Disks = append(r.Spec.Disks, cloud.Disk{ID: "local", Blank: true, SizeGiB: 1})
	}).ID)
	unconfirmed := w.running("unconfirmed").ID
	w.report(unconfirmed, cloud.ObservedRunning)
	stay = append(stay, unconfirmed)
	rebooted := w.running("rebooted").ID // the host has not confirmed the rule for the newest desired state
	w.power(rebooted, reboot, 0)
	stay = append(stay, rebooted)
	off := w.running("off").ID
	w.power(off, stop, 0)
	w.report(off, cloud.ObservedBuilt, confirmed)
	stay = append(stay, off)
	next := w.sharedHost("n2", 8192)
	w.lose(next)
	w.recover()
	for _, id := range stay {
		require.Equal(t, lost, w.get(id).Node, "VM %s may still run on its host, or needs it", w.get(id).Name)
	}

	byHand := func(id cloud.VMID) (cloud.VM, error) {
		return w.vms.RecoverVM(w.as(acme, ""), acme, id, nil, false, [32]byte{})
	}
	_, err := byHand(unconfirmed)
	require.ErrorContains(t, err, "may still run on its host")
	_, err = w.nodes.FenceByHand(w.as(acme, ""), next, true)
	require.ErrorContains(t, err, "a host that answers cannot be fenced")
	_, err = w.nodes.FenceByHand(w.as(acme, ""), lost, false)
	require.ErrorContains(t, err, "confirmed_off")
	vms, err := w.nodes.FenceByHand(w.as(acme, ""), lost, true)
	require.NoError(t, err)
	require.Equal(t, len(stay), vms)
	w.Clock.Advance(rescanEvery)
	w.Heartbeat(next)
	w.recover()
	for _, id := range []cloud.VMID{unconfirmed, rebooted} {
		require.Equal(t, cloud.Pending, w.get(id).State, "an operator has confirmed that the host is off")
	}
	require.Equal(t, lost, w.get(stay[0]).Node)
	made, err := byHand(stay[0])
	require.NoError(t, err)
	require.Equal(t, cloud.Pending, made.State)
	require.True(t, made.Desired.On)
	_, err = byHand(stay[1])
	require.ErrorContains(t, err, "the disk local, which is on its host only")
	made, err = byHand(off)
	require.NoError(t, err)
	require.False(t, made.Desired.On, "a VM that was off stays off")

	w.Heartbeat(lost)
	_, err = byHand(stay[1])
	require.ErrorContains(t, err, "may still run on its host", "the host answers again")
}

// TestPriorityOfLostVMs loses a host with more VMs than the other host has room for. VMs with a higher priority must get
// the room, and the others must say why they wait.
func TestPriorityOfLostVMs(t *testing.T) {
	w := newWorld(t)
	w.sharedHost("n1", 4096)
	priority := func(text string) func(*CreateRequest) {
		return func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = text }
	}
	low, middle, high := w.running("low", priority("10")), w.running("middle"), w.running("high", priority("90"))
	next := w.sharedHost("n2", 1024)
	w.lose(next)
	w.recover()
	for _, vm := range []*cloud.VM{low, middle, high} {
		w.flush(vm.Spec.Volumes()[0])
	}
	w.recover()
	require.Equal(t, next, w.get(high.ID).Node, w.get(high.ID).Status.LastError)
	require.Equal(t, next, w.get(middle.ID).Node)
	waits := w.get(low.ID)
	require.Equal(t, cloud.Pending, waits.State)
	require.Contains(t, waits.Status.LastError, "the VM waits for a host: no host fits")
	revision := w.store.Revision()
	require.NoError(t, w.vms.Recover(w.t.Context()))
	require.Equal(t, revision, w.store.Revision(), "a VM that waits for the same reason is not written again")

	_, err := w.vms.Delete(w.as(acme, ""), acme, low.ID, false, [32]byte{})
	require.NoError(t, err)
	require.Empty(t, w.getVolume(low.Spec.Volumes()[0]).VM)
	bad := small("bad", func(r *CreateRequest) { r.Metadata = map[string]string{cloud.HAPriority: "101"} })
	_, err = w.vms.Create(w.as(acme, ""), acme, bad, [32]byte{})
	require.ErrorContains(t, err, "from 0 to 100")
}

// TestPriorityWhileVolumesAreAttached loses a host when the volume of the VM with the lower priority becomes free first.
// The VM must not take the room that the other VM needs, unless that VM has waited for too long.
func TestPriorityWhileVolumesAreAttached(t *testing.T) {
	for _, late := range []bool{false, true} {
		w := newWorld(t)
		w.sharedHost("n1", 4096)
		low := w.running("low", func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = "10" })
		high := w.running("high", func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = "90" })
		next := w.sharedHost("n2", 512)
		w.lose(next)
		w.recover()
		w.flush(low.Spec.Volumes()[0])
		w.recover()
		require.Equal(t, cloud.Pending, w.get(low.ID).State)
		if late {
			w.Clock.Advance(priorityTime)
			w.Heartbeat(next)
			w.recover()
			require.Equal(t, next, w.get(low.ID).Node)
			continue
		}
		w.flush(high.Spec.Volumes()[0])
		w.Heartbeat(next)
		w.recover()
		require.Equal(t, next, w.get(high.ID).Node, w.get(high.ID).Status.LastError)
		require.Contains(t, w.get(low.ID).Status.LastError, "waits for a host: no host fits")
	}
}

// TestPriorityAfterLeaderChange changes the leader while two VMs wait for a host. The only host with room for the VM with
// the higher priority has not sent the new leader a heartbeat yet. The other VM must not be placed before that host has
// sent a heartbeat, or counts as unresponsive.
func TestPriorityAfterLeaderChange(t *testing.T) {
	for _, answers := range []bool{true, false} {
		w := newWorld(t)
		w.sharedHost("n1", 4096)
		low := w.running("low", func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = "10" })
		high := w.running("high", func(r *CreateRequest) {
			r.Metadata[cloud.HAPriority], r.Spec.Memory = "90", &cloud.Memory{SizeMiB: 1024}
		})
		small, large := w.sharedHost("n2", 512), w.sharedHost("n3", 1024)
		w.lose(small)
		w.recover()
		w.flush(low.Spec.Volumes()[0])
		w.flush(high.Spec.Volumes()[0])
		w.NewTerm()
		w.Heartbeat(small)
		require.NoError(t, w.vms.Recover(t.Context()))
		require.Equal(t, cloud.Pending, w.get(low.ID).State, "a VM with a higher priority waits for a heartbeat")
		if answers {
			w.Heartbeat(large)
		} else {
			w.Clock.Advance(cloud.HeartbeatTimeout*time.Millisecond + time.Second)
			w.Heartbeat(small)
		}
		w.recover()
		require.Equal(t, small, w.get(low.ID).Node, w.get(low.ID).Status.LastError)
		if answers {
			require.Equal(t, large, w.get(high.ID).Node, w.get(high.ID).Status.LastError)
		}
	}
}

// TestPriorityOfVMsOfTwoHosts loses two hosts at once, one of which sent its last heartbeat a few seconds later. A VM of
// the other one must not take the room that a VM with a higher priority needs.
func TestPriorityOfVMsOfTwoHosts(t *testing.T) {
	w := newWorld(t)
	w.sharedHost("n1", 4096)
	low := w.running("low", func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = "10" })
	w.Clock.Advance(5 * time.Second)
	second := w.sharedHost("n2", 8192)
	high := w.running("high", func(r *CreateRequest) { r.Metadata[cloud.HAPriority] = "90" })
	require.NotEqual(t, low.Node, high.Node)
	w.Heartbeat(second)
	next := w.sharedHost("n3", 512)
	w.Clock.Advance(node.LostTime*time.Millisecond - 2*time.Second)
	w.Heartbeat(next)
	w.AwaitFleet()
	require.NoError(t, w.vms.Recover(t.Context()))
	w.followed()
	require.Equal(t, cloud.Pending, w.get(low.ID).State)
	w.flush(low.Spec.Volumes()[0])
	require.NoError(t, w.vms.Recover(t.Context()))
	require.Equal(t, cloud.Pending, w.get(low.ID).State, "the other host will be lost in two seconds")
	w.Clock.Advance(3 * time.Second)
	w.Heartbeat(next)
	w.recover()
	w.flush(high.Spec.Volumes()[0])
	w.Heartbeat(next)
	w.recover()
	require.Equal(t, next, w.get(high.ID).Node, w.get(high.ID).Status.LastError)
	require.Contains(t, w.get(low.ID).Status.LastError, "waits for a host: no host fits")
}

// TestRecoverMissingVM creates a VM with a given ID, which no record has.
func TestRecoverMissingVM(t *testing.T) {
	w := newWorld(t)
	w.AddHost("n1", plenty())
	id := newID()
	r := small("web")
	made, err := w.vms.RecoverVM(w.as(acme, ""), acme, id, &r, true, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, []any{id, cloud.Creating, true}, []any{made.ID, made.State, made.Desired.On})
	_, err = w.vms.RecoverVM(w.as(acme, ""), acme, id, &r, true, [32]byte{})
	require.ErrorContains(t, err, "spec: must be empty")
	_, err = w.vms.RecoverVM(w.as(other, ""), other, id, &r, true, [32]byte{})
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = w.vms.RecoverVM(w.as(acme, ""), acme, newID(), nil, true, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = w.vms.Delete(w.as(acme, ""), acme, id, false, [32]byte{})
	require.NoError(t, err)
	_, err = w.vms.RecoverVM(w.as(acme, ""), acme, id, &r, false, [32]byte{})
	require.ErrorContains(t, err, "has not removed the deleted VM")
}
