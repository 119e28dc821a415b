package vm

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestDeleteTable checks in which states a delete and a forced delete succeed, and which capacity each frees at once:
// processors and memory of a VM that is certainly off, nothing of a VM that may still run. The rest must be freed once,
// when the host reports the VM absent.
func TestDeleteTable(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	storage := cloud.Capacity{StorageGiB: taken.StorageGiB}
	i := 0
	for state, row := range map[cloud.State]struct{ plain, forced *cloud.Capacity }{
		cloud.Creating: {&storage, &storage},
		cloud.Stopped:  {&storage, &storage},
		cloud.Failed:   {&storage, &storage},
		cloud.Error:    {&taken, &taken},
		cloud.Starting: {nil, &taken},
		cloud.Running:  {nil, &taken},
		cloud.Stopping: {nil, &taken},
	} {
		for forced, left := range map[bool]*cloud.Capacity{false: row.plain, true: row.forced} {
			i++
			name := fmt.Sprintf("%s forced %v", state, forced)
			vm := w.createInState(state, fmt.Sprint("vm-", i))
			require.Equal(t, taken, w.allocated(host), name)
			_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID, Force: forced})
			if left == nil {
				require.True(t, fault.Is(err, fault.FailedPrecondition), "%s: %v", name, err)
				require.ErrorContains(t, err, state.String())
				require.Equal(t, vm, w.get(vm.ID))
				w.deleteIfPresent(vm.ID)
				continue
			}
			require.NoError(t, err, name)
			_, err = w.vms.Get(t.Context(), acme, vm.ID)
			require.True(t, fault.Is(err, fault.NotFound), name)
			require.Equal(t, *left, w.allocated(host), name)

			w.reportAbsent(host, vm.ID, vm.Generation)
			require.Equal(t, *left, w.allocated(host), "a report from before the delete must free no capacity")
			w.reportAbsent("00000000-0000-7000-a000-000000000077", vm.ID, vm.Generation+1)
			require.Equal(t, *left, w.allocated(host), "a report of another host must free no capacity")
			w.reportAbsent(host, vm.ID, vm.Generation+1)
			require.Zero(t, w.allocated(host), name)
			w.create("next") // a second report must not free the capacity of this VM
			w.reportAbsent(host, vm.ID, vm.Generation+1)
			require.Equal(t, taken, w.allocated(host), name)
			list, _, err := w.vms.List(t.Context(), acme, 0, "", "")
			require.NoError(t, err)
			w.deleteIfPresent(list[0].ID)
			require.Zero(t, w.allocated(host))
		}
	}
}

// TestDeleteOfStartedCreatingVM checks that the processors and memory of a VM which was started while it was CREATING stay
// allocated until its host reports the VM absent: the host may have started it already.
func TestDeleteOfStartedCreatingVM(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Creating, "web")
	w.power(vm.ID, start, 0)
	w.power(vm.ID, stop, 0)
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID})
	require.NoError(t, err)
	require.Equal(t, taken, w.allocated(host), "the host may still run the VM")
	w.reportAbsent(host, vm.ID, vm.Generation+3)
	require.Zero(t, w.allocated(host))
}

// TestDeleteOnUnresponsiveHost checks that a VM on an unresponsive host can be deleted only with force, and that its
// storage stays allocated until the host reports the VM absent.
func TestDeleteOnUnresponsiveHost(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Stopped, "web")
	w.Clock.Advance((cloud.HeartbeatTimeout + 1) * time.Millisecond)
	_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, false, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "does not answer")
	_, err = w.vms.Delete(w.as(acme, ""), acme, vm.ID, true, [32]byte{})
	require.NoError(t, err, "the call must not wait for an unresponsive host")
	require.EqualValues(t, taken.StorageGiB, w.allocated(host).StorageGiB)
	require.NoError(t, w.store.Local(func(v *store.View) error {
		assignments, err := w.vms.Assigned(v, host)
		require.NoError(t, err)
		require.Equal(t, "POWER_DESTROYED", assignments[0].State.GetPower().String(), "the host must destroy the VM when it is back")
		require.Greater(t, assignments[0].State.GetGeneration(), vm.Generation)
		return nil
	}))
	w.reportAbsent(host, vm.ID, vm.Generation+1)
	require.Zero(t, w.allocated(host))
	require.NoError(t, w.store.Local(func(v *store.View) error {
		assignments, err := w.vms.Assigned(v, host)
		require.Empty(t, assignments)
		return err
	}))
}

