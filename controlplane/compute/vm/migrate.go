package vm

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Reasons in the errors of Migrate.
const (
	// ReasonNotMigratable: the VM has something that cannot be migrated.
	ReasonNotMigratable = "NOT_MIGRATABLE"
	// ReasonAtSwitchover: the migration can no longer be cancelled.
	ReasonAtSwitchover = "MIGRATION_AT_SWITCHOVER"
	// ReasonAwaitsTarget: both hosts of the VM's migration have lost the guest, and only the lost target can report which
	// of them has the newest state of the VM's firmware (see cloud.MigrationAwaitTarget).
	ReasonAwaitsTarget = "MIGRATION_AWAITS_TARGET"
	// ReasonOtherTarget: the VM is being migrated to another host than that of the call.
	ReasonOtherTarget = "MIGRATING_TO_ANOTHER_HOST"
	// ReasonNotMigrated: the VM was not migrated to the host of the call.
	ReasonNotMigrated = "NOT_MIGRATED"
)

// hostCPUReason is the reason why a VM with such a CPU model cannot be migrated. The guest uses CPU features that it
// found at its start, and the target may lack them.
const hostCPUReason = "uses the CPU model of its host (host, max or none): stop it and set another CPU model to make it migratable"

// migrateMargin is the time for which Migrate waits after the timeout of the migration, for the switchover or a
// rollback.
const migrateMargin = 90 * time.Second

type migrateRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	// Target is the requested host, or empty if the leader chooses the host.
	Target  cloud.NodeID
	Seconds uint32
	Body    [32]byte
}

// Migrate begins a live migration of a RUNNING VM to another host, and returns the VM as MIGRATING. If target is empty,
// the leader chooses the host. A migration that has not reached its switchover after the given number of seconds is
// aborted; 0 means the default of cloud.VM.MigrationTimeout. With wait, Migrate waits until the migration has ended,
// for at most the timeout and migrateMargin, and then sets WaitEnded in the result. It returns FailedPrecondition with
// the reason if the VM has stayed on its host.
func (s *Service) Migrate(ctx context.Context, t cloud.Tenant, id cloud.VMID, target cloud.NodeID, seconds uint32, wait bool, body [32]byte) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return PowerResult{}, err
	}
	if target != "" {
		if err := cloud.CheckUUID("destination_node_id", string(target)); err != nil {
			return PowerResult{}, err
		}
	}
	if seconds > cloud.MaxMigrationSeconds {
		return PowerResult{}, fault.Invalid("timeout_seconds", "at most %d, got %d", cloud.MaxMigrationSeconds, seconds)
	}
	response, err := migrateCommand.Call(ctx, s.opts.Commands, migrateRequest{t, id, target, seconds, body})
	if err != nil || !wait {
		return PowerResult{VM: &response.VM, Replayed: response.Replayed}, err
	}
	limit := time.Duration(response.VM.MigrationTimeout(seconds))*time.Millisecond + migrateMargin
	return s.awaitVM(ctx, t, response, limit, migrated)
}

// migrated reports whether the migration in the record began has ended in the later record now. It returns
// FailedPrecondition if the VM was not moved.
func migrated(began, now *cloud.VM) (bool, error) {
	if began.Migration == nil {
		return true, nil
	}
	attempt, last := began.Migration.Attempt, now.LastMigration
	switch {
	case now.Migration != nil && now.Migration.Attempt == attempt:
		return false, nil
	case last == nil || last.Attempt != attempt:
		return false, fault.New(fault.FailedPrecondition, "another migration of VM %s has begun since: see GetMigration", now.Name).WithReason(ReasonNotMigrated)
	case last.Moved:
		return true, nil
	}
	return false, fault.New(fault.FailedPrecondition, "VM %s was not migrated: %s", now.Name, last.Reason).WithReason(ReasonNotMigrated)
}

var migrateCommand = leader.NewCommand("vm.migrate", leader.Keyed, (*Service).migrateOnLeader)

func (s *Service) migrateOnLeader(ctx context.Context, q migrateRequest) (out powerResponse, err error) {
	err = s.untilHeartbeats(ctx, func() error {
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
			out.VM, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), "MigrateVm", q.Body, func() (cloud.VM, error) {
				vm, err := getOwned(tx, q.Tenant, q.VM)
				if err != nil {
					return cloud.VM{}, err
				}
				return *vm, s.beginMigration(tx, vm, q.Target, q.Seconds, nil)
			})
			return err
		})
		return err
	})
	s.placements.countRefusal(err)
	return out, err
}

