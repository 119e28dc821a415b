package live

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// witness watches the records in the members' stores, and reads every revision completely and in order. It checks the
// invariants of the records, and compares the records with the actual state of the hosts.
type witness struct {
	f *fleet

	mu       sync.Mutex
	next     int64 // the revision of the next commit
	vms      map[cloud.VMID]*cloud.VM
	nodes    map[cloud.NodeID]*cloud.Node
	placed   map[cloud.NodeID]map[cloud.VMID]*node.Placed
	names    map[string]cloud.VMID
	uses     map[string]bool
	ever     map[cloud.VMID]uint64   // the highest generation of each VM ever, including deleted VMs
	made     map[string][]cloud.VMID // the VMs created under each idempotency key; more than one is a violation
	networks *networkRecords
	volumes  *volumeRecords
	// snapshots has the records of snapshots. removed has those that were removed in the present revision.
	snapshots map[cloud.SnapshotID]*cloud.Snapshot
	removed   []*cloud.Snapshot
	// scheduled has the intervals in which the schedule of a volume has created a snapshot: the ID of the volume, and the
	// number of the interval.
	scheduled map[string]bool
	// unleased has the VMs that run without the lease that they need, and since when.
	unleased map[runner]time.Time
	truth    truth
}

func newAudit(f *fleet) *witness {
	return &witness{
		f: f, next: 2, vms: map[cloud.VMID]*cloud.VM{}, nodes: map[cloud.NodeID]*cloud.Node{},
		placed: map[cloud.NodeID]map[cloud.VMID]*node.Placed{}, names: map[string]cloud.VMID{}, uses: map[string]bool{},
		ever: map[cloud.VMID]uint64{}, made: map[string][]cloud.VMID{}, networks: newNetworkRecords(f), volumes: newVolumeRecords(),
		snapshots: map[cloud.SnapshotID]*cloud.Snapshot{}, scheduled: map[string]bool{}, unleased: map[runner]time.Time{},
		truth: truth{runner: map[cloud.VMID]*host{}, started: map[cloud.VMID]map[uint64]bool{}, removed: map[removal]bool{}},
	}
}

// follow watches the records on one member until that member's process ends. follow runs for each running member. A
// revision is checked when the first of the members delivers it.
func (a *witness) follow(p *process) {
	a.mu.Lock()
	w := p.engine.Watch(watch.Options{Key: []byte{0}, End: []byte{0}, FromRevision: a.next})
	a.mu.Unlock()
	p.work.Go(func() {
		defer w.Close()
		var revision []watch.Event
		for {
			b, err := w.Next(p.ctx)
			if err != nil {
				if !errors.Is(err, context.Canceled) {
					a.f.fail("the watch of all records on %s ended: %v", p.s.name, err)
				}
				return
			}
			for _, e := range b.Events {
				if len(revision) > 0 && revision[0].KV.ModRevision != e.KV.ModRevision {
					a.commit(p, revision)
					revision = nil
				}
				revision = append(revision, e)
			}
			if !b.Partial && len(revision) > 0 {
				a.commit(p, revision)
				revision = nil
			}
		}
	})
}

// commit checks the events of one revision, and then the consistency of all records as of that revision.
func (a *witness) commit(p *process, events []watch.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	revision := events[0].KV.ModRevision
	if revision < a.next {
		return // checked already; ring (a) of package sim checks that members agree
	}
	if revision > a.next {
		a.f.fail("%s shows revision %d where %d is due", p.s.name, revision, a.next)
	}
	a.next = revision + 1
	a.f.count("commits")
	if a.checkRemoval(events) {
		return
	}
	for _, e := range events {
		if err := a.change(e); err != nil {
			a.f.fail("revision %d: %v", revision, err)
		}
	}
	if err := a.networks.endRevision(); err != nil {
		a.f.fail("revision %d: %v", revision, err)
	}
	if err := cmp.Or(a.balance(), a.balanceVolumes(), a.checkMaintenance(), a.checkLeases()); err != nil {
		a.f.fail("revision %d: %v", revision, err)
	}
}

