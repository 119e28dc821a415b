package vm

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/drain"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// nodeServer stores the implementation of NodeService that node.Service.Register registers.
type nodeServer struct{ vmv1.NodeServiceServer }

func (s *nodeServer) RegisterService(_ *grpc.ServiceDesc, impl any) {
	s.NodeServiceServer = impl.(vmv1.NodeServiceServer)
}

// nodeAPI returns the NodeService, and the context of a call by an operator.
func (w *world) nodeAPI() (vmv1.NodeServiceServer, *cloud.Caller) {
	s := &nodeServer{}
	w.nodes.Register(s)
	return s, &cloud.Caller{User: "root", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
}

// drain begins the drain of a host, and returns the host as the call shows it.
func (w *world) drain(id cloud.NodeID, force bool, seconds uint32) *vmv1.Node {
	w.t.Helper()
	api, root := w.nodeAPI()
	n, err := api.DrainNode(auth.With(w.t.Context(), root, auth.RPC), &vmv1.DrainNodeRequest{NodeId: string(id), Force: force, TimeoutSeconds: seconds})
	require.NoError(w.t, err)
	w.AwaitFleet()
	return n
}

func (w *world) uncordon(id cloud.NodeID) {
	w.t.Helper()
	api, root := w.nodeAPI()
	_, err := api.UncordonNode(auth.With(w.t.Context(), root, auth.RPC), &vmv1.UncordonNodeRequest{NodeId: string(id)})
	require.NoError(w.t, err)
	w.AwaitFleet()
}

// stepDrains calls StepDrains after the service has seen which VMs are being migrated.
func (w *world) stepDrains() {
	w.t.Helper()
	w.AwaitFleet()
	require.NoError(w.t, w.vms.StepDrains(w.t.Context()))
	w.AwaitFleet()
}

// advance advances the clock, and then sends a heartbeat of each host.
func (w *world) advance(d time.Duration, hosts ...cloud.NodeID) {
	w.t.Helper()
	w.Clock.Advance(d)
	for _, id := range hosts {
		w.Heartbeat(id)
	}
}

// arrive takes the VM's migration to its end on the target, and reports that the source has removed the VM.
func (w *world) arrive(id cloud.VMID) {
	w.t.Helper()
	vm := w.get(id)
	require.NotNil(w.t, vm.Migration, "VM %s is %s", vm.Name, vm.State)
	source, target := vm.Migration.Source, vm.Migration.Target
	w.tell(vm, target, cloud.MigrationPrepared)
	w.tell(vm, source, cloud.MigrationPrepared)
	w.tell(vm, source, cloud.MigrationAtSwitchover)
	w.tell(vm, target, cloud.MigrationRunning)
	w.reportAbsent(source, id, w.get(id).Generation)
}

// progress returns the drain of a host as one line for each VM.
func (w *world) progress(id cloud.NodeID) (lines []string) {
	w.t.Helper()
	p, err := w.vms.GetDrain(w.t.Context(), id)
	require.NoError(w.t, err)
	for _, vm := range p.VMs {
		line := fmt.Sprintf("%s %s", vm.Name, vm.Status)
		if vm.ToName != "" {
			line += " " + vm.ToName
		}
		if vm.Reason != "" {
			line += ": " + vm.Reason
		}
		lines = append(lines, line)
	}
	return lines
}

func priority(n string) func(*CreateRequest) {
	return func(r *CreateRequest) { r.Metadata = map[string]string{cloud.HAPriority: n} }
}

// runs creates a VM that runs.
func (w *world) runs(name string, change ...func(*CreateRequest)) cloud.VMID {
	w.t.Helper()
	id := w.create(name, change...).ID
	w.report(id, cloud.ObservedBuilt)
	w.power(id, start, 0)
	w.report(id, cloud.ObservedRunning)
	return id
}

func withTPM(r *CreateRequest) { r.Spec.Security.TPM = true }

// TestDrain drains a host with three VMs that run and one that does not. Two leave at a time, the one with the highest
// priority first. Then the host is in maintenance, where no VM can be started, and after it is uncordoned all is as
// before.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	low, middle, high := w.runs("low", priority("1")), w.runs("middle"), w.runs("high", priority("99"))
	off := w.createInState(cloud.Stopped, "off").ID
	h2 := w.migrationHost("h2")

	require.Equal(t, vmv1.NodeState_NODE_STATE_DRAINING, w.drain(h1, false, 0).GetState())
	d := w.Node(h1).Drain
	require.Equal(t, []any{"root", cloud.Time(cloud.DefaultDrainSeconds * 1000)}, []any{d.By, d.Deadline - d.Began})
	w.stepDrains()
	require.Equal(t, []string{"high MOVING h2", "middle MOVING h2", "low WAITING", "off STAYS: is STOPPED and stays on this host"}, w.progress(h1))
	w.awaitMigrations(2)
	w.stepDrains()
	require.Equal(t, cloud.Running, w.get(low).State, "only two VMs leave at a time")
	w.arrive(high)
	w.awaitMigrations(1)
	require.Contains(t, w.progress(h1), "high MOVED h2",
		"GetDrain must contain the moved VM before the next step of the drain")
	w.stepDrains()
	require.Equal(t, cloud.Migrating, w.get(low).State)
	w.arrive(middle)
	w.awaitMigrations(1)
	w.stepDrains()
	require.True(t, w.Node(h1).Draining(), "a host with a VM that leaves is in maintenance")
	w.arrive(low)
	w.stepDrains()
	require.True(t, w.Node(h1).InMaintenance())
	require.Equal(t, []string{"off STAYS: is STOPPED and stays on this host", "low MOVED h2", "middle MOVED h2", "high MOVED h2"}, w.progress(h1))
	require.Equal(t, h2, w.get(high).Node)

	_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: off, Action: start})
	require.ErrorContains(t, err, "in maintenance", "a VM was started on a host in maintenance")
	require.Equal(t, ReasonInMaintenance, reasonOf(err))
	require.Equal(t, vmv1.NodeState_NODE_STATE_MAINTENANCE, w.drain(h1, true, 0).GetState(), "a repeated drain changes nothing")
	w.Heartbeat(h1)
	require.True(t, w.Node(h1).InMaintenance(), "a heartbeat must not end the maintenance")

	w.uncordon(h1)
	require.Nil(t, w.Node(h1).Drain)
	require.Empty(t, w.progress(h1))
	w.power(off, start, 0)
	w.report(off, cloud.ObservedRunning)
}

