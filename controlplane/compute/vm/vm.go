// Package vm implements the VM controller: the records of virtual machines, the calls that change them, and the
// processing of reports from hosts. The main type is Service.
//
// A call writes the desired state of a VM in one transaction, together with everything that must stay consistent with
// it: the allocated capacity of the host, the VM's name, its use of images, and the stored response for the idempotency
// key. Then the member that received the call waits until the VM's record reaches the desired state. The state machine
// is in cloud.VM; package node sends the desired state to hosts.
//
// Decisions:
//   - If the response of the leader to a start or stop is lost, this member sends the command again, because starting
//     and stopping are idempotent. It repeats a reboot, reset, create or delete only under an idempotency key. Waiting
//     for a VM continues across a change of leader.
//   - A call that is repeated under its idempotency key waits again. If its VM was deleted or got another desired
//     state meanwhile, the call returns its response without an error.
//   - Right after a change of leader, a placement that found no host waits for the hosts' first heartbeats.
//   - A NIC's port is claimed in the transaction that creates the VM or attaches the NIC, so a call that fails leaves no
//     port. A NIC is detached from a running guest before its port is released, because the guest could otherwise use
//     an address that another VM has by then.
//   - A deleted VM's ports are released with its record, also if its host does not respond. The host removes the ports
//     from its network when it has received the change. Their addresses are assigned again after network.RestTime; a
//     host that is disconnected for longer may still run the guest, but no other host sends packets to it, because
//     other hosts know ports only from their records.
//   - A volume is attached in the transaction that creates the VM or attaches the disk, and is detached when the VM can
//     no longer use it (see package volume).
//   - The capacity of a deleted VM stays allocated until its host reports the VM absent. Processors and memory are
//     freed at once only if the VM is certainly off.
//
// Keys: vm/<project>/<id>, vm-name/<project>/<name>, vm-group/<project>/<group>/<id>.
package vm

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// VMs is the table of VM records, at vm/<project>/<id>.
	VMs    = store.NewTable[cloud.VM]("vm")
	names  = store.NewTable[cloud.VMID]("vm-name")
	groups = store.NewTable[cloud.NodeID]("vm-group")
)

// Options configures New. All fields except Billing and Mover are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Nodes    *node.Service
	// Volumes creates a volume when a disk is attached that is blank or has an image.
	Volumes *volume.Service
	Log     *slog.Logger
	// Billing is called for changes of VMs. It is nil if VMs are free of charge.
	Billing Billing
	// Mover moves VMs for Rebalance. The default is live migration.
	Mover Mover
}

// Service implements the VM controller of one member.
type Service struct {
	opts     Options
	messages *messages
	// placements counts the results of choose.
	placements placements

	mu sync.Mutex
	// usage holds, on the leader, the last usage that a host reported for each running VM.
	usage map[cloud.VMID]cloud.Usage
	// deadlines holds, on the leader, the deadline of each VM in a transient state such as STARTING.
	deadlines map[cloud.VMID]deadline
	// recoveries holds, on the leader, the VMs that have lost their host.
	recoveries map[cloud.VMID]recovery
	// scanned holds when Recover last read the VMs of each lost host. Only Recover uses it.
	scanned map[cloud.NodeID]cloud.Time
	// migrations holds, on the leader, the VMs that are being migrated. progress holds the progress that their sources
	// have reported.
	migrations map[cloud.VMID]migrating
	progress   map[cloud.VMID]transferred
}

// New creates the service and registers the commands that other members forward to the leader.
func New(opts Options) *Service {
	if opts.Billing == nil {
		opts.Billing = noBilling{}
	}
	s := &Service{opts: opts, messages: newMessages(opts.Store), usage: map[cloud.VMID]cloud.Usage{}, deadlines: map[cloud.VMID]deadline{},
		recoveries: map[cloud.VMID]recovery{}, scanned: map[cloud.NodeID]cloud.Time{},
		migrations: map[cloud.VMID]migrating{}, progress: map[cloud.VMID]transferred{}}
	if s.opts.Mover == nil {
		s.opts.Mover = migrator{s}
	}
	leader.Register(opts.Commands, s, createCommand, setPowerCommand, pulseCommand, deleteCommand, updateCommand, renameCommand, usageCommand,
		attachNICCommand, detachNICCommand, recoverCommand, attachDiskCommand, detachDiskCommand, migrateCommand, cancelMigrationCommand,
		progressCommand, capacityCommand, rebalanceCommand, getDrainCommand)
	return s
}