// TestForcedDeleteWaitsForPowerOff checks that a forced delete of a running VM returns only after the host has reported
// the VM absent.
func TestForcedDeleteWaitsForPowerOff(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	done := make(chan error)
	go func() {
		_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, true, [32]byte{})
		done <- err
	}()
	_, err := store.Await(t.Context(), w.store, node.PlacedVMs, func(p *node.Placed) (bool, error) { return p.Gone, nil }, string(host), string(vm.ID))
	require.NoError(t, err)
	select {
	case <-done:
		t.Fatal("the delete returned while the guest ran")
	default:
	}
	w.reportAbsent(host, vm.ID, vm.Generation+1)
	require.NoError(t, <-done)
}

// TestDeleteIsIdempotent repeats a delete under its idempotency key. It must return the first response although the VM
// no longer exists.
func TestDeleteIsIdempotent(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Stopped, "web")
	for _, replayed := range []bool{false, true} {
		again, err := w.vms.Delete(w.as(acme, "k"), acme, vm.ID, false, [32]byte{})
		require.NoError(t, err)
		require.Equal(t, replayed, again)
	}
	_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, false, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound))
}

// TestUpdateTable changes VMs in every state. Labels and metadata can always be changed, boot images only of a STOPPED
// VM, and disks and NICs never. TestResizeOfRunningVM changes processors and memory of VMs that are not STOPPED. A
// refused update must change nothing.
func TestUpdateTable(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", cloud.Capacity{VCPUs: 100, MemoryMiB: 64 << 10, StorageGiB: 1000})
	kernel := w.image(1, 1<<20)
	private := w.image(2, 1<<20, func(i *cloud.Image) { i.Org = other.Org })
	needy := w.image(3, 1<<20, func(i *cloud.Image) { i.MinMemoryMiB = 2048 })
	i := 0
	fresh := func(state cloud.State) *cloud.VM {
		i++
		name := fmt.Sprint("vm-", i)
		vm := w.createInState(state, name)
		_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{
			Labels: map[string]string{"env": "prod", "tier": "1"}, Metadata: map[string]string{"note": "x"},
		})
		require.NoError(t, err)
		return w.get(vm.ID)
	}
	anywhere := []cloud.State{cloud.Creating, cloud.Stopped, cloud.Starting, cloud.Running, cloud.Stopping, cloud.Error, cloud.Failed}
	off := []cloud.State{cloud.Stopped}
	on := []cloud.State{cloud.Creating, cloud.Running, cloud.Error}
	later := []cloud.State{cloud.Starting, cloud.Running, cloud.Stopping, cloud.Error}
	never := []cloud.State{cloud.Creating, cloud.Failed}
	many := map[string]string{}
	for i := range cloud.MaxPairs {
		many[fmt.Sprint(i)] = "x"
	}
	for _, c := range []struct {
		name   string
		in     []cloud.State
		change Change
		kind   fault.Kind
		says   string
		check  func(before, now *cloud.VM)
	}{
		{"labels", anywhere, Change{Labels: map[string]string{"env": "", "new": "y", "none": ""}}, 0, "", func(before, now *cloud.VM) {
			require.Equal(t, map[string]string{"tier": "1", "new": "y"}, now.Labels)
			require.Equal(t, before.Metadata, now.Metadata)
			require.Equal(t, before.Generation, now.Generation, "new labels must not change the generation, because the host ignores labels")
		}},
		{"metadata", anywhere, Change{Metadata: map[string]string{"note": "", cloud.RestartPolicy: "on-failure"}}, 0, "", func(_, now *cloud.VM) {
			require.Equal(t, map[string]string{cloud.RestartPolicy: "on-failure"}, now.Metadata)
		}},
		{"metadata tokens", anywhere, Change{Metadata: map[string]string{cloud.MetadataTokens: "optional"}}, 0, "", func(before, now *cloud.VM) {
			require.False(t, convert.Assigned(before).GetMetadataTokensOptional(), "tokens are required by default")
			require.True(t, convert.Assigned(now).GetMetadataTokensOptional())
			require.Greater(t, now.Generation, before.Generation, "the host must receive the change")
		}},
		{"metadata tokens as before", anywhere, Change{Metadata: map[string]string{cloud.MetadataTokens: "required"}}, 0, "", func(before, now *cloud.VM) {
			require.Equal(t, before.Generation, now.Generation)
		}},
		{"nothing", anywhere, Change{}, 0, "", func(before, now *cloud.VM) { require.Equal(t, before, now) }},
		{"the same vCPUs and labels", anywhere, Change{CPU: &cloud.CPU{VCPUs: 2}, Labels: map[string]string{"env": "prod"}}, 0, "", func(before, now *cloud.VM) {
			require.Equal(t, before, now)
		}},
		{"the same disks", anywhere, Change{Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 5}}}, 0, "", func(before, now *cloud.VM) { require.Equal(t, before, now) }},
		{"more vCPUs and memory", off, Change{CPU: &cloud.CPU{VCPUs: 8}, Memory: &cloud.Memory{SizeMiB: 4096}}, 0, "", func(before, now *cloud.VM) {
			require.EqualValues(t, 8, now.Spec.CPU.VCPUs)
			require.Greater(t, now.Generation, before.Generation)
			require.Equal(t, cloud.Capacity{VCPUs: 8, MemoryMiB: 4096, StorageGiB: 5}, w.allocated(host))
		}},
		{"less", off, Change{CPU: &cloud.CPU{VCPUs: 1}, Memory: &cloud.Memory{SizeMiB: 64}}, 0, "", func(_, _ *cloud.VM) {
			require.Equal(t, cloud.Capacity{VCPUs: 1, MemoryMiB: 64, StorageGiB: 5}, w.allocated(host))
		}},
		{"a kernel", off, Change{Boot: &cloud.Boot{Kernel: kernel}}, 0, "", func(_, now *cloud.VM) { require.Equal(t, kernel, now.Kernel.ID) }},
		{"CPUs of a VM that cannot have a process", never, Change{CPU: &cloud.CPU{VCPUs: 1}}, fault.FailedPrecondition, "cannot resize VM", nil},
		{"memory of a VM that cannot have a process", never, Change{Memory: &cloud.Memory{SizeMiB: 64}}, fault.FailedPrecondition, "cannot resize VM", nil},
		{"CPUs and a kernel of a VM that is not STOPPED", on, Change{CPU: &cloud.CPU{VCPUs: 1}, Boot: &cloud.Boot{Kernel: kernel}}, fault.FailedPrecondition, "stop VM", nil},
		{"more than the host has, later", later, Change{CPU: &cloud.CPU{VCPUs: 101}}, fault.ResourceExhausted, "has 100 vCPUs free, 101 needed", nil},
		{"a CPU model that the host does not have, later", later, Change{CPU: &cloud.CPU{VCPUs: 2, Model: "Itanium"}}, fault.ResourceExhausted, "Itanium", nil},
		{"a pending resize", anywhere, Change{Metadata: map[string]string{cloud.PendingResize: "vcpus=4"}}, fault.InvalidArgument, "cannot be set", nil},
		{"boot images of a VM that is not STOPPED", on, Change{Boot: &cloud.Boot{Kernel: kernel}}, fault.FailedPrecondition, "stop VM", nil},
		{"more than the host has", off, Change{CPU: &cloud.CPU{VCPUs: 101}}, fault.ResourceExhausted, "has 100 vCPUs free, 101 needed", nil},
		{"more than any VM has", off, Change{CPU: &cloud.CPU{VCPUs: 289}}, fault.InvalidArgument, "spec.cpu.vcpus", nil},
		{"a CPU model that the host does not have", off, Change{CPU: &cloud.CPU{VCPUs: 2, Model: "Itanium"}}, fault.ResourceExhausted, "Itanium", nil},
		{"another org's kernel", off, Change{Boot: &cloud.Boot{Kernel: private}}, fault.NotFound, string(private), nil},
		{"another org's initrd", off, Change{Boot: &cloud.Boot{Kernel: kernel, Initrd: private}}, fault.NotFound, string(private), nil},
		{"a kernel that needs more memory", off, Change{Boot: &cloud.Boot{Kernel: needy}}, fault.InvalidArgument, "2048 MiB", nil},
		{"a TPM that the host does not have", off, Change{Security: &cloud.Security{TPM: true}}, fault.ResourceExhausted, "does not serve tpm", nil},
		{"another disk", anywhere, Change{Disks: []cloud.Disk{{ID: "b", Blank: true, SizeGiB: 5}}}, fault.InvalidArgument, "can only make disks larger", nil},
		{"a smaller disk", anywhere, Change{Disks: []cloud.Disk{{ID: "a", Blank: true, SizeGiB: 4}}}, fault.InvalidArgument, "spec.disks[a].size_gib", nil},
		{"a NIC", anywhere, Change{Network: []cloud.NIC{{ID: "nic0"}}}, fault.InvalidArgument, "cannot be changed", nil},
		{"another anti-affinity group", anywhere, Change{Labels: map[string]string{cloud.AntiAffinityLabel: "db"}}, fault.InvalidArgument, "fixed when", nil},
		{"no anti-affinity group, as before", anywhere, Change{Labels: map[string]string{cloud.AntiAffinityLabel: ""}}, 0, "", func(before, now *cloud.VM) { require.Equal(t, before, now) }},
		{"an invalid selector", anywhere, Change{Labels: map[string]string{cloud.NodeSelectorLabel: "ssd"}}, fault.InvalidArgument, "k=v", nil},
		{"a metadata key with a typing error", anywhere, Change{Metadata: map[string]string{"trivet/restrat": "never"}}, fault.InvalidArgument, "trivet/restrat is unknown", nil},
		{"a label with a typing error", anywhere, Change{Labels: map[string]string{"trivet/node-selecter": "a=b"}}, fault.InvalidArgument, "trivet/node-selecter is unknown", nil},
		{"keys of users", anywhere, Change{Labels: map[string]string{"example.org/trivet/x": "1"}, Metadata: map[string]string{"trivet": "1"}}, 0, "", func(_, now *cloud.VM) {
			require.Equal(t, "1", now.Labels["example.org/trivet/x"])
			require.Equal(t, "1", now.Metadata["trivet"])
		}},
		{"too many labels", anywhere, Change{Labels: many}, fault.InvalidArgument, "labels", nil},
		{"an invalid restart policy", anywhere, Change{Metadata: map[string]string{cloud.RestartPolicy: "x"}}, fault.InvalidArgument, "never or on-failure", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, state := range c.in {
				vm := fresh(state)
				allocated := w.allocated(host)
				out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, c.change)
				if c.check == nil {
					require.True(t, fault.Is(err, c.kind), "%s: %v", state, err)
					require.ErrorContains(t, err, c.says)
					require.Equal(t, vm, w.get(vm.ID), "a refused update changed something")
					require.Equal(t, allocated, w.allocated(host))
				} else {
					require.NoError(t, err, state)
					require.Equal(t, out, *w.get(vm.ID))
					c.check(vm, &out)
				}
				w.deleteIfPresent(vm.ID)
				require.Zero(t, w.allocated(host), "the deleted VM must have no allocated capacity")
			}
		})
	}
}

