package vm

import (
	"cmp"
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// HostCapacity is the capacity of one host.
type HostCapacity struct {
	ID                               cloud.NodeID
	Name                             string
	State                            cloud.NodeState
	Capacity, Allocatable, Allocated cloud.Capacity
	// Loss describes the consequences of the loss of the host. It is nil if the host is NOT_READY.
	Loss *schedule.Loss
}

// Capacity returns the capacity of each host, sorted by name, and the consequences of the loss of the host. The leader
// computes the result, because only the leader has the times of the last heartbeats.
func (s *Service) Capacity(ctx context.Context) ([]HostCapacity, error) {
	return capacityCommand.Call(ctx, s.opts.Commands, struct{}{})
}

var capacityCommand = leader.NewCommand("vm.capacity", leader.Repeatable, (*Service).capacityOnLeader)

func (s *Service) capacityOnLeader(ctx context.Context, _ struct{}) (out []HostCapacity, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out, err = s.capacity(v)
		return err
	})
	return out, err
}

func (s *Service) capacity(v *store.View) ([]HostCapacity, error) {
	snap, err := s.snapshot(v, (*snapshot).recovery)
	if err != nil {
		return nil, err
	}
	losses := map[cloud.NodeID]*schedule.Loss{}
	for _, l := range schedule.FindLosses(&snap.Snapshot) {
		losses[l.Node] = &l
	}
	out := make([]HostCapacity, 0, len(snap.Hosts))
	for i := range snap.Hosts {
		n := &snap.Hosts[i].Node
		one := HostCapacity{
			ID: n.ID, Name: n.Name, State: n.State(snap.Now, snap.Hosts[i].LastSeen), Capacity: n.Capacity, Allocatable: n.AllAllocatable(),
			Allocated: n.Allocated, Loss: losses[n.ID],
		}
		one.Capacity.HugepagesMiB, one.Capacity.DedicatedVCPUs = n.HugepagesMiB, n.DedicatedCPUs
		out = append(out, one)
	}
	slices.SortStableFunc(out, func(a, b HostCapacity) int { return cmp.Compare(a.Name, b.Name) })
	return out, snap.failed
}

// snapshot is a schedule.Snapshot of the cloud whose Request.Check functions read records of the view.
type snapshot struct {
	schedule.Snapshot
	v      *store.View
	images map[cloud.ImageID]*image.Usable
	// tenants has the tenant of each VM, and nodes the record of each host.
	tenants map[cloud.VMID]cloud.Tenant
	nodes   map[cloud.NodeID]*cloud.Node
	agents  poolAgents // hosts with old agents, read when they are first needed
	// failed is the first error of a Request.Check, which cannot return errors.
	failed error
}

// snapshot reads the hosts and the VMs that are placed on them. The function complete, snapshot.recovery or
// snapshot.migration, sets the fields that depend on the purpose. The result must not be used after the view ends.
func (s *Service) snapshot(v *store.View, complete func(*snapshot, *cloud.VM, *schedule.SnapshotVM) error) (*snapshot, error) {
	out := &snapshot{
		v: v, images: map[cloud.ImageID]*image.Usable{}, tenants: map[cloud.VMID]cloud.Tenant{}, nodes: map[cloud.NodeID]*cloud.Node{},
	}
	var err error
	if out.Hosts, out.Now, err = s.opts.Nodes.Snapshot(v); err != nil {
		return nil, err
	}
	for i := range out.Hosts {
		out.nodes[out.Hosts[i].Node.ID] = &out.Hosts[i].Node
	}
	all, _, err := VMs.List(v, 0)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if r.Value.Node == "" {
			continue
		}
		vm, err := out.vm(r.Value)
		if err == nil {
			err = complete(out, r.Value, &vm)
		}
		if err != nil {
			return nil, err
		}
		out.VMs = append(out.VMs, vm)
		out.tenants[r.Value.ID] = r.Value.Tenant()
	}
	return out, nil
}