// TestDrainedHostGetsNoVM checks that no VM is placed on a host that is drained, or in maintenance.
func TestDrainedHostGetsNoVM(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	web := w.runs("web")
	w.drain(h1, false, 0)
	_, err := w.vms.Create(w.as(acme, ""), acme, small("new"), [32]byte{})
	require.ErrorContains(t, err, "h1 is DRAINING", "a VM was placed on a host that is drained")
	w.power(web, stop, 0)
	w.report(web, cloud.ObservedBuilt)
	w.stepDrains()
	_, err = w.vms.Create(w.as(acme, ""), acme, small("new"), [32]byte{})
	require.ErrorContains(t, err, "h1 is MAINTENANCE")
}

// placedOn returns the ID of the VM with this name if it is on the host.
func (w *world) placedOn(on cloud.NodeID, name string) (found cloud.VMID) {
	w.t.Helper()
	all, _, err := w.vms.List(w.t.Context(), acme, 100, "", "")
	require.NoError(w.t, err)
	for _, vm := range all {
		if vm.Name == name && vm.Node == on {
			found = vm.ID
		}
	}
	return found
}

func reasonOf(err error) string {
	f, _ := fault.From(err)
	if f == nil {
		return ""
	}
	return f.Reason
}

// awaitMigrations waits until the service has seen that n VMs are being migrated.
func (w *world) awaitMigrations(n int) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		w.vms.mu.Lock()
		defer w.vms.mu.Unlock()
		return len(w.vms.migrations) == n
	}, 10*time.Second, time.Millisecond)
}