// change applies one event to the witness's copy of the records. It returns an error if the change of the record is not
// allowed.
func (a *witness) change(e watch.Event) error {
	key := string(e.KV.Key)
	parts := strings.Split(key, "/")
	deleted := e.Type == watch.EventDelete
	switch parts[0] {
	case "vm":
		id := cloud.VMID(parts[2])
		if deleted {
			a.f.trace.Add("commit %d: VM %s is no more", e.KV.ModRevision, short(id))
			a.volumes.deletedVM(a.vms[id])
			delete(a.vms, id)
			return nil
		}
		now, err := decode[cloud.VM](e.KV.Value)
		if err != nil {
			return err
		}
		before := a.vms[id]
		a.vms[id] = now
		return a.step(e.KV.ModRevision, before, now)
	case "node":
		if deleted {
			return fmt.Errorf("node %s is deleted", parts[1])
		}
		n, err := decode[cloud.Node](e.KV.Value)
		before := a.nodes[cloud.NodeID(parts[1])]
		a.nodes[cloud.NodeID(parts[1])] = n
		if err == nil {
			a.countDrain(before, n)
		}
		return err
	case "placed":
		on, id := cloud.NodeID(parts[1]), cloud.VMID(parts[2])
		if a.placed[on] == nil {
			a.placed[on] = map[cloud.VMID]*node.Placed{}
		}
		if deleted {
			if was := a.placed[on][id]; was == nil || !was.Gone {
				return fmt.Errorf("the placement of %s goes away, and its host was not asked to destroy it", id)
			}
			delete(a.placed[on], id)
			return nil
		}
		now, err := decode[node.Placed](e.KV.Value)
		if err != nil {
			return err
		}
		if was := a.placed[on][id]; was != nil && now.Generation < was.Generation {
			return fmt.Errorf("what %s should do with %s goes back from generation %d to %d", on, id, was.Generation, now.Generation)
		}
		a.placed[on][id] = now
		if !now.Gone {
			a.mayRun(on, id)
		}
	case "vm-name":
		if deleted {
			delete(a.names, parts[2])
			return nil
		}
		id, err := decode[cloud.VMID](e.KV.Value)
		if err != nil {
			return err
		}
		if other, taken := a.names[parts[2]]; taken {
			return fmt.Errorf("the name %s is taken from %s for %s", parts[2], other, *id)
		}
		a.names[parts[2]] = *id
	case "volume", "bound-volume", "shared-pool":
		return a.changeVolume(e, parts)
	case "snapshot":
		return a.changeSnapshot(e, parts)
	case "image-use":
		if deleted {
			delete(a.uses, key)
		} else {
			a.uses[key] = true
		}
	default:
		return a.networks.change(e, parts)
	}
	return nil
}

// keyLabel is the label in which tenants store the idempotency key of the call that creates a VM.
const keyLabel = "sim/key"

// step checks a change of a VM's record from the value before to the value now. The generation and the counters must
// not decrease, and the VM must not change its host. For a new VM, before is nil.
func (a *witness) step(revision int64, before, now *cloud.VM) error {
	if before == nil {
		if last, was := a.ever[now.ID]; was {
			return fmt.Errorf("VM %s is made again after generation %d", now.ID, last)
		}
		before = &cloud.VM{}
		key := now.Labels[keyLabel]
		if a.made[key] = append(a.made[key], now.ID); len(a.made[key]) > 1 {
			return fmt.Errorf("the idempotency key %s made VMs %v", key, a.made[key])
		}
	}
	a.ever[now.ID] = max(a.ever[now.ID], now.Generation)
	if before.State != now.State || before.Generation != now.Generation {
		a.f.trace.Add("commit %d: VM %s %s -> %s, generation %d, wish %+v, seen %s start %d %s", revision, short(now.ID), before.State,
			now.State, now.Generation, now.Desired, now.Status.Actual, now.Status.StartsDone, now.Status.LastError)
	}
	w, v := before.Desired, now.Desired
	if now.Generation < before.Generation || v.Starts < w.Starts || v.Reboots < w.Reboots || v.Resets < w.Resets {
		return fmt.Errorf("VM %s goes back from generation %d %+v to %d %+v", now.ID, before.Generation, w, now.Generation, v)
	}
	if v != w && now.Generation == before.Generation {
		return fmt.Errorf("VM %s has another wish and the same generation %d", now.ID, now.Generation)
	}
	if err := a.checkMigration(before, now); err != nil {
		return err
	}
	if before.Node != "" && now.Node != before.Node && before.Migration == nil {
		if now.Node != "" || now.State != cloud.Pending {
			return fmt.Errorf("VM %s goes from %s to %s", now.ID, before.Node, now.Node)
		}
		if h := a.f.hostOf(before.Node); h != nil {
			if start, pid, ok := h.runs(now.ID); ok {
				return fmt.Errorf("VM %s loses its host %s, on which pid %d of start %d runs", now.ID, h.name, pid, start)
			}
			if before.State != cloud.Stopped && h.leaseValid() { // a drain moves stopped VMs
				return fmt.Errorf("VM %s loses its host %s, whose lease is valid", now.ID, h.name)
			}
		}
		a.f.count("VMs of lost hosts")
	}
	if now.State == cloud.Stopped && before.State != cloud.Stopped {
		// Each start launches a process only once. So if a process of this or an earlier start runs now, it was already
		// running when the state STOPPED was committed, which is a violation.
		if h := a.f.hostOf(now.Node); h != nil {
			if start, pid, ok := h.runs(now.ID); ok && start <= v.Starts {
				return fmt.Errorf("VM %s is recorded STOPPED, but on %s runs pid %d of start %d", now.ID, h.name, pid, start)
			}
		}
	}
	return nil
}

