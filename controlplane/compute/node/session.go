package node

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Placed is a record in the store which states that a VM is, or was, placed on a host. Its key is placed/<node>/<vm>.
// Every transaction that changes the desired state of a VM also writes its Placed record, so a host's session needs to
// watch only the prefix placed/<node>/.
type Placed struct {
	Project    cloud.ProjectID
	Generation uint64
	// Gone is true if the VM's record was deleted. The host then destroys the VM and reports that. After the report,
	// this Placed record is deleted, and the capacity in Held becomes free on the host again.
	Gone bool
	Held cloud.Capacity
	// Volumes are the volumes that the deleted VM may still have open. They are detached when the host has reported
	// that the VM is destroyed.
	Volumes []cloud.VolumeID `cbor:",omitempty"`
}

// PlacedVMs is the table of Placed records.
var PlacedVMs = store.NewTable[Placed]("placed")

// Assignment is the desired state of one VM, as sent to its host.
type Assignment struct {
	VM    cloud.VMID
	State *agentv1.AssignedVm
}

// session is one Watch stream of an agent.
type session struct {
	node cloud.NodeID
	// cancel cancels the session's context with a cause.
	cancel context.CancelCauseFunc
	// wake receives a value when a request for data of the host has been added to requests.
	wake chan struct{}

	mu       sync.Mutex
	requests []hostRequest
}