// TestDrainRetries lets the migration of a VM fail. The drain must try it again on another host, and then on the same
// one, because no third host exists.
func TestDrainRetries(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	id := w.runs("web")
	w.migrationHost("h2")
	w.migrationHost("h3")
	w.drain(h1, false, 0)
	var targets []cloud.NodeID
	for try := range 3 {
		w.stepDrains()
		vm := w.get(id)
		require.NotNil(t, vm.Migration, "try %d", try)
		target := vm.Migration.Target
		targets = append(targets, target)
		w.tell(vm, target, cloud.MigrationFailed, func(o *cloud.Observation) { o.Migration.Error = "no space" })
		w.reportAbsent(target, id, w.get(id).Generation)
		w.awaitMigrations(0)
		w.stepDrains()
		require.Nil(t, w.get(id).Migration, "it is tried again later")
		require.Contains(t, w.progress(h1)[0], "no space")
		w.advance(drain.RetryAfter(try+1), h1, targets[0], "00000000-0000-7000-a000-000000000002", "00000000-0000-7000-a000-000000000003")
	}
	require.NotEqual(t, targets[0], targets[1])
	require.NotEqual(t, targets[1], targets[2])
}

// TestDrainNamesWhatStays drains a host with a VM that cannot be migrated and one that fits on no other host. Without
// force they stay until the timeout, and the host is cordoned then. With force they are shut down after the others have
// left.
func TestDrainNamesWhatStays(t *testing.T) {
	for _, force := range []bool{false, true} {
		t.Run(fmt.Sprintf("force=%t", force), func(t *testing.T) {
			w := newWorld(t)
			h1 := w.migrationHost("h1", withFeatures)
			fixed, moves := w.runs("fixed", withTPM), w.runs("moves")
			large := w.runs("large", func(r *CreateRequest) { r.Spec.Memory.SizeMiB = 32 << 10 })
			h2 := w.migrationHost("h2", func(n *cloud.Node) { n.Allocatable.MemoryMiB = 8 << 10 })
			w.drain(h1, force, 600)
			w.stepDrains()
			p := w.progress(h1)
			require.Contains(t, p[0], "fixed CANNOT_MOVE: is on a host that does not serve firmware-migration")
			require.Equal(t, "moves MOVING h2", p[1])
			require.Contains(t, p[2], "large WAITING: no host fits: h2 has")
			w.awaitMigrations(1)
			w.advance(drain.RetryFirst, h1, h2)
			w.stepDrains()
			require.Contains(t, w.progress(h1)[2], "large CANNOT_MOVE: no host fits")
			require.Equal(t, cloud.Running, w.get(fixed).State, "a VM was shut down before the others have moved")
			w.arrive(moves)
			w.awaitMigrations(0)
			w.stepDrains()
			if !force {
				w.stepDrains()
				require.Equal(t, []cloud.State{cloud.Running, cloud.Running}, []cloud.State{w.get(fixed).State, w.get(large).State})
				w.advance(600*time.Second, h1, h2)
				w.stepDrains()
				n := w.Node(h1)
				require.Equal(t, cloud.DrainIncomplete, n.Drain.Phase)
				require.Contains(t, n.Drain.Result, "2 VMs are still on the host: fixed is on a host that does not serve")
				require.Equal(t, cloud.NodeCordoned, n.State(1, 1))
				require.Equal(t, vmv1.NodeState_NODE_STATE_DRAINING, w.drain(h1, false, 0).GetState(), "it can be drained again")
				return
			}
			require.Equal(t, []cloud.State{cloud.Stopping, cloud.Stopping}, []cloud.State{w.get(fixed).State, w.get(large).State})
			require.EqualValues(t, cloud.DefaultStop, w.get(fixed).Desired.GraceMS)
			w.report(fixed, cloud.ObservedBuilt)
			_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: fixed, Action: start})
			require.Equal(t, ReasonDraining, reasonOf(err), "the drain would have to shut the VM down again")
			w.stepDrains()
			require.True(t, w.Node(h1).Draining(), "a host with a VM that stops is in maintenance")
			w.report(large, cloud.ObservedBuilt)
			w.stepDrains()
			require.True(t, w.Node(h1).InMaintenance())
			require.Contains(t, w.progress(h1)[0], "fixed SHUT_DOWN: is on a host")
		})
	}
}

