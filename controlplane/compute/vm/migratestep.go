package vm

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// MigrateEvery is the interval at which package leader calls StepMigrations on the leader.
const MigrateEvery = time.Second

// advanceMigration makes the steps of the VM's migration that are due, and changes all records that depend on the VM's
// hosts. It stores neither vm nor the Placed records of the VM's present hosts: the caller must call saveMigration.
// It returns whether it has made a step.
func (s *Service) advanceMigration(tx *store.Tx, vm *cloud.VM) (changed bool, err error) {
	if vm.Migration == nil {
		return false, nil
	}
	facts, err := s.migrationFacts(tx, vm)
	if err != nil {
		return false, err
	}
	hosts := vm.Hosts()
	for {
		step := vm.AdvanceMigration(facts, tx.Now())
		if step == cloud.MigrationWait {
			break
		}
		changed = true
		s.opts.Log.Info("live migration advanced", "vm", vm.ID, "step", step, "node", vm.Node)
	}
	if !changed {
		return false, nil
	}
	return true, s.assignBoth(tx, vm, hosts)
}

// assignBoth changes the records that depend on the hosts of a VM in a migration: the Placed records of its former
// hosts, its groups, its volumes and its ports. The parameter before has the hosts before the step. Those of them that are no longer
// hosts of the VM must destroy the VM, and its capacity stays allocated there until they have reported that.
func (s *Service) assignBoth(tx *store.Tx, vm *cloud.VM, before []cloud.NodeID) error {
	now := vm.Hosts()
	for _, host := range before {
		if !slices.Contains(now, host) && !mutant.On(mutant.TwoMigrationHolders) {
			node.PlacedVMs.Put(tx, &node.Placed{
				Project: vm.Project, Generation: vm.Generation, Gone: true, Held: vm.Reserved(),
			}, string(host), string(vm.ID))
		}
	}
	joinGroups(tx, vm)
	setOtherHost(tx, vm, vm.OtherHost())
	if err := volume.SetHosts(tx, vm.Tenant(), vm.ID, vm.Spec.Volumes(), vm.Node, vm.OtherHost()); err != nil {
		return err
	}
	return network.MigrateNICs(tx, vm.Tenant(), vm.ID, vm.Node, vm.OtherHost(), vm.Name)
}

// migrating identifies a VM that is being migrated.
type migrating struct {
	project cloud.ProjectID
	id      cloud.VMID
}

// trackMigration updates s.migrations and s.progress after a change of a VM's record. The caller must hold s.mu.
func (s *Service) trackMigration(vm *deadlineFields) {
	if vm.Migration == nil {
		delete(s.migrations, vm.ID)
		delete(s.progress, vm.ID)
		return
	}
	s.migrations[vm.ID] = migrating{vm.Project, vm.ID}
}

// storeProgress stores the progress of a migration that its source has reported, in memory.
func (s *Service) storeProgress(o cloud.Observation) {
	m := o.Migration
	if m == nil || m.TotalBytes == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, runs := s.migrations[o.VM]; runs {
		s.progress[o.VM] = transferred{m.TotalBytes, m.SentBytes}
	}
}

// maxStepping is the maximum number of migrations that StepMigrations changes at the same time, and of hosts that it
// fences at the same time.
const maxStepping = 16

// StepMigrations makes the steps of migrations that are due because of deadlines and of lost hosts. Steps because of
// reports are made by applyReport. StepMigrations runs only on the leader. A new leader continues all migrations in the
// records. The failure of one migration, or of the fence of one host, does not delay the other migrations.
func (s *Service) StepMigrations(ctx context.Context) error {
	s.mu.Lock()
	all := make([]migrating, 0, len(s.migrations))
	for _, m := range s.migrations {
		all = append(all, m)
	}
	s.mu.Unlock()
	targets := map[cloud.NodeID][]migrating{} // hosts to fence, with the migrations that need the fence
	var failed errorList
	var steps errgroup.Group
	steps.SetLimit(maxStepping)
	for _, one := range all {
		due, fence, err := s.dueMigration(one)
		failed.add(err)
		if fence != "" {
			targets[fence] = append(targets[fence], one)
		}
		if due {
			steps.Go(func() error { failed.add(s.stepMigration(ctx, one)); return nil })
		}
	}
	_ = steps.Wait()
	var fences errgroup.Group
	fences.SetLimit(maxStepping)
	for target, waiting := range targets {
		fences.Go(func() error {
			fenced, err := s.opts.Nodes.FenceLost(ctx, target)
			failed.add(err)
			for _, one := range waiting {
				if fenced {
					failed.add(s.stepMigration(ctx, one))
				}
			}
			return nil
		})
	}
	_ = fences.Wait()
	return failed.join()
}

