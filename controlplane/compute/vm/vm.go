// Package vm is the VM controller: the records of virtual machines, what may be asked of them, and what their hosts
// report.
//
// A call records what is wanted, in one transaction with everything that must be true together: the host's capacity,
// the names, the images in use, the remembered answer of its idempotency key. Then it waits, where it arrived, for the
// record to become what was asked. The life cycle itself is cloud.VM's; hosts learn of it through package node.
//
// Decisions where the design is silent:
//   - A start or stop whose answer was lost is said again by this member: what is wanted is a level. A reboot, a reset, a
//     create and a delete are said again only under an idempotency key. A wait goes on while the leader changes.
//   - A call repeated under its key waits again; when its VM is gone by now or was told otherwise, it gets its answer as
//     it would have been.
//   - Right after a change of leader, a placement that would be refused waits for the hosts' first heartbeats.
//   - What a deleted VM took stays allocated until its host has reported it gone; only of one that is surely off are
//     processors and memory free at once.
//
// Keys: vm/<project>/<id>, vm-name/<project>/<name>, vm-group/<project>/<group>/<id>.
package vm

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// VMs is the table of virtual machines.
	VMs    = store.NewTable[cloud.VM]("vm")
	names  = store.NewTable[cloud.VMID]("vm-name")
	groups = store.NewTable[cloud.NodeID]("vm-group")
)

// Labels of a VM that steer its placement.
const (
	// AntiAffinity names a group of the project of which no two members share a host.
	AntiAffinity = "trivet/anti-affinity"
	// NodeSelector lists labels that the host must have: k=v, comma-separated.
	NodeSelector = "trivet/node-selector"
)

// Options of the service; all are required but Billing.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Nodes    *node.Service
	Log      *slog.Logger
	// Billing is nil where VMs cost nothing.
	Billing Billing
}

// Service is the VM controller of one member.
type Service struct {
	opts     Options
	messages *messages

	mu sync.Mutex
	// usage is what hosts last said, on the leader.
	usage map[cloud.VMID]cloud.Usage
	// deadlines are those of all VMs in a transient state, on the leader.
	deadlines map[cloud.VMID]due
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	if opts.Billing == nil {
		opts.Billing = unbilled{}
	}
	s := &Service{opts: opts, messages: newMessages(opts.Store), usage: map[cloud.VMID]cloud.Usage{}, deadlines: map[cloud.VMID]due{}}
	leader.Register(opts.Commands, s, createCommand, setPowerCommand, pulseCommand, deleteCommand, updateCommand, usageCommand)
	return s
}

func noVM(id cloud.VMID) error { return fault.New(fault.NotFound, "no VM %s", id) }

// Get is one VM. Another tenant's is not found.
func (s *Service) Get(ctx context.Context, t cloud.Tenant, id cloud.VMID) (vm *cloud.VM, err error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
		vm, err = of(v, t, id)
		return err
	})
	return vm, err
}

// of reads a tenant's VM.
func of(r store.Reader, t cloud.Tenant, id cloud.VMID) (*cloud.VM, error) {
	vm, err := VMs.Get(r, string(t.Project), string(id))
	if err != nil {
		return nil, err
	}
	if vm == nil || vm.Org != t.Org {
		return nil, noVM(id)
	}
	return vm, nil
}

// List is a page of a tenant's VMs that the filter accepts, in order of their ids, which is that of their creation.
func (s *Service) List(ctx context.Context, t cloud.Tenant, size int32, token, filter string) ([]*cloud.VM, string, error) {
	match, err := parseFilter(filter)
	if err != nil {
		return nil, "", err
	}
	keep := func(vm *cloud.VM) bool { return vm.Org == t.Org && match(vm) }
	req := store.PageRequest{Size: size, Token: token, Query: "vms\x00" + filter}
	return store.Page(ctx, s.opts.Store, VMs, req, keep, string(t.Project))
}

// save writes a VM that changed. When the host should do something else now, its session learns of it.
func (s *Service) save(tx *store.Tx, vm *cloud.VM, before uint64) error {
	vm.UpdatedAt = tx.Now()
	VMs.Put(tx, vm, string(vm.Project), string(vm.ID))
	if vm.Generation != before && vm.Node != "" {
		node.PlacedVMs.Put(tx, &node.Placed{Project: vm.Project, Generation: vm.Generation}, string(vm.Node), string(vm.ID))
	}
	return s.opts.Billing.Changed(tx, vm)
}

// Usage is what VMs use, as their hosts last said; what is not known is left out.
func (s *Service) Usage(ctx context.Context, vms ...*cloud.VM) map[cloud.VMID]cloud.Usage {
	var ids []cloud.VMID
	for _, vm := range vms {
		if vm.State == cloud.Running {
			ids = append(ids, vm.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	// Figures are not worth waiting for.
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	usage, err := usageCommand.Call(ctx, s.opts.Commands, ids)
	if err != nil {
		return nil
	}
	return usage
}

var usageCommand = leader.NewCommand("vm.usage", leader.Repeatable, (*Service).usageOnLeader)

// usageOnLeader is Usage on the leader, whose memory has the last usage that each host reported.
func (s *Service) usageOnLeader(_ context.Context, ids []cloud.VMID) (map[cloud.VMID]cloud.Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[cloud.VMID]cloud.Usage, len(ids))
	for _, id := range ids {
		if u, ok := s.usage[id]; ok {
			out[id] = u
		}
	}
	return out, nil
}

// Console sends a VM's console log from its host.
func (s *Service) Console(ctx context.Context, t cloud.Tenant, id cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	vm, err := s.Get(ctx, t, id)
	if err != nil {
		return err
	}
	if vm.Node == "" {
		return fault.New(fault.FailedPrecondition, "VM %s is on no host yet", vm.Name)
	}
	return s.opts.Nodes.ReadConsole(ctx, t, vm.Node, id, follow, tail, send)
}