func withFeatures(n *cloud.Node) { n.Features = map[string]string{cloud.FeatureTPM: ""} }

// TestDrainAndUserCalls stops, deletes and starts VMs during a drain. None of these calls may fail, and the drain must
// count none of these VMs as moved.
func TestDrainAndUserCalls(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	stopped, deleted := w.runs("stopped"), w.runs("deleted")
	started := w.createInState(cloud.Stopped, "started").ID
	h2 := w.migrationHost("h2")
	w.drain(h1, false, 0)
	w.stepDrains()
	w.awaitMigrations(2)
	w.power(stopped, stop, 0) // a forced stop cancels the migration
	w.reportAbsent(h2, stopped, w.get(stopped).Generation)
	w.report(stopped, cloud.ObservedBuilt)
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: deleted, Force: true})
	require.NoError(t, err)
	w.power(started, start, 0)
	w.report(started, cloud.ObservedRunning)
	w.awaitMigrations(0)
	w.stepDrains()
	require.Equal(t, []string{"started MOVING h2", "stopped STAYS: is STOPPED and stays on this host"}, w.progress(h1))
	w.awaitMigrations(1)
	w.arrive(started)
	w.stepDrains()
	require.True(t, w.Node(h1).Draining(), "the host has not removed the deleted VM yet")
	w.reportAbsent(h1, deleted, 1<<40)
	w.stepDrains()
	require.True(t, w.Node(h1).InMaintenance())
	require.Equal(t, []string{"stopped STAYS: is STOPPED and stays on this host", "started MOVED h2"}, w.progress(h1))
}

// TestDrainOfTarget drains the target of a migration. The migration is cancelled before the switchover; after it, the VM
// arrives and is moved again.
func TestDrainOfTarget(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	early, late := w.runs("early"), w.runs("late")
	h2 := w.migrationHost("h2")
	w.toSwitchover(late, h2)
	w.migrate(early, h2)
	w.drain(h2, false, 0)
	w.stepDrains()
	require.Equal(t, []any{cloud.Running, h1}, []any{w.get(early).State, w.get(early).Node})
	w.reportAbsent(h2, early, w.get(early).Generation)
	vm := w.get(late)
	require.Equal(t, cloud.MigrationSwitchover, vm.Migration.Phase)
	w.stepDrains()
	require.True(t, w.Node(h2).Draining(), "a host to which a VM is being migrated is in maintenance")
	vm = w.tell(vm, h2, cloud.MigrationRunning)
	w.reportAbsent(h1, late, vm.Generation)
	w.awaitMigrations(0)
	w.stepDrains()
	require.Equal(t, h1, w.get(late).Migration.Target)
}

// TestDrainSurvivesLeader continues a drain with a new Service, as a new leader does: the migrations under way are
// counted, their results recorded, and the waits between tries kept.
func TestDrainSurvivesLeader(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	moves, fails, waits := w.runs("moves"), w.runs("fails"), w.runs("waits")
	h2 := w.migrationHost("h2")
	w.drain(h1, false, 0)
	w.stepDrains()
	w.awaitMigrations(2)
	w.tell(w.get(fails), h2, cloud.MigrationFailed, func(o *cloud.Observation) { o.Migration.Error = "no space" })
	w.reportAbsent(h2, fails, w.get(fails).Generation)
	w.arrive(moves)

	w.vms.mu.Lock()
	clear(w.vms.migrations)
	w.vms.mu.Unlock()
	w.stepDrains()
	require.Equal(t, cloud.Running, w.get(fails).State, "a new leader waits before the next try")
	require.Equal(t, []string{"waits MOVING h2", "moves MOVED h2"}, w.progress(h1)[1:])
	require.Contains(t, w.progress(h1)[0], "fails WAITING: no space")
	w.advance(drain.RetryFirst, h1, h2)
	w.stepDrains()
	require.Equal(t, cloud.Migrating, w.get(fails).State)
	require.Equal(t, cloud.Migrating, w.get(waits).State)
}