// beginMigration begins a migration of vm in tx: it chooses the target, allocates the capacity there, assigns the VM, its
// volumes and its ports to both hosts, and stores vm. If to is not empty, the target is this host. The parameter skip has
// hosts that are not chosen, with the reason for each.
func (s *Service) beginMigration(tx *store.Tx, vm *cloud.VM, to cloud.NodeID, seconds uint32, skip map[cloud.NodeID]string) error {
	if vm.State != cloud.Running {
		return vm.BeginMigration(to, 0, tx.Now()) // returns the error for the VM's state
	}
	if vm.Node == to {
		return fault.New(fault.FailedPrecondition, "VM %s is already on host %s", vm.Name, to)
	}
	source, err := node.Nodes.Get(tx.Unguarded(), string(vm.Node))
	if err != nil {
		return err
	}
	why, err := migrationObstacle(tx, vm, source)
	if err == nil && why == "" {
		why, err = new(poolAgents).obstacle(tx, vm)
	}
	if err != nil {
		return err
	}
	temporary := ""
	if why == "" {
		if temporary, err = volume.MigratableLater(tx, vm.Tenant(), vm.Spec.Volumes()); err != nil {
			return err
		}
	}
	if why == "" && temporary == "" && s.opts.Nodes.Unresponsive(vm.Node) {
		why = "is on a host that does not answer: wait, or fence the host"
	}
	if why != "" {
		return fault.New(fault.FailedPrecondition, "VM %s cannot be migrated: it %s", vm.Name, why).WithReason(ReasonNotMigratable)
	}
	if temporary != "" {
		return fault.New(fault.FailedPrecondition, "VM %s cannot be migrated now: it %s", vm.Name, temporary).
			WithReason(ReasonNotMigratable).MayRetry()
	}
	target, why, err := s.chooseTarget(tx, vm, source, to, skip)
	if err != nil {
		return err
	}
	generation := vm.Generation
	if err := vm.BeginMigration(target, vm.MigrationTimeout(seconds), tx.Now()); err != nil {
		return err
	}
	vm.Migration.Choice = why
	host, err := node.Nodes.Get(tx, string(target))
	if err != nil {
		return err
	}
	vm.Migration.SendRunning = host != nil && host.MissingFeature([]string{cloud.FeatureRunningMigration}) == ""
	vm.Migration.TakesChannels = host != nil && host.MissingFeature([]string{cloud.FeatureMemoryChannels}) == ""
	if err := s.assignBoth(tx, vm, vm.Hosts()); err != nil {
		return err
	}
	return s.saveMigration(tx, vm, generation)
}

// migrationObstacle returns the reason why a RUNNING VM cannot be migrated from its host source, which is nil if the host
// was deleted, or "" if it can. The text is the predicate of a sentence whose subject is the VM. migrationObstacle does not
// consider other hosts: see poolAgents.
func migrationObstacle(r store.Reader, vm *cloud.VM, source *cloud.Node) (string, error) {
	if why := vm.NotMigratable(); why != "" {
		return why, nil
	}
	switch {
	case source == nil || !source.LiveMigration:
		return "is on a host whose agent cannot migrate VMs", nil
	case source.Labels[cloud.AcceleratorLabel] == cloud.AcceleratorKVM && cloud.HostCPU(vm.CPUModel()):
		return hostCPUReason, nil
	}
	if why, err := volume.NotMigratable(r, vm.Tenant(), vm.Spec.Volumes()); err != nil || why != "" {
		return why, err
	}
	features, err := migrationFeatures(r, vm)
	if err != nil {
		return "", err
	}
	if why := source.FeatureShortage(features); why != "" {
		return "is on a host that " + why, nil
	}
	return "", nil
}

// migrationFeatures returns the names of the features that both hosts of a migration of vm must support.
func migrationFeatures(r store.Reader, vm *cloud.VM) ([]string, error) {
	volumes, err := volume.MigrationFeatures(r, vm.Tenant(), vm.Spec.Volumes())
	return append(vm.MigrationFeatures(), volumes...), err
}

// chooseTarget chooses the host for a migration of vm, and allocates the capacity there. If to is not empty, no other
// host is chosen. The parameter skip is that of beginMigration. why is the reason of the choice (see cloud.Choice).
func (s *Service) chooseTarget(tx *store.Tx, vm *cloud.VM, source *cloud.Node, to cloud.NodeID, skip map[cloud.NodeID]string) (target cloud.NodeID, why string, err error) {
	if to != "" {
		if known, err := node.Nodes.Has(tx, string(to)); err != nil {
			return "", "", err
		} else if !known {
			return "", "", fault.New(fault.NotFound, "no node %s", to)
		}
	}
	images := map[cloud.ImageID]*image.Usable{}
	for _, id := range vm.Images() {
		i, err := lookupImage(tx, vm.Org, id, true)
		if err != nil {
			return "", "", err
		}
		images[id] = i
	}
	volumes, err := volume.PlacementOf(tx, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return "", "", err
	}
	r, err := placementRequest(tx, vm, images, &volumes)
	if err != nil {
		return "", "", err
	}
	features, err := migrationFeatures(tx, vm)
	if err != nil {
		return "", "", err
	}
	r.Features = append(r.Features, features...)
	r.On = to
	maps.Copy(r.Skip, skip)
	r.Skip[vm.Node] = "is the VM's current host"
	r.Check = func(n *cloud.Node) string { return migrationShortage(source, n) }
	target, err = s.choose(tx, vm, r, &volumes)
	var retryable *retryableRefusal
	switch {
	case err == nil && to != "":
		return target, "a migration to this host was requested", nil
	case err == nil || to == "":
		return target, "a migration chose it " + choiceReason(r), err
	}
	if errors.As(err, &retryable) {
		return "", "", &retryableRefusal{hostRefusal(vm, retryable.refusal)}
	}
	return "", "", hostRefusal(vm, err)
}

