package live

import (
	"sync"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// truth records the actions that the hosts executed. A host calls its methods while it holds the host's mutex, so these
// methods must not call methods of a host: they would deadlock.
type truth struct {
	mu      sync.Mutex
	runner  map[cloud.VMID]*host
	started map[cloud.VMID]map[uint64]bool
	removed map[removal]bool
}

// removal is a VM that a host has destroyed.
type removal struct {
	host *host
	vm   cloud.VMID
}

// mayRun records that a host is to have a VM, which it may have destroyed before.
func (a *witness) mayRun(on cloud.NodeID, id cloud.VMID) {
	h := a.f.hostOf(on)
	a.truth.mu.Lock()
	defer a.truth.mu.Unlock()
	delete(a.truth.removed, removal{h, id})
}

// stopped records that the process of a VM on a host has ended.
func (a *witness) stopped(h *host, id cloud.VMID) {
	a.truth.mu.Lock()
	defer a.truth.mu.Unlock()
	if a.truth.runner[id] == h {
		delete(a.truth.runner, id)
	}
}

// launched records that a host launches a process of a VM, and reports a violation if this is not allowed: another host
// runs the VM, the host has destroyed the VM, or the same start is executed twice. A second process for one start is
// allowed if again is true, which means that it completes a reboot.
func (a *witness) launched(h *host, id cloud.VMID, start uint64, again bool) {
	t := &a.truth
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := t.runner[id]; other != nil && other != h {
		a.f.fail("two hosts run VM %s: %s and %s", id, other.name, h.name)
	}
	t.runner[id] = h
	if t.removed[removal{h, id}] {
		a.f.fail("%s runs VM %s, which it was told to destroy", h.name, id)
	}
	if t.started[id] == nil {
		t.started[id] = map[uint64]bool{}
	}
	if t.started[id][start] && !again {
		a.f.fail("%s makes start %d of VM %s twice", h.name, start, id)
	}
	t.started[id][start] = true
}

// destroyed records that a host has destroyed a VM. If the VM is launched afterwards, that is a violation.
func (a *witness) destroyed(h *host, id cloud.VMID) {
	a.truth.mu.Lock()
	defer a.truth.mu.Unlock()
	a.truth.removed[removal{h, id}] = true
}

// final reports a violation if a host has destroyed a VM that still has a record.
func (a *witness) final() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.truth.mu.Lock()
	defer a.truth.mu.Unlock()
	for r := range a.truth.removed {
		id := r.vm
		if vm := a.vms[id]; vm != nil && a.f.hostOf(vm.Node) == r.host {
			a.f.fail("VM %s has a record, but its host was told to destroy it: %+v", id, vm)
		}
	}
}