// TestUpdateOfUnknownKeys changes and removes unknown keys that begin with trivet/, which the VM has from another version.
// The VM can also be changed otherwise.
func TestUpdateOfUnknownKeys(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.create("web")
	w.update(func(tx *store.Tx) {
		stored := *vm
		stored.Metadata, stored.Labels = map[string]string{"trivet/old": "1"}, map[string]string{"trivet/older": "1"}
		VMs.Put(tx, &stored, string(stored.Project), string(stored.ID))
	})
	for _, c := range []struct{ change, metadata, labels map[string]string }{
		{map[string]string{"trivet/old": "2"}, map[string]string{"trivet/old": "2"}, map[string]string{"trivet/older": "1"}},
		{map[string]string{"note": "x"}, map[string]string{"trivet/old": "2", "note": "x"}, map[string]string{"trivet/older": "1"}},
		{map[string]string{"trivet/old": ""}, map[string]string{"note": "x"}, map[string]string{"trivet/older": "1"}},
		{map[string]string{"trivet/old": ""}, map[string]string{"note": "x"}, map[string]string{"trivet/older": "1"}},
	} {
		out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: c.change})
		require.NoError(t, err)
		require.Equal(t, c.metadata, out.Metadata)
		require.Equal(t, c.labels, out.Labels)
	}
	_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: map[string]string{"trivet/old": "3"}})
	require.True(t, fault.Is(err, fault.InvalidArgument), "a removed key is unknown: %v", err)
	out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Labels: map[string]string{"trivet/older": ""}})
	require.NoError(t, err)
	require.Empty(t, out.Labels)
}

