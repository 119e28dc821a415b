package vm

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// place chooses a host for vm and allocates the VM's capacity on it. If the VM has no CPU model yet, place also sets
// vm.BaselineCPU.
func (s *Service) place(tx *store.Tx, vm *cloud.VM, images map[cloud.ImageID]*image.Usable, volumes *volume.Placement) error {
	r, err := placementRequest(tx, vm, images, volumes)
	if err != nil {
		return err
	}
	if r.CPUModel == "" {
		vm.BaselineCPU = s.opts.Nodes.BaselineCPU(r.Architecture)
		r.CPUModel = vm.BaselineCPU
	}
	id, err := s.choose(tx, vm, r, volumes)
	if err == nil {
		vm.Node = id
		vm.Choice = &cloud.Choice{At: tx.Now(), Node: id, Reason: choiceReason(r)}
	}
	return err
}

// choose chooses a host for vm by the request r, and allocates the VM's capacity on it. It first chooses from the
// leader's copy of the host records. It then reads the chosen host's record in tx, and chooses again if that host is
// full, not READY or deleted. choose changes r: it adds hostShortage to r.Check, and hosts to r.Skip. If no host fits,
// choose returns a noHostError.
//
// A host whose agent cannot migrate a VM with such volumes is chosen only if no other host fits: while the VM is there,
// the VM could not be migrated, and neither could any VM with a volume in the same shared pool.
func (s *Service) choose(tx *store.Tx, vm *cloud.VM, r *schedule.Request, volumes *volume.Placement) (cloud.NodeID, error) {
	further := r.Check
	var failed error // of a read in Check
	r.Check = func(n *cloud.Node) string {
		why, err := s.hostShortage(tx, vm, volumes, n)
		if err != nil {
			failed = err
			return "could not be checked"
		}
		if why == "" && further != nil {
			why = further(n)
		}
		return why
	}
	required := r.Features
	preferring := !mutant.On(mutant.PlaceOnOldAgent) && volumes.MayMigrate()
	if preferring {
		r.Features = append(slices.Clone(required), cloud.FeatureVolumeMigration)
	}
	for {
		chosen := s.opts.Nodes.Place(r)
		if failed != nil {
			return "", failed
		}
		if chosen.Node == "" && preferring {
			preferring, r.Features = false, required
			continue
		}
		if chosen.Node == "" {
			if r.On != "" && further != nil { // a migration to a host that the caller has requested
				chosen.Refused = slices.DeleteFunc(chosen.Refused, func(one schedule.Refusal) bool { return one.Node != r.On })
			}
			refused := &noHostError{errNoHost(chosen.Refused), chosen.Refused}
			waiting, err := s.awaitingHeartbeats(tx)
			if err != nil {
				return "", err
			}
			if waiting {
				return "", &retryableRefusal{refused}
			}
			return "", refused
		}
		n, err := node.Nodes.Get(tx.GuardedUnless(mutant.AllocateTwice), string(chosen.Node))
		if err != nil {
			return "", err
		}
		if why := recordShortage(n, r.Need, volumes); why != "" {
			r.Skip[chosen.Node] = why
			continue
		}
		n.Allocated = n.Allocated.Plus(r.Need)
		node.Nodes.Put(tx, n, string(chosen.Node))
		s.placements.placed.Add(1)
		return chosen.Node, nil
	}
}

// placementRequest returns the request for a host for vm. It does not set Check.
func placementRequest(r store.Reader, vm *cloud.VM, images map[cloud.ImageID]*image.Usable, volumes *volume.Placement) (*schedule.Request, error) {
	out := &schedule.Request{
		VM: vm.ID, Need: vm.Reserved(), CPUModel: vm.CPUModel(), Features: vm.Features(), On: volumes.Node, Skip: map[cloud.NodeID]string{},
	}
	var err error
	if out.Selector, err = cloud.ParseNodeSelector(vm.Labels[cloud.NodeSelectorLabel]); err != nil {
		return nil, err
	}
	for _, i := range images {
		if i.Architecture != cloud.ArchUnspecified {
			out.Architecture = i.Architecture
		}
	}
	out.Groups, err = groupMembers(r, vm)
	return out, err
}

// hostShortage returns the reason why a host cannot have the VM, or "" if it can: the host cannot have the VM's NICs or
// volumes, or it has not destroyed the VM yet after an earlier placement.
func (s *Service) hostShortage(tx *store.Tx, vm *cloud.VM, volumes *volume.Placement, n *cloud.Node) (string, error) {
	why, err := networkShortage(tx.Unguarded(), n.ID, vm.Spec.Network)
	if err != nil {
		return "", err
	}
	if why != "" {
		return "has no network: " + why, nil
	}
	if why := volumes.Shortage(n); why != "" {
		return why, nil
	}
	if vm.State == cloud.Pending || vm.State == cloud.Running {
		// A host that this VM left has not destroyed it yet. It has the VM's record and directory.
		left, err := node.PlacedVMs.Has(tx, string(n.ID), string(vm.ID))
		if err != nil || left {
			return "still has files of the VM from an earlier placement: retry later", err
		}
	}
	return "", nil
}

// recordShortage returns the reason why a VM cannot be placed on the host with the record n, or "" if it can. n is nil
// if the host was deleted.
func recordShortage(n *cloud.Node, need cloud.Capacity, volumes *volume.Placement) string {
	if n == nil {
		return "is no longer in the cluster"
	}
	// The equal times stand for a heartbeat at this moment, because only the state in the record is checked here.
	if state := n.State(1, 1); state != cloud.NodeReady {
		return "is " + state.String()
	}
	if why := schedule.Shortage(n, need); why != "" {
		return why
	}
	return volumes.Shortage(n)
}

// awaitingHeartbeats reports whether a placement that found no host may succeed later. That is so if a host that was
// READY has not yet sent this leader a heartbeat, or if the leader has not yet read the host records.
func (s *Service) awaitingHeartbeats(tx *store.Tx) (bool, error) {
	fleet := s.opts.Nodes.Fleet()
	if len(fleet) == 0 {
		known, _, err := node.Nodes.List(tx.Unguarded(), 1)
		return len(known) > 0, err
	}
	return slices.ContainsFunc(fleet, func(c schedule.Candidate) bool {
		return c.State == cloud.NodeNotReady && c.Node.Declared != cloud.NodeNotReady && !s.opts.Nodes.Unresponsive(c.Node.ID)
	}), nil
}

// noHostError is the error of a placement that found no host, with the hosts that were refused.
type noHostError struct {
	fault   *fault.Fault
	refused []schedule.Refusal
}

func (e *noHostError) Error() string { return e.fault.Error() }
func (e *noHostError) Unwrap() error { return e.fault }

// reasonNoHostFits is the reason in the error for a placement that found no host.
const reasonNoHostFits = "NO_HOST_FITS"

// errNoHost returns the error for a placement that found no host. Its details contain the reason for each host, or, in
// a large cloud, the number of hosts for each reason (see schedule.Summarize).
func errNoHost(refused []schedule.Refusal) *fault.Fault {
	f := fault.New(fault.ResourceExhausted, "no host fits").WithReason(reasonNoHostFits)
	if len(refused) == 0 {
		f.Message += ": the cloud has no hosts yet"
		return f
	}
	first, details := schedule.Summarize(refused)
	f.Message += ": " + first
	for _, d := range details {
		f = f.With(d.Key, d.Text)
	}
	return f
}
