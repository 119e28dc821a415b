package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// portable reports whether a VM is certainly off and can get another host without a migration: all its disks are volumes
// that other hosts can use, and it has no other state on its host.
func portable(r store.Reader, vm *cloud.VM) (bool, error) {
	if vm.State != cloud.Stopped || vm.Desired.On || vm.Desired.StartAfterStop {
		return false, nil
	}
	why, err := immovable(r, vm)
	return why == "" && err == nil, err
}

// relocateDrained changes a VM on a drained host that does not run to PENDING, if another host fits. Recover then places
// the VM on another host, which builds it there. If no host fits, relocateDrained records why.
func (s *Service) relocateDrained(ctx context.Context, host cloud.NodeID, seen *cloud.VM) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, e, n, err := drainedNow(tx, host, seen)
		if err != nil || vm == nil {
			return err
		}
		if ok, err := portable(tx, vm); err != nil || !ok {
			return err
		}
		why, err := s.noHostFor(tx, vm, n)
		if err != nil {
			return err
		}
		if waiting, err := s.awaitingHeartbeats(tx); err != nil || waiting && why != "" {
			return err
		}
		if why != "" {
			e.NoHost = truncate(why, maxLastError)
			node.DrainedVMs.Put(tx, e, string(host), string(vm.ID))
			return nil
		}
		e.Moved, e.To, e.ShutDown = true, "", false
		node.DrainedVMs.Put(tx, e, string(host), string(vm.ID))
		return s.leaveHostWith(tx, vm, vm.LeaveDrainedHost)
	})
	return err
}

// noHostFor returns the reason why no host other than the drained one fits for a VM, or "" if one fits. It allocates
// nothing.
func (s *Service) noHostFor(tx *store.Tx, vm *cloud.VM, drained *cloud.Node) (string, error) {
	images := map[cloud.ImageID]*image.Usable{}
	for _, id := range vm.Images() {
		i, err := lookupImage(tx, vm.Org, id, true)
		if err != nil {
			return "", err
		}
		images[id] = i
	}
	volumes, err := volume.PlacementOf(tx, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return "", err
	}
	r, err := placementRequest(tx, vm, images, &volumes)
	if err != nil {
		return "", err
	}
	r.Skip[drained.ID] = "is drained"
	var failed error
	r.Check = func(n *cloud.Node) string {
		why, err := s.hostShortage(tx, vm, &volumes, n)
		if err != nil {
			failed = err
			return "cannot be examined"
		}
		return why
	}
	chosen := s.opts.Nodes.Place(r)
	if failed != nil || chosen.Node != "" {
		return "", failed
	}
	return refusalText(errNoHost(chosen.Refused), drained.Name), nil
}