// TestUpdateKeepsCurrentImages checks that a VM whose org can no longer see its image can still be updated, and that
// the image's minimum memory still applies.
func TestUpdateKeepsCurrentImages(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	id := w.image(1, 1<<30, func(i *cloud.Image) { i.Org, i.Visibility = other.Org, cloud.Public })
	vm := w.create("web", func(q *CreateRequest) { q.Spec.Disks = []cloud.Disk{{ID: "root", Image: id, SizeGiB: 1}} })
	w.report(vm.ID, cloud.ObservedBuilt)
	w.image(1, 1<<30, func(i *cloud.Image) { i.Org, i.MinMemoryMiB = other.Org, 256 })
	out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{CPU: &cloud.CPU{VCPUs: 4}})
	require.NoError(t, err)
	require.Equal(t, vm.Disks, out.Disks)
	_, err = w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Memory: &cloud.Memory{SizeMiB: 128}})
	require.ErrorContains(t, err, "needs 256 MiB", "the minimum memory of the current image must still apply")
}

// TestHostReportLimits checks that too long texts in a host's report are cut so that the record stays readable, and
// that a host's reports about VMs of other hosts are ignored.
func TestHostReportLimits(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	long := strings.Repeat("é", 4<<10)
	now := w.report(vm.ID, cloud.ObservedRunning, func(o *cloud.Observation) {
		o.LastError = "x" + long // é is 2 bytes, so the limit falls within a character
		for range 1000 {
			o.Addresses = append(o.Addresses, long)
		}
		o.Usage = &cloud.Usage{MemoryMiB: 7}
	})
	require.Len(t, now.Status.LastError, maxLastError-1)
	require.Len(t, now.Status.Addresses, maxAddresses)
	require.LessOrEqual(t, len(now.Status.Addresses[0]), maxAddress)
	list, _, err := w.vms.List(t.Context(), acme, 0, "", "")
	require.NoError(t, err, "the record must stay readable")
	require.Equal(t, now, list[0])
	require.EqualValues(t, 7, w.vms.Usage(t.Context(), now)[vm.ID].MemoryMiB)

	lies := []cloud.Observation{
		{VM: vm.ID, Generation: 99, Observed: cloud.ObservedEnded, Exit: cloud.ExitFailed, StartsDone: 99, Usage: &cloud.Usage{MemoryMiB: 8}},
		{VM: vm.ID, Generation: 99, Observed: cloud.ObservedRunning, Usage: &cloud.Usage{MemoryMiB: 9}},
		{VM: "not an id", Observed: cloud.ObservedRunning, Usage: &cloud.Usage{}},
		{VM: newID(), Observed: cloud.ObservedRunning, Usage: &cloud.Usage{}},
	}
	_, err = w.vms.Observed(t.Context(), "00000000-0000-7000-a000-000000000077", lies)
	require.NoError(t, err)
	require.Equal(t, now, w.get(vm.ID))
	require.EqualValues(t, 7, w.vms.Usage(t.Context(), now)[vm.ID].MemoryMiB)
	_, err = w.vms.Observed(t.Context(), host, lies[2:])
	require.NoError(t, err)
	require.Len(t, w.vms.usage, 1)
	w.report(vm.ID, cloud.ObservedEnded, failed("killed"))
	require.Empty(t, w.vms.usage)
}