// TestDrainRequests checks the errors of DrainNode, a second drain of the same host, and what cordon, cancel and
// uncordon do during a drain.
func TestDrainRequests(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	w.runs("web")
	h2 := w.migrationHost("h2")
	api, root := w.nodeAPI()
	ctx := auth.With(t.Context(), root, auth.RPC)
	for _, c := range []struct {
		name, node string
		seconds    uint32
		want       fault.Kind
	}{
		{"no ID", "h1", 0, fault.InvalidArgument},
		{"unknown host", "00000000-0000-7000-a000-000000000099", 0, fault.NotFound},
		{"too long", string(h1), cloud.MaxDrainSeconds + 1, fault.InvalidArgument},
	} {
		_, err := api.DrainNode(ctx, &vmv1.DrainNodeRequest{NodeId: c.node, TimeoutSeconds: c.seconds})
		require.True(t, fault.Is(err, c.want), "%s: %v", c.name, err)
	}
	require.Nil(t, w.Node(h1).Drain)

	w.drain(h1, false, 60)
	began := w.Node(h1).Drain.Began
	w.stepDrains()
	w.advance(time.Second, h1, h2)
	w.drain(h1, true, 120)
	d := w.Node(h1).Drain
	require.Equal(t, []any{true, began, began + 121_000}, []any{d.Force, d.Began, d.Deadline})
	n, err := api.CordonNode(ctx, &vmv1.CordonNodeRequest{NodeId: string(h1)})
	require.NoError(t, err)
	require.Equal(t, vmv1.NodeState_NODE_STATE_DRAINING, n.GetState())
	require.NoError(t, w.nodes.CancelDrain(ctx, h1))
	require.NoError(t, w.nodes.CancelDrain(ctx, h1))
	require.Equal(t, []any{cloud.DrainIncomplete, "cancelled by root", cloud.NodeCordoned},
		[]any{w.Node(h1).Drain.Phase, w.Node(h1).Drain.Result, w.Node(h1).State(1, 1)})
	w.drain(h1, false, 0)
	w.uncordon(h1)
	require.Equal(t, cloud.NodeReady, w.Node(h1).State(1, 1))
	w.update(func(tx *store.Tx) {
		left, _, err := node.DrainedVMs.List(tx, 0)
		require.NoError(t, err)
		require.Empty(t, left)
	})

	w.advance(time.Minute, h2)
	_, err = api.DrainNode(ctx, &vmv1.DrainNodeRequest{NodeId: string(h1)})
	require.Equal(t, node.ReasonNotReady, reasonOf(err))
	require.ErrorContains(t, err, "trivet host fence")
	require.Nil(t, w.Node(h1).Drain)
}

// TestDrainSpreadsArrivals drains two hosts at the same time. At most two VMs arrive at a host at a time, and a VM that
// waits for this is not counted as failed.
func TestDrainSpreadsArrivals(t *testing.T) {
	w := newWorld(t)
	h1 := w.migrationHost("h1")
	for _, name := range []string{"a", "b"} {
		w.runs(name)
	}
	w.drain(h1, false, 0)
	h2 := w.migrationHost("h2")
	c := w.runs("c")
	w.drain(h2, false, 0)
	w.migrationHost("h3")
	w.stepDrains()
	w.awaitMigrations(2)
	w.stepDrains()
	require.Equal(t, cloud.Running, w.get(c).State)
	require.Equal(t, []string{"c WAITING"}, w.progress(h2))
	for _, name := range []string{"a", "b"} {
		w.arrive(w.placedOn(h1, name))
	}
	w.awaitMigrations(0)
	w.Clock.Advance(drain.RetryBusy)
	w.stepDrains()
	require.Equal(t, cloud.Migrating, w.get(c).State)
}

