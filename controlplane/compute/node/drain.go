package node

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// DrainedVM is the record of what the drain of a host has done with a VM, at node-drain/<node>/<vm>. The records of a
// drain are deleted when the host is uncordoned, drained again or removed.
type DrainedVM struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	Name    string
	// Attempt is the migration of the VM that the drain has begun, or 0 if none is under way (see cloud.Migration).
	Attempt uint64
	// Tries is the number of failed tries to move the VM. Error is why the last one failed, Avoid the host to which it
	// failed, and Next the time before which the VM is not tried again.
	Tries int
	Error string
	Avoid cloud.NodeID
	Next  cloud.Time
	// Moved is true if the drain has moved the VM to the host To.
	Moved bool
	To    cloud.NodeID
	// NoHost is why the VM, which did not run, did not get another host. It is empty if that was not tried.
	NoHost string
	// ShutDown is true if the drain has requested that the VM is shut down.
	ShutDown bool
}

// DrainedVMs is the table of DrainedVM records.
var DrainedVMs = store.NewTable[DrainedVM]("node-drain")

// ReasonNotReady is the reason in the error of Drain if the host does not answer.
const ReasonNotReady = "NODE_NOT_READY"

type drainRequest struct {
	Node    cloud.NodeID
	Force   bool
	Seconds uint32
}

var drainCommand = leader.NewCommand("node.drain", leader.Repeatable, (*Service).drainOnLeader)

// Drain records the request to drain a host, and returns the host's record. Package vm moves the VMs. The caller must
// already be authorized. A drain that is under way gets the new values of force and of the deadline, and goes on. A host
// in maintenance is not changed. Drain returns FailedPrecondition with ReasonNotReady if the host does not answer.
func (s *Service) Drain(ctx context.Context, id cloud.NodeID, force bool, seconds uint32) (cloud.Node, error) {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return cloud.Node{}, err
	}
	if seconds > cloud.MaxDrainSeconds {
		return cloud.Node{}, fault.Invalid("timeout_seconds", "at most %d, got %d", cloud.MaxDrainSeconds, seconds)
	}
	if seconds == 0 {
		seconds = cloud.DefaultDrainSeconds
	}
	return drainCommand.Call(ctx, s.opts.Commands, drainRequest{id, force, seconds})
}

func (s *Service) drainOnLeader(ctx context.Context, q drainRequest) (out cloud.Node, err error) {
	by := auth.CallerOf(ctx).Name()
	changed := false
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = false
		n, err := Nodes.Get(tx, string(q.Node))
		switch {
		case err != nil:
			return err
		case n == nil:
			return noNode(q.Node)
		case n.InMaintenance():
			out = *n
			return nil
		case s.Unresponsive(q.Node):
			return fault.New(fault.FailedPrecondition, "node %s (%s) does not answer, so its VMs cannot be moved: if the host is off, confirm that with "+
				"`trivet host fence`, and VMs with the metadata %s=restart start on other hosts", q.Node, n.Name, cloud.HighAvailability).
				WithReason(ReasonNotReady)
		}
		d := cloud.Drain{Phase: cloud.DrainMoving, By: by, Began: tx.Now()}
		if n.Draining() {
			d = *n.Drain
		} else if err := forgetDrain(tx, q.Node); err != nil {
			return err
		}
		d.Force, d.Deadline = q.Force, tx.Now()+cloud.Time(q.Seconds)*1000
		n.Drain, n.Cordoned, n.UpdatedAt = &d, true, tx.Now()
		Nodes.Put(tx, n, string(q.Node))
		out, changed = *n, true
		return nil
	})
	if err == nil && changed {
		s.opts.Log.Info("the drain of a host has begun or was changed", "node", q.Node, "by", by, "force", q.Force, "seconds", q.Seconds)
	}
	return out, err
}

type cancelDrainRequest struct{ Node cloud.NodeID }

var cancelDrainCommand = leader.NewCommand("node.cancel-drain", leader.Repeatable, (*Service).cancelDrainOnLeader)

// CancelDrain ends the drain of a host, which becomes CORDONED. Migrations that have begun go on. The caller must already
// be authorized. CancelDrain changes nothing if no drain is under way, so a host in maintenance stays in maintenance.
func (s *Service) CancelDrain(ctx context.Context, id cloud.NodeID) error {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return err
	}
	_, err := cancelDrainCommand.Call(ctx, s.opts.Commands, cancelDrainRequest{id})
	return err
}

func (s *Service) cancelDrainOnLeader(ctx context.Context, q cancelDrainRequest) (struct{}, error) {
	by := auth.CallerOf(ctx).Name()
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		n, err := Nodes.Get(tx, string(q.Node))
		if err == nil && n == nil {
			err = noNode(q.Node)
		}
		if err != nil || !n.Draining() {
			return err
		}
		n.EndDrain(cloud.DrainIncomplete, "cancelled by "+by, tx.Now())
		Nodes.Put(tx, n, string(q.Node))
		return nil
	})
	return struct{}{}, err
}

// Draining returns the hosts that are being drained, sorted by ID. It returns none on members other than the leader.
func (s *Service) Draining() (ids []cloud.NodeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, n := range s.nodes {
		if n.Draining() {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// forgetDrain deletes the DrainedVM records of a host.
func forgetDrain(tx *store.Tx, id cloud.NodeID) error {
	all, _, err := DrainedVMs.List(tx.Unguarded(), 0, string(id))
	for _, r := range all {
		DrainedVMs.Delete(tx, r.Path...)
	}
	return err
}