// migrationShortage returns the reason why no VM can be migrated from the host source to the host n, or "" if there is
// none. The text is the predicate of a sentence whose subject is n.
func migrationShortage(source, n *cloud.Node) string {
	switch {
	case !n.LiveMigration:
		return "has an agent that cannot migrate VMs"
	case n.Architecture != source.Architecture:
		return "is of another architecture"
	case n.Labels[cloud.AcceleratorLabel] != source.Labels[cloud.AcceleratorLabel]:
		return "runs guests with another accelerator"
	}
	return ""
}

// hostRefusal converts an error of choose to the error for a VM that cannot be migrated to the requested host.
func hostRefusal(vm *cloud.VM, err error) error {
	var none *noHostError
	if !errors.As(err, &none) {
		return err
	}
	f := fault.New(fault.FailedPrecondition, "VM %s cannot be migrated to this host: %s", vm.Name, none.fault.Message).WithReason(reasonNoHostFits)
	return &noHostError{f, none.refused}
}

type cancelMigrationRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
}

var cancelMigrationCommand = leader.NewCommand("vm.cancel-migration", leader.Repeatable, (*Service).cancelMigrationOnLeader)

// CancelMigration ends the migration of a VM that has not reached the switchover, and returns the VM, which continues
// on its host. It returns FailedPrecondition if the switchover has begun. A VM that is not being migrated is not
// changed.
func (s *Service) CancelMigration(ctx context.Context, t cloud.Tenant, id cloud.VMID) (cloud.VM, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return cloud.VM{}, err
	}
	return cancelMigrationCommand.Call(ctx, s.opts.Commands, cancelMigrationRequest{t, id})
}

func (s *Service) cancelMigrationOnLeader(ctx context.Context, q cancelMigrationRequest) (out cloud.VM, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := getOwned(tx, q.Tenant, q.VM)
		if err != nil {
			return err
		}
		if vm.Migration == nil {
			out = *vm
			return nil
		}
		generation := vm.Generation
		if err := s.abortMigration(tx, vm); err != nil {
			return err
		}
		out = *vm
		return s.saveMigration(tx, vm, generation)
	})
	return out, err
}

// abortMigration ends the migration of vm, which becomes RUNNING on its host. It returns FailedPrecondition if the
// switchover has begun. The caller must save vm.
func (s *Service) abortMigration(tx *store.Tx, vm *cloud.VM) error {
	if !vm.CancelMigration() {
		why := "try again when it has ended"
		if vm.Migration.AwaitsTarget {
			why = vm.Status.LastError
		}
		return fault.New(fault.FailedPrecondition, "the migration of VM %s can no longer be cancelled: %s", vm.Name, why).
			WithReason(ReasonAtSwitchover)
	}
	_, err := s.advanceMigration(tx, vm)
	return err
}

// checkAwaited returns FailedPrecondition with ReasonAwaitsTarget if the VM cannot be started, because its migration waits
// for its lost target.
func checkAwaited(vm *cloud.VM) error {
	if vm.Migration == nil || !vm.Migration.AwaitsTarget {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "cannot start VM %s: %s", vm.Name, vm.Status.LastError).WithReason(ReasonAwaitsTarget)
}

// Migration is a VM with the progress of its migration.
type Migration struct {
	VM *cloud.VM
	// TotalBytes and SentBytes are the progress in the source's last report. They are 0 if the leader has no report.
	TotalBytes, SentBytes uint64
}

// GetMigration returns the VM, whose record has the migration or the result of the last one, and the progress. If the
// leader does not answer within 200 ms, the progress is 0.
func (s *Service) GetMigration(ctx context.Context, t cloud.Tenant, id cloud.VMID) (Migration, error) {
	vm, err := s.Get(ctx, t, id)
	if err != nil {
		return Migration{}, err
	}
	out := Migration{VM: vm}
	if vm.Migration == nil {
		return out, nil
	}
	// The progress is optional, so the wait for the leader is short.
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if p, err := progressCommand.Call(ctx, s.opts.Commands, id); err == nil {
		out.TotalBytes, out.SentBytes = p.Total, p.Sent
	}
	return out, nil
}

// transferred is the progress of a migration, in bytes.
type transferred struct{ Total, Sent uint64 }

var progressCommand = leader.NewCommand("vm.migration-progress", leader.Repeatable, (*Service).progressOnLeader)

func (s *Service) progressOnLeader(_ context.Context, id cloud.VMID) (transferred, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.progress[id], nil
}