// TestUnchangedReportWritesNothing checks that a report that changes nothing, or is of an earlier generation, writes no
// log entry.
func TestUnchangedReportWritesNothing(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	before := w.store.Revision()
	for range 3 {
		w.report(vm.ID, cloud.ObservedRunning)
		w.report(vm.ID, cloud.ObservedBuilt, func(o *cloud.Observation) { o.Generation-- })
	}
	require.Equal(t, before, w.store.Revision())
}

// TestWatch checks that a watch sends the current VM and then one event per commit of this VM, in order, and ends when
// the VM is deleted.
func TestWatch(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.create("web")
	events := make(chan *vmv1.VmEvent, 100)
	ended := make(chan error)
	first := make(chan struct{})
	go func() {
		ended <- w.vms.Watch(t.Context(), acme, vm.ID, func(late rpc.Lazy) error {
			if len(events) == 0 {
				defer close(first)
			}
			m, err := late()
			if err != nil {
				return err
			}
			e := &vmv1.VmEvent{}
			if err := proto.Unmarshal(m.Data(), e); err != nil {
				return err
			}
			events <- e
			return nil
		})
	}()
	<-first
	w.report(vm.ID, cloud.ObservedBuilding)
	w.report(vm.ID, cloud.ObservedBuilt)
	w.power(vm.ID, start, 0)
	w.report(vm.ID, cloud.ObservedRunning)
	_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Labels: map[string]string{"a": "b"}})
	require.NoError(t, err)
	w.create("another")
	w.power(vm.ID, reboot, 0)
	w.power(vm.ID, stop, 0)
	w.Clock.Advance(time.Second)
	w.report(vm.ID, cloud.ObservedBuilt)
	_, err = w.vms.Delete(w.as(acme, ""), acme, vm.ID, false, [32]byte{})
	require.NoError(t, err)
	require.NoError(t, <-ended, "the watch must end when the VM is deleted")
	close(events)
	var types []string
	last := int64(0)
	for e := range events {
		require.Equal(t, string(vm.ID), e.GetVmId())
		require.Equal(t, string(vm.ID), e.GetVm().GetId())
		require.GreaterOrEqual(t, e.GetTimestamp(), last)
		last = e.GetTimestamp()
		types = append(types, fmt.Sprintf("%d %s", e.GetEventType(), cloud.State(e.GetVm().GetState())))
	}
	require.Equal(t, []string{
		"2 CREATING", "2 CREATING", "4 STOPPED", "4 STARTING", "4 RUNNING", "2 RUNNING", "2 RUNNING", "4 STOPPING", "4 STOPPED", "3 DELETED",
	}, types)
	require.Equal(t, CreatedEvent, event(store.Change[cloud.VM]{Value: vm}, 0).Type)
}