func noVM(id cloud.VMID) error { return fault.New(fault.NotFound, "no VM %s", id) }

// Get returns the VM with this ID. It returns NotFound if the VM does not exist or does not belong to the tenant t.
func (s *Service) Get(ctx context.Context, t cloud.Tenant, id cloud.VMID) (vm *cloud.VM, err error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
		vm, err = getOwned(v, t, id)
		return err
	})
	return vm, err
}

// getOwned returns the VM with this ID, or NotFound, like Get. The records are read from r, a transaction or a view.
func getOwned(r store.Reader, t cloud.Tenant, id cloud.VMID) (*cloud.VM, error) {
	vm, err := VMs.Get(r, string(t.Project), string(id))
	if err != nil {
		return nil, err
	}
	if vm == nil || vm.Org != t.Org {
		return nil, noVM(id)
	}
	return vm, nil
}

// List returns a page of the tenant's VMs that match filter (see parseFilter), and the token of the next page. VMs are
// sorted by ID, which is the order of creation.
func (s *Service) List(ctx context.Context, t cloud.Tenant, size int32, token, filter string) ([]*cloud.VM, string, error) {
	match, err := parseFilter(filter)
	if err != nil {
		return nil, "", err
	}
	keep := func(vm *cloud.VM) bool { return vm.Org == t.Org && match(vm) }
	req := store.PageRequest{Size: size, Token: token, Query: "vms\x00" + filter}
	return store.Page(ctx, s.opts.Store, VMs, req, keep, string(t.Project))
}

// save stores a changed VM. The parameter before is the VM's generation before the change. If the generation has
// changed, save also writes the VM's Placed record, so that the leader sends the VM's host the new desired state. While
// the VM is being migrated, it does this for both hosts.
func (s *Service) save(tx *store.Tx, vm *cloud.VM, before uint64) error {
	if vm.Generation != before {
		// The host must confirm for each desired state that it stops the VM when its lease ends.
		vm.Status.StopsWithLease = false
	}
	return s.saveMigration(tx, vm, before)
}

// saveMigration stores a VM as save does, and keeps Status.StopsWithLease. Neither the metadata nor the disks of a VM can
// be changed during a migration, so that the confirmation of a host remains valid until the migration has ended. A source
// that is lost during the migration cannot confirm anything again.
func (s *Service) saveMigration(tx *store.Tx, vm *cloud.VM, before uint64) error {
	vm.UpdatedAt = tx.Now()
	VMs.Put(tx, vm, string(vm.Project), string(vm.ID))
	if vm.Generation != before {
		for _, host := range vm.Hosts() {
			node.PlacedVMs.Put(tx, &node.Placed{Project: vm.Project, Generation: vm.Generation}, string(host), string(vm.ID))
		}
	}
	return s.opts.Billing.Changed(tx, vm)
}

// Usage returns the last reported usage of those VMs that are running. VMs without a report are left out. If the leader
// does not respond within 200 ms, Usage returns nil.
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
	// Callers can do without usage, so wait only briefly.
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	usage, err := usageCommand.Call(ctx, s.opts.Commands, ids)
	if err != nil {
		return nil
	}
	return usage
}

var usageCommand = leader.NewCommand("vm.usage", leader.Repeatable, (*Service).usageOnLeader)

// usageOnLeader implements Usage on the leader, which holds the last reported usage in memory.
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

// Console reads a VM's console log from its host and calls send with each part (see node.Service.ReadConsole). It
// returns FailedPrecondition if the VM is not placed on a host.
func (s *Service) Console(ctx context.Context, t cloud.Tenant, id cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	vm, err := s.Get(ctx, t, id)
	if err != nil {
		return err
	}
	if vm.Node == "" {
		return fault.New(fault.FailedPrecondition, "VM %s is not placed on a host yet", vm.Name)
	}
	return s.opts.Nodes.ReadConsole(ctx, t, vm.Node, id, follow, tail, send)
}