// errorList collects the errors of several goroutines.
type errorList struct {
	mu  sync.Mutex
	all []error
}

func (l *errorList) add(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, err)
}

func (l *errorList) join() error { return errors.Join(l.all...) }

// dueMigration reports whether a step of the migration is due. If the fence is not empty, the lease of this host, the
// target, has ended, and a further step is due after the host has been fenced.
func (s *Service) dueMigration(one migrating) (due bool, fence cloud.NodeID, err error) {
	err = s.opts.Store.Local(func(v *store.View) error {
		vm, err := VMs.Get(v, string(one.project), string(one.id))
		if err != nil || vm == nil || vm.Migration == nil {
			return err
		}
		m := vm.Migration
		facts, err := s.migrationFacts(v, vm)
		if err != nil {
			return err
		}
		step, _ := m.Step(facts, s.opts.Store.Now())
		due = step != cloud.MigrationWait
		// The lease also proves that an evicted or banned target does not run the guest. The target reports PREPARED only
		// while its guard process runs, and the guard process obeys the lease although the agent contacts no member.
		if facts&cloud.TargetFenced == 0 && m.Phase != cloud.MigrationRollback && s.opts.Nodes.LeaseEnded(m.Target) {
			fence = m.Target
		}
		return nil
	})
	return due, fence, err
}

// stepMigration makes the steps of one migration that are due.
func (s *Service) stepMigration(ctx context.Context, one migrating) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := VMs.Get(tx, string(one.project), string(one.id))
		if err != nil || vm == nil || vm.Migration == nil {
			return err
		}
		generation := vm.Generation
		changed, err := s.advanceMigration(tx, vm)
		if err != nil || !changed {
			return err
		}
		return s.saveMigration(tx, vm, generation)
	})
	return err
}

// migrationFacts returns the facts about the hosts of the VM's migration. TargetFenced and SourceOff require a Fence
// record and a host that is Unresponsive. migrationFacts determines OldPoolAgent only if the source is ready for the
// switchover, because OldPoolAgent needs the records of all hosts.
func (s *Service) migrationFacts(r store.Reader, vm *cloud.VM) (facts cloud.MigrationFacts, err error) {
	m := vm.Migration
	target, err := node.FenceOf(r, m.Target)
	if err != nil {
		return 0, err
	}
	if target != nil && s.opts.Nodes.Unresponsive(m.Target) {
		facts |= cloud.TargetFenced
		givenUp, err := node.GivenUp(r, m.Target)
		if err != nil {
			return 0, err
		}
		if givenUp {
			facts |= cloud.TargetGivenUp
		}
	}
	source, err := node.FenceOf(r, m.Source)
	if err != nil {
		return 0, err
	}
	if source != nil && source.Confirmed && s.opts.Nodes.Unresponsive(m.Source) {
		facts |= cloud.SourceOff | cloud.SourceSilent
	}
	if s.opts.Nodes.LeaseEnded(m.Source) {
		facts |= cloud.SourceSilent
	}
	if m.Phase == cloud.MigrationTransfer && m.SourceState == cloud.MigrationAtSwitchover && !mutant.On(mutant.CommitBesideOldAgent) {
		why, err := new(poolAgents).obstacle(r, vm)
		if err != nil {
			return 0, err
		}
		if why != "" {
			facts |= cloud.OldPoolAgent
		}
	}
	return facts, nil
}
