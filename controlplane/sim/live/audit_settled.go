package live

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// unsettled returns "" if the cloud is settled. Otherwise it describes one reason why not: a VM is in a transient
// state, a record differs from the host's state, a host has a VM without a record, or the placement of a deleted VM is
// not removed yet.
func (a *witness) unsettled() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(a.vms)) {
		vm := a.vms[id]
		if vm.Node == "" {
			if strings.Contains(vm.Status.LastError, "no host fits") {
				continue // The other hosts have no room for it.
			}
			return fmt.Sprintf("VM %s has no host: %+v", id, vm)
		}
		h := a.f.hostOf(vm.Node)
		_, _, runs := h.runs(id)
		rests := map[cloud.State]bool{cloud.Running: true, cloud.Stopped: true, cloud.Error: true, cloud.Failed: true}
		switch {
		case vm.Deadline != 0 || !rests[vm.State]:
			return fmt.Sprintf("VM %s is %s: %+v", id, vm.State, vm)
		case runs != (vm.State == cloud.Running):
			return fmt.Sprintf("VM %s is %s, on its host it runs: %v", id, vm.State, runs)
		}
	}
	for on, vms := range a.placed {
		for id, p := range vms {
			if p.Gone {
				return fmt.Sprintf("%s has not reported VM %s gone", on, id)
			}
		}
	}
	for _, h := range a.f.hosts {
		for _, id := range h.present() {
			if a.vms[id] == nil {
				return fmt.Sprintf("%s keeps VM %s, which has no record", h.name, id)
			}
		}
	}
	return cmp.Or(a.unsettledVolumes(), a.unsettledSnapshots(), a.networks.unsettled())
}

// networkChanges returns the number of changes so far of records that hosts receive about networks.
func (a *witness) networkChanges() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.networks.changes
}

// leftovers is called after all VMs were deleted. It describes something that still remains of a VM, or returns "" if
// nothing does.
func (a *witness) leftovers() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id := range a.vms {
		return fmt.Sprintf("VM %s is still there", id)
	}
	for id, n := range a.nodes {
		if n.Allocated != (cloud.Capacity{}) {
			return fmt.Sprintf("node %s has %+v allocated to nothing", id, n.Allocated)
		}
	}
	for _, h := range a.f.hosts {
		if left := h.present(); len(left) > 0 {
			return fmt.Sprintf("%s keeps VMs %v", h.name, left)
		}
	}
	return a.networks.leftovers()
}

// transient describes one VM that has a deadline, which means that its state is transient. It returns "" if there is
// none.
func (a *witness) transient() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, vm := range a.vms {
		if vm.Deadline != 0 {
			return fmt.Sprintf("VM %s is %s", id, vm.State)
		}
	}
	return ""
}

// overdue describes one VM whose deadline has passed at the time now. It returns "" if there is none.
func (a *witness) overdue(now cloud.Time) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, vm := range a.vms {
		if vm.Deadline != 0 && vm.Deadline < now {
			return fmt.Sprintf("VM %s is %s past its deadline", id, vm.State)
		}
	}
	return ""
}