func (s *snapshot) vm(vm *cloud.VM) (schedule.SnapshotVM, error) {
	out := schedule.SnapshotVM{
		Name: vm.Name, Node: vm.Node, Priority: vm.Priority(), Groups: vmGroups(vm),
		Request: schedule.Request{
			VM: vm.ID, Need: vm.Reserved(), CPUModel: vm.CPUModel(), Features: vm.Features(),
		},
	}
	var err error
	if out.Request.Selector, err = cloud.ParseNodeSelector(vm.Labels[cloud.NodeSelectorLabel]); err != nil {
		return out, err
	}
	for _, id := range vm.Spec.Images() {
		i, err := s.image(id)
		if err != nil {
			return out, err
		}
		if i != nil && i.Architecture != cloud.ArchUnspecified {
			out.Request.Architecture = i.Architecture
		}
	}
	return out, nil
}

// recovery sets out.Recovers to whether the VM is started on another host when its host is lost, and the conditions on
// that host.
func (s *snapshot) recovery(vm *cloud.VM, out *schedule.SnapshotVM) error {
	if vm.Recoverable(true) != "" {
		return nil
	}
	if why, err := immovable(s.v, vm); err != nil || why != "" {
		return err
	}
	volumes, err := volume.PlacementOf(s.v, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return err
	}
	out.Recovers, out.Request.On = true, volumes.Node
	out.Request.Check = func(n *cloud.Node) string {
		if why := s.networkShortage(n, vm.Spec.Network); why != "" {
			return why
		}
		return volumes.Shortage(n)
	}
	return nil
}

// migration sets out.Immovable if the VM cannot be migrated, and otherwise the conditions on the target.
func (s *snapshot) migration(vm *cloud.VM, out *schedule.SnapshotVM) error {
	source := s.nodes[vm.Node]
	if vm.State != cloud.Running {
		out.Immovable = "is " + vm.State.String()
		return nil
	}
	var err error
	if out.Immovable, err = migrationObstacle(s.v, vm, source); err != nil || out.Immovable != "" {
		return err
	}
	if out.Immovable, err = s.agents.obstacle(s.v, vm); err != nil || out.Immovable != "" {
		return err
	}
	volumes, err := volume.PlacementOf(s.v, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return err
	}
	features, err := migrationFeatures(s.v, vm)
	if err != nil {
		return err
	}
	out.Request.Check = func(n *cloud.Node) string {
		if why := migrationShortage(source, n); why != "" {
			return why
		}
		if why := volumes.Shortage(n); why != "" {
			return why
		}
		if why := n.FeatureShortage(features); why != "" {
			return why
		}
		return s.networkShortage(n, vm.Spec.Network)
	}
	return nil
}

// networkShortage returns the reason why a host cannot have the NICs, or "". An error is stored in failed.
func (s *snapshot) networkShortage(n *cloud.Node, nics []cloud.NIC) string {
	why, err := networkShortage(s.v, n.ID, nics)
	if err != nil && s.failed == nil {
		s.failed = err
	}
	if why != "" {
		return "has no network: " + why
	}
	return ""
}

// image returns an image's record, or nil if there is none.
func (s *snapshot) image(id cloud.ImageID) (*image.Usable, error) {
	if i, known := s.images[id]; known {
		return i, nil
	}
	i, err := image.Images.Get(s.v, string(id))
	if err != nil {
		return nil, err
	}
	s.images[id] = nil
	if i != nil {
		s.images[id] = &image.Usable{Image: *i}
	}
	return s.images[id], nil
}

// vmGroups returns the keys of a VM's groups. A key contains the project, because a group has only VMs of one project.
func vmGroups(vm *cloud.VM) schedule.VMGroups {
	keys := groupsOf(vm.Labels)
	key := func(label string) string {
		if keys[label] == "" {
			return ""
		}
		return string(vm.Project) + "/" + keys[label]
	}
	return schedule.VMGroups{
		Affinity: key(cloud.AffinityLabel), AntiAffinity: key(cloud.AntiAffinityLabel),
		AffinitySoft: key(cloud.AffinitySoftLabel), AntiAffinitySoft: key(cloud.AntiAffinitySoftLabel),
		Spread: key(cloud.SpreadLabel), SpreadLabel: vm.Labels[cloud.SpreadLabel],
	}
}