// balance checks that the records are consistent with each other: VMs, names, host names of ports, image uses, placements,
// and the allocated capacity of the nodes.
func (a *witness) balance() error {
	sums := map[cloud.NodeID]cloud.Capacity{}
	uses := 0
	for id, vm := range a.vms {
		for _, on := range vm.Hosts() {
			if p := a.placed[on][id]; p == nil || p.Gone || p.Generation != vm.Generation && on == vm.Node {
				return fmt.Errorf("VM %s of generation %d is on %s, whose wanted state is %+v", id, vm.Generation, on, p)
			}
		}
		if a.names[vm.Name] != id {
			return fmt.Errorf("VM %s has the name %s, which belongs to VM %s", id, vm.Name, a.names[vm.Name])
		}
		for _, nic := range vm.Spec.Network {
			if p := a.networks.ports[nic.PortID]; p != nil && p.HostName != vm.Name {
				return fmt.Errorf("VM %s has the name %s, but its port %s has the host name %s", id, vm.Name, p.ID, p.HostName)
			}
		}
		for _, image := range vm.Images() {
			if uses++; !a.uses["image-use/"+string(image)+"/"+string(id)] {
				return fmt.Errorf("image %s has no record that VM %s uses it", image, id)
			}
		}
		for _, on := range vm.Hosts() {
			sums[on] = sums[on].Plus(vm.Reserved())
		}
	}
	ofVolumes, err := a.countImageUses()
	if err != nil {
		return err
	}
	uses += ofVolumes
	if len(a.names) != len(a.vms) || len(a.uses) != uses {
		return fmt.Errorf("%d VMs have %d names; they and the volumes use images %d times, of which %d are recorded", len(a.vms), len(a.names), uses, len(a.uses))
	}
	for on, vms := range a.placed {
		for id, p := range vms {
			switch {
			case p.Gone && a.vms[id] != nil && slices.Contains(a.vms[id].Hosts(), on):
				return fmt.Errorf("VM %s has a record, but the wanted state of host %s is to destroy it", id, on)
			case p.Gone:
				sums[on] = sums[on].Plus(p.Held)
			case a.vms[id] == nil:
				return fmt.Errorf("the wanted state of host %s is to run VM %s, which has no record", on, id)
			}
		}
	}
	for id, n := range a.nodes {
		if n.Allocated != sums[id] {
			return fmt.Errorf("node %s has %+v allocated, its VMs add up to %+v", id, n.Allocated, sums[id])
		}
		if left := n.Allocatable.Minus(n.Allocated); left.Plus(n.Allocated) != n.Allocatable {
			return fmt.Errorf("node %s has %+v allocated of %+v", id, n.Allocated, n.Allocatable)
		}
	}
	return nil
}

// decode decodes the value of a record that package store has encoded: a version byte, then CBOR.
func decode[T any](b []byte) (*T, error) {
	if len(b) == 0 {
		return nil, errors.New("an empty record")
	}
	out := new(T)
	return out, cbor.Unmarshal(b[1:], out)
}