// enqueue adds a request to the queue for the agent. The limits of hostReads also limit the length of the queue.
func (s *session) enqueue(r hostRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// cancelRequest removes the request with the ID of the cancellation r from the queue. If the request has already been
// sent to the agent, cancelRequest sends the cancellation instead.
func (s *session) cancelRequest(r hostRequest) {
	s.mu.Lock()
	waits := slices.IndexFunc(s.requests, func(one hostRequest) bool { return one.GetRequestId() == r.GetRequestId() })
	if waits >= 0 {
		s.requests = slices.Delete(s.requests, waits, waits+1)
	}
	s.mu.Unlock()
	if waits < 0 {
		s.enqueue(r)
	}
}

// takeRequests moves the queued requests to a message for the agent, and returns whether there are any.
func (s *session) takeRequests(m *agentv1.WatchResponse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.requests {
		switch r := one.(type) {
		case *agentv1.ConsoleRequest:
			m.ConsoleRequests = append(m.ConsoleRequests, r)
		case *agentv1.OpenConsoleRequest:
			m.OpenConsoles = append(m.OpenConsoles, r)
		case *agentv1.SnapshotRequest:
			m.SnapshotRequests = append(m.SnapshotRequests, r)
		case *agentv1.GuestRequest:
			m.GuestRequests = append(m.GuestRequests, r)
		}
	}
	any := len(s.requests) > 0
	s.requests = nil
	return any
}

// errReplaced is the error of a session that ended because the same host opened a newer one.
var errReplaced = fault.New(fault.Aborted, "another session of this host has begun")

// openSession registers a new session of a host; the function end cancels the context of the new session. If the host
// has an older session, openSession cancels that session with errReplaced.
func (s *Service) openSession(node cloud.NodeID, end context.CancelCauseFunc) *session {
	n := &session{node: node, cancel: end, wake: make(chan struct{}, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.sessions[node]; old != nil {
		old.cancel(errReplaced)
	}
	s.sessions[node] = n
	return n
}

// connected reports whether a host has a session with this member.
func (s *Service) connected(node cloud.NodeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[node] != nil
}

func (s *Service) closeSession(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[n.node] == n {
		delete(s.sessions, n.node)
	}
}

// maxLoggedVMs is the maximum number of VM IDs in one log line.
const maxLoggedVMs = 16

// snapshotChunk is the maximum number of VMs in one message of a snapshot, and likewise of volumes.
const snapshotChunk = 100

// watch sends an agent the desired state of its host: a snapshot, then every change. present lists the IDs of the VMs
// that exist on the host. watch returns when ctx ends, when this member's term as leader ends, or when the agent opens
// another session.
func (s *Service) watch(ctx context.Context, node cloud.NodeID, present []string, send func(*agentv1.WatchResponse) error) error {
	leading, term := s.opts.Leadership.Leader()
	if leading != s.opts.Self {
		return s.redirect(leading)
	}
	inTerm, stop := leader.InTerm(ctx, s.opts.Leadership, s.opts.Self, term)
	defer stop()
	ctx, end := context.WithCancelCause(inTerm)
	var work sync.WaitGroup
	defer work.Wait()
	defer end(nil)
	me := s.openSession(node, end)
	defer s.closeSession(me)
	err := s.serve(ctx, me, present, term, &work, send)
	switch {
	case ctx.Err() == nil:
		return err
	case errors.Is(context.Cause(ctx), leader.ErrTermOver):
		return s.termOver()
	}
	return context.Cause(ctx)
}

// termOver returns the error for a session of an earlier term: a redirect to the new leader, or Unavailable if this
// member leads again.
func (s *Service) termOver() error {
	if err := s.checkLeader(); err != nil {
		return err
	}
	return fault.New(fault.Unavailable, "this member has become the leader again in a new term").MayRetry()
}

// batch is one result of PathWatch.Next for the host's Placed or Bound records.
type batch struct {
	changes  []store.PathChange
	revision int64
	err      error
}

// follow sends the results of w.Next to the returned channel until ctx ends or Next returns an error.
func follow(ctx context.Context, work *sync.WaitGroup, w *store.PathWatch) <-chan batch {
	batches := make(chan batch)
	work.Go(func() {
		for {
			changes, revision, err := w.Next(ctx)
			select {
			case batches <- batch{changes, revision, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	return batches
}

// serve sends an agent the snapshot of its host's VMs and volumes, then the desired state of VMs whose Placed record
// changes and of volumes whose Bound record changes, and the queued requests for data of the host.
func (s *Service) serve(ctx context.Context, me *session, present []string, term uint64, work *sync.WaitGroup, send func(*agentv1.WatchResponse) error) error {
	from, err := s.snapshot(ctx, me.node, present, term, send)
	if err != nil {
		return err
	}
	w := PlacedVMs.WatchPaths(s.opts.Store, from, string(me.node))
	defer w.Close()
	volumes := BoundVolumes.WatchPaths(s.opts.Store, from, string(me.node))
	defer volumes.Close()
	batches, volumeBatches := follow(ctx, work, w), follow(ctx, work, volumes)
	revision := from - 1
	for {
		message := &agentv1.WatchResponse{Term: term, Complete: true, Revision: revision}
		var b batch
		requests := false
		delta := s.delta
		select {
		case b = <-batches:
		case b = <-volumeBatches:
			delta = s.volumeDelta
		case <-me.wake:
			requests = me.takeRequests(message)
		case <-ctx.Done():
			return ctx.Err()
		}
		if b.err != nil {
			return b.err
		}
		revision = max(revision, b.revision)
		message.Revision = revision
		if len(b.changes) > 0 {
			if err := delta(me.node, b.changes, message); err != nil {
				return err
			}
		} else if !requests {
			continue
		}
		if err := send(message); err != nil {
			return err
		}
	}
}

// snapshot sends the desired state of all VMs and volumes of the host in chunks. VMs in present that no record places
// on this host are sent as ORPHANED. The result from is the store revision at which the watch for later changes must
// start.
func (s *Service) snapshot(ctx context.Context, node cloud.NodeID, present []string, term uint64, send func(*agentv1.WatchResponse) error) (from int64, err error) {
	var all []Assignment
	var volumes []*agentv1.AssignedVolume
	if err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		from = v.Revision() + 1
		if all, err = s.vms.Assigned(v, node); err != nil {
			return err
		}
		volumes, err = s.volumes.AssignedVolumes(v, node)
		return err
	}); err != nil {
		return 0, err
	}
	known := map[string]bool{}
	for _, a := range all {
		known[string(a.VM)] = true
	}
	var unknown []string
	for _, id := range present {
		if !known[id] {
			known[id] = true
			unknown = append(unknown, id)
			all = append(all, Assignment{cloud.VMID(id), &agentv1.AssignedVm{VmId: id, Power: agentv1.Power_POWER_ORPHANED}})
		}
	}
	if len(unknown) > 0 {
		s.opts.Log.Warn("a host reports VMs that are not placed on it", "node", node, "count", len(unknown), "vms", unknown[:min(len(unknown), maxLoggedVMs)])
	}
	for first := true; first || len(all)+len(volumes) > 0; first = false {
		n, m := min(len(all), snapshotChunk), min(len(volumes), snapshotChunk)
		message := &agentv1.WatchResponse{
			Term: term, Revision: from - 1, Complete: n == len(all) && m == len(volumes), Volumes: volumes[:m],
		}
		volumes = volumes[m:]
		if first {
			message.LeaseSeconds = LeaseSeconds
		}
		for _, a := range all[:n] {
			message.Vms = append(message.Vms, a.State)
		}
		all = all[n:]
		if err := send(message); err != nil {
			return 0, err
		}
	}
	return from, nil
}

// delta adds the current desired state of the changed VMs to message. It reads this member's records without a quorum
// read, because a watch returns a change only after it was applied to these records. The desired state may be newer
// than the changes. The agent then receives the same generation again later, which has no effect. VMs that are no
// longer placed on the host are added to ReleasedVms; the host has already destroyed them.
func (s *Service) delta(node cloud.NodeID, changes []store.PathChange, message *agentv1.WatchResponse) error {
	touched := map[cloud.VMID]bool{}
	for _, c := range changes {
		touched[cloud.VMID(c.Path[1])] = true
	}
	return s.opts.Store.Local(func(v *store.View) error {
		all, err := s.vms.Assigned(v, node, slices.Collect(maps.Keys(touched))...)
		if err != nil {
			return err
		}
		for _, a := range all {
			message.Vms = append(message.Vms, a.State)
			delete(touched, a.VM)
		}
		for id := range touched {
			placed, err := PlacedVMs.Has(v, string(node), string(id))
			if err != nil {
				return err
			}
			if !placed {
				message.ReleasedVms = append(message.ReleasedVms, string(id))
			}
		}
		return nil
	})
}

// redirect returns the error that tells an agent the address of the leading member, or Unavailable if no leader is
// known.
func (s *Service) redirect(leading uint64) error {
	if leading == 0 {
		return fault.New(fault.Unavailable, "no leader is known yet").MayRetry()
	}
	return fault.New(fault.FailedPrecondition, "member %d leads", leading).WithReason("NOT_LEADER").With("leader", s.opts.Listeners()[leading])
}

// checkLeader returns nil if this member leads. Otherwise it returns the error of redirect.
func (s *Service) checkLeader() error {
	if leading, _ := s.opts.Leadership.Leader(); leading != s.opts.Self {
		return s.redirect(leading)
	}
	return nil
}

// reportChunk is the maximum number of reports that are applied in one transaction.
const reportChunk = 16

// reportTimeout is the maximum time of one transaction that applies reports.
const reportTimeout = 10 * time.Second

// applyReports passes a host's reports to VMController.Observed in batches of reportChunk, so that the size of a
// transaction does not grow with the number of VMs. If the reports change more than changeRate records per second, it
// waits between batches.
func (s *Service) applyReports(ctx context.Context, node cloud.NodeID, all []cloud.Observation) error {
	b := s.budgetOf(node)
	for len(all) > 0 {
		n := min(len(all), reportChunk)
		attempt, cancel := context.WithTimeout(ctx, reportTimeout)
		changed, err := s.vms.Observed(attempt, node, all[:n])
		cancel()
		if err != nil {
			return err
		}
		if err := s.throttle(ctx, b.changes, changed); err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}