// TestSettle checks that the leader ends transient states whose deadline has passed, and changes no other VM.
func TestSettle(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	creating, starting, stopping, running := w.createInState(cloud.Creating, "a"), w.createInState(cloud.Starting, "b"), w.createInState(cloud.Stopping, "c"), w.createInState(cloud.Running, "d")
	settle := func() {
		require.Eventually(t, func() bool {
			want := map[cloud.VMID]cloud.Time{}
			for _, vm := range []*cloud.VM{creating, starting, stopping, running} {
				if at := w.get(vm.ID).Deadline; at != 0 {
					want[vm.ID] = at
				}
			}
			w.vms.mu.Lock()
			defer w.vms.mu.Unlock()
			return maps.EqualFunc(want, w.vms.deadlines, func(at cloud.Time, d deadline) bool { return at == d.at })
		}, 10*time.Second, time.Millisecond, "the leader must know the deadlines of the transient states")
		require.NoError(t, w.vms.Settle(t.Context()))
	}
	settle()
	require.Equal(t, starting, w.get(starting.ID), "a VM must not change before its deadline")
	w.Clock.Advance(cloud.StartingTime * time.Millisecond)
	settle()
	require.Equal(t, cloud.Error, w.get(starting.ID).State)
	require.Contains(t, w.get(starting.ID).Status.LastError, "did not finish STARTING")
	require.Equal(t, cloud.Error, w.get(stopping.ID).State)
	require.Equal(t, cloud.Creating, w.get(creating.ID).State)
	w.Clock.Advance(cloud.CreatingTime * time.Millisecond)
	settle()
	require.Equal(t, cloud.Error, w.get(creating.ID).State)
	require.Equal(t, running, w.get(running.ID))
	require.Equal(t, taken.VCPUs*4, w.allocated(host).VCPUs, "a VM whose state was changed to ERROR must keep its capacity")
	w.report(starting.ID, cloud.ObservedRunning)
	require.Equal(t, cloud.Running, w.get(starting.ID).State, "a report after the deadline must still be applied")
}
