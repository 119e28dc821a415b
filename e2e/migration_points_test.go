package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// migrationPoint is a point of a migration at which a test injects a failure. The function reach begins a migration,
// and suspends agents or tunnels so that the migration stops at the point. It returns when the migration has reached
// the point. The returned function resumes the suspended processes.
type migrationPoint struct {
	name  string
	reach func(g *faultyGuest) (resume func())
	// only is the only failure that strikes at this point; "" for all.
	only string
}

var migrationPoints = []migrationPoint{
	// The capacity is reserved, and the target has not begun.
	{name: "reserve", reach: func(g *faultyGuest) func() {
		resume := g.suspendAgent(g.target)
		g.migrate()
		return resume
	}},
	// QEMU waits at the target.
	{name: "prepare", reach: func(g *faultyGuest) func() {
		g.migrate()
		g.await("QEMU runs at the target", func() bool { return g.qemu(g.target) != 0 })
		return g.suspendAgent(g.source)
	}},
	// The source sends disks and memory.
	{name: "transfer", reach: func(g *faultyGuest) func() {
		before := g.attempt(g.source, "outgoing")
		g.migrate()
		g.await("the source has begun", func() bool { return g.attempt(g.source, "outgoing") != before })
		pid := g.tunnel(g.target)
		_ = syscall.Kill(pid, syscall.SIGSTOP)
		return func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
	}},
	// The source has paused the guest for the switchover.
	{name: "switch", reach: func(g *faultyGuest) func() {
		g.migrate()
		g.await("the guest is paused", func() bool { return g.paused(g.source) })
		return g.suspendAgent(g.source)
	}},
	// The switchover is committed, and the source has handed the guest over.
	{name: "commit", reach: func(g *faultyGuest) func() {
		before := g.attempt(g.source, "handed_over")
		g.migrate()
		g.await("the guest is paused", func() bool { return g.paused(g.source) })
		resume := g.suspendAgent(g.target)
		g.await("the source has handed over", func() bool { return g.attempt(g.source, "handed_over") != before })
		return resume
	}},
	// The guest runs at the target, and the source has not removed its QEMU.
	{name: "release", reach: func(g *faultyGuest) func() {
		before := g.attempt(g.target, "committed")
		g.migrate()
		g.await("the target may run the guest", func() bool { return g.attempt(g.target, "committed") != before })
		resume := g.suspendAgent(g.source)
		g.await("the target runs the guest", func() bool {
			vm, err := g.c.vms.GetVm(g.c.context(10*time.Second), &vmv1.GetVmRequest{VmId: g.id})
			return err == nil && vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetNodeId() == g.c.ids[g.target]
		})
		return resume
	}},
	// The guest runs at the target, and the members do not know it. The lease of the target ends its QEMU later.
	{name: "arrive", only: targetQuorum, reach: (*faultyGuest).reachArrive},
}

// reachArrive holds back the last part of the guest's state until the agent of the target has received the switchover.
// The returned function lets the state arrive, and waits until the guest on the target has written to its disk.
func (g *faultyGuest) reachArrive() (resume func()) {
	t := g.c.t
	copied, handedOver := g.attempt(g.source, "copied"), g.attempt(g.source, "handed_over")
	g.migrate()
	g.await("the source is ready for the switchover", func() bool { return g.attempt(g.source, "copied") != copied })
	resumeAgent := g.suspendAgent(g.source)
	tunnel := g.tunnel(g.target)
	_ = syscall.Kill(tunnel, syscall.SIGSTOP)
	require.Equal(t, handedOver, g.attempt(g.source, "handed_over"), "the source was not suspended in time")
	resumeAgent()
	g.await("the target knows the switchover", func() bool {
		return g.assignedPhase(g.target) == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
	})
	return func() {
		_ = syscall.Kill(tunnel, syscall.SIGCONT)
		g.await("the guest on the target has written to its disk", func() bool { return g.witness.written(g.target) > 0 })
	}
}

// assignedPhase returns the phase of the VM's migration in the assignment that a host has stored.
func (g *faultyGuest) assignedPhase(host int) agentv1.MigrationPhase {
	var m agentv1.WatchResponse
	text, err := os.ReadFile(filepath.Join(g.c.hosts[host].DataDir(), "identity", "assignment.pb"))
	if err != nil || proto.Unmarshal(text, &m) != nil {
		return agentv1.MigrationPhase_MIGRATION_PHASE_UNSPECIFIED
	}
	for _, vm := range m.GetVms() {
		if vm.GetVmId() == g.id {
			return vm.GetMigration().GetPhase()
		}
	}
	return agentv1.MigrationPhase_MIGRATION_PHASE_UNSPECIFIED
}
