package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Mover moves VMs between hosts.
type Mover interface {
	// MoveVM moves a VM to a host, and returns when the VM is there or the move has failed.
	MoveVM(ctx context.Context, t cloud.Tenant, id cloud.VMID, to cloud.NodeID) error
}

// migrator is the Mover that migrates VMs.
type migrator struct{ vms *Service }

// MoveVM implements Mover. It removes the caller's idempotency key from the context, because that key is for the whole
// call of Rebalance.
func (m migrator) MoveVM(ctx context.Context, t cloud.Tenant, id cloud.VMID, to cloud.NodeID) error {
	if c := auth.CallerOf(ctx); c != nil && c.IdempotencyKey != "" {
		without := *c
		without.IdempotencyKey = ""
		ctx = auth.With(ctx, &without, auth.RPC)
	}
	r, err := m.vms.Migrate(ctx, t, id, to, 0, true, [32]byte{})
	if err == nil && r.WaitEnded {
		return fault.New(fault.DeadlineExceeded, "the migration of VM %s has not ended yet", r.VM.Name)
	}
	return err
}

// RebalanceRequest describes a call of Rebalance.
type RebalanceRequest struct {
	// DryRun is true if the moves are only proposed.
	DryRun bool
	// Most is the maximum number of moves. 0 means DefaultMoves.
	Most int
}

// Rebalanced is the result of Rebalance.
type Rebalanced struct {
	schedule.Plan
	// Hosts has the names of the hosts in the plan.
	Hosts map[cloud.NodeID]string
	// Tenants has the tenants of the VMs in the plan.
	Tenants map[cloud.VMID]cloud.Tenant
}

// Limits on the number of moves that Rebalance proposes.
const (
	DefaultMoves = 20
	MaxMoves     = 1000
)

// Rebalance proposes moves of VMs that make the use of the hosts more equal (see schedule.Rebalance). Without DryRun it
// then makes the moves, one after the other, and returns the first error. Moves that were made before stay.
func (s *Service) Rebalance(ctx context.Context, q RebalanceRequest) (Rebalanced, error) {
	if q.Most == 0 {
		q.Most = DefaultMoves
	}
	if q.Most < 0 || q.Most > MaxMoves {
		return Rebalanced{}, fault.Invalid("max_moves", "must be at most %d", MaxMoves)
	}
	out, err := rebalanceCommand.Call(ctx, s.opts.Commands, q.Most)
	if err != nil || q.DryRun {
		return out, err
	}
	for _, m := range out.Moves {
		if err := s.opts.Mover.MoveVM(ctx, out.Tenants[m.VM], m.VM, m.To); err != nil {
			return out, err
		}
	}
	return out, nil
}

var rebalanceCommand = leader.NewCommand("vm.rebalance", leader.Repeatable, (*Service).rebalanceOnLeader)

func (s *Service) rebalanceOnLeader(ctx context.Context, most int) (out Rebalanced, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		snap, err := s.snapshot(v, (*snapshot).migration)
		if err != nil {
			return err
		}
		out = Rebalanced{Plan: schedule.Rebalance(&snap.Snapshot, most), Hosts: map[cloud.NodeID]string{}, Tenants: map[cloud.VMID]cloud.Tenant{}}
		for i := range snap.Hosts {
			n := &snap.Hosts[i].Node
			for _, m := range out.Moves {
				if n.ID == m.From || n.ID == m.To {
					out.Hosts[n.ID] = n.Name
				}
			}
		}
		for _, m := range out.Moves {
			out.Tenants[m.VM] = snap.tenants[m.VM]
		}
		return snap.failed
	})
	return out, err
}