// TestDrainPassesWaitingVMs drains a host whose first VMs fit only on a host that receives other VMs. The next VM, which fits
// elsewhere, must be moved meanwhile. A VM that fits nowhere must be counted as failed.
func TestDrainPassesWaitingVMs(t *testing.T) {
	w := newWorld(t)
	labels := func(all map[string]string) func(*cloud.Node) { return func(n *cloud.Node) { n.Labels = all } }
	on := func(selector string) func(*CreateRequest) {
		return func(q *CreateRequest) {
			q.Labels, q.Metadata = map[string]string{cloud.NodeSelectorLabel: selector}, map[string]string{cloud.HAPriority: "99"}
		}
	}
	h1 := w.migrationHost("h1", labels(map[string]string{"zone": "a"}))
	for _, name := range []string{"a", "b"} {
		w.runs(name, on("zone=a"))
	}
	w.drain(h1, false, 0)
	h2 := w.migrationHost("h2", labels(map[string]string{"disk": "ssd", "only": "here"}))
	w.runs("c", on("disk=ssd"))
	w.runs("d", on("only=here"))
	e := w.runs("e")
	w.migrationHost("h3", labels(map[string]string{"zone": "a", "disk": "ssd"}))
	w.AwaitFleet()
	w.stepDrains()
	w.awaitMigrations(2) // a and b to h3
	w.drain(h2, false, 0)
	w.migrationHost("h4")
	w.AwaitFleet()
	w.stepDrains()
	require.Equal(t, cloud.Running, w.get(e).State, "c and d are tried first")
	w.stepDrains()
	require.Equal(t, cloud.Migrating, w.get(e).State)
	lines := strings.Join(w.progress(h2), "\n")
	require.Contains(t, lines, "c WAITING")
	require.Contains(t, lines, "d WAITING: ", "d fits nowhere")
	require.NotContains(t, lines, "c WAITING: ")
}

// TestDrainMovesStoppedVM drains a host with two STOPPED VMs whose only disks are volumes in a shared pool. The one that
// fits elsewhere must get another host and stay STOPPED there; the other one must stay and be named with the reason.
func TestDrainMovesStoppedVM(t *testing.T) {
	w := newWorld(t)
	h1 := w.sharedHost("n1", 64<<10)
	id, large := w.running("web").ID, w.running("large", func(r *CreateRequest) { r.Spec.Memory.SizeMiB = 32 << 10 }).ID
	for _, vm := range []cloud.VMID{id, large} {
		w.power(vm, stop, 0)
		w.report(vm, cloud.ObservedBuilt)
	}
	volume := w.get(id).Spec.Volumes()[0]
	w.flush(volume)
	h2 := w.sharedHost("n2", 4096)
	w.drain(h1, false, 0)
	w.stepDrains()
	require.Equal(t, []any{cloud.Pending, cloud.NodeID("")}, []any{w.get(id).State, w.get(id).Node})
	require.Equal(t, "the VM waits for another host: its host is drained", w.get(id).Status.LastError)
	require.Equal(t, []string{
		"large STAYS: is STOPPED and stays on this host: no host fits: n2 has 4096 MiB of memory free, 32768 needed",
		"web MOVING: the VM waits for another host: its host is drained",
	}, w.progress(h1))
	w.followed()
	w.recover()
	require.Equal(t, h2, w.getVolume(volume).Node)
	w.flush(volume)
	w.recover()
	require.Equal(t, []any{cloud.Creating, h2}, []any{w.get(id).State, w.get(id).Node})
	w.stepDrains()
	require.True(t, w.Node(h1).Draining(), "the host has not removed the VM yet")
	w.reportAbsent(h1, id, w.get(id).Generation)
	vm := w.report(id, cloud.ObservedBuilt)
	require.Equal(t, []any{cloud.Stopped, false, h2}, []any{vm.State, vm.Desired.On, w.getVolume(volume).Node})
	w.stepDrains()
	require.True(t, w.Node(h1).InMaintenance())
	require.Equal(t, "web MOVED n2", w.progress(h1)[1])
	require.Zero(t, w.allocated(h1).StorageGiB)
}
