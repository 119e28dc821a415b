package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// migrationFault is a failure during a migration of the guest of g from host g.source to host g.target.
type migrationFault struct {
	name string
	// strike causes the failure. The returned function, unless nil, ends a failure that lasts. It is called after the
	// migration has ended.
	strike func(g *faultyGuest) (heal func())
	// bound is the longest time-out of the control plane or of the hosts that must pass until the migration has ended.
	bound time.Duration
	// never has the points at which the failure is not possible.
	never []string
}

const (
	lostTime = 45 * time.Second // node.LostTime
	// endTime is the time that a migration may take in addition to the time-outs of its failure. It is a limit of the wait,
	// not a requirement on the speed.
	endTime = time.Minute
)

// migrationFaults has the failures of the matrix.
var migrationFaults = []migrationFault{
	{name: "source QEMU", strike: func(g *faultyGuest) func() { return g.killQEMU(g.source) }},
	{name: "target QEMU", strike: func(g *faultyGuest) func() { return g.killQEMU(g.target) }, never: []string{"reserve"}},
	{name: "source agent", strike: func(g *faultyGuest) func() { return g.killAgent(g.source) }},
	{name: "target agent", strike: func(g *faultyGuest) func() { return g.killAgent(g.target) }},
	{name: "leader", strike: (*faultyGuest).killLeader},
	// A source whose transfer makes no progress cancels the attempt after 30 s. After the switchover, the target is asked
	// to give up after 60 s.
	{name: "link", strike: (*faultyGuest).cutLink, bound: 60 * time.Second},
	// After the switchover, the target is asked to give up after 60 s, and the source then has 60 s to continue the guest.
	{name: "quorum", strike: func(g *faultyGuest) func() { return g.c.cutControlPlane(g.source) }, bound: lostTime + 120*time.Second},
}

// migrationPoint is a point of a migration at which a failure strikes. The function reach begins a migration and returns when it
// has reached the point, with agents or tunnels suspended so that the migration stays there. The returned function
// resumes them.
type migrationPoint struct {
	name  string
	reach func(g *faultyGuest) (resume func())
}

var migrationPoints = []migrationPoint{
	// The capacity is reserved, and the target has not begun.
	{"reserve", func(g *faultyGuest) func() {
		resume := g.suspendAgent(g.target)
		g.migrate()
		return resume
	}},
	// QEMU waits at the target.
	{"prepare", func(g *faultyGuest) func() {
		g.migrate()
		g.await("QEMU runs at the target", func() bool { return g.qemu(g.target) != 0 })
		return g.suspendAgent(g.source)
	}},
	// The source sends disks and memory.
	{"transfer", func(g *faultyGuest) func() {
		before := g.attempt(g.source, "outgoing")
		g.migrate()
		g.await("the source has begun", func() bool { return g.attempt(g.source, "outgoing") != before })
		pid := g.tunnel(g.target)
		_ = syscall.Kill(pid, syscall.SIGSTOP)
		return func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
	}},
	// The source has paused the guest for the switchover.
	{"switch", func(g *faultyGuest) func() {
		g.migrate()
		g.await("the guest is paused", func() bool { return g.paused(g.source) })
		return g.suspendAgent(g.source)
	}},
	// The switchover is committed, and the source has handed the guest over.
	{"commit", func(g *faultyGuest) func() {
		before := g.attempt(g.source, "handed_over")
		g.migrate()
		g.await("the guest is paused", func() bool { return g.paused(g.source) })
		resume := g.suspendAgent(g.target)
		g.await("the source has handed over", func() bool { return g.attempt(g.source, "handed_over") != before })
		return resume
	}},
	// The guest runs at the target, and the source has not removed its QEMU.
	{"release", func(g *faultyGuest) func() {
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
}

// faultyGuest is a guest with a local disk that is moved between two hosts, with failures.
type faultyGuest struct {
	c              *networkCloud
	m              *machine
	id             string
	source, target int // of the present migration; indexes into networkCloud.hosts
	witness        *witness
}

// newFaultyGuest boots a guest with one blank disk on a host. The guest is started again if its process dies.
func (c *networkCloud) newFaultyGuest(name, subnet string, host int) *faultyGuest {
	m := c.bootFrom(name, host, func(r *vmv1.CreateVmRequest) {
		r.Metadata = map[string]string{"trivet/restart": "on-failure"}
		r.Spec.Disks = []*vmv1.DiskSpec{{Id: "data", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}}
	}, &vmv1.NetworkSpec{SubnetId: subnet})
	_, err := c.vms.UpdateVm(c.context(time.Minute), &vmv1.UpdateVmRequest{
		VmId: m.vm.GetId(), Labels: map[string]string{"trivet/node-selector": ""}, // which boot has set
	})
	require.NoError(c.t, err)
	return &faultyGuest{c: c, m: m, id: m.vm.GetId(), source: host}
}

// strike moves the guest to the other host, with the failure f at the point p. Exactly one host must run the guest at
// each time, the guest must keep each write that it has acknowledged, and the migration must end without an operator.
func (g *faultyGuest) strike(f migrationFault, p migrationPoint) {
	t := g.c.t
	g.source, g.target = g.m.host, 1-g.m.host
	g.witness = g.watch()
	defer g.witness.stop()
	defer g.restore()
	resume := p.reach(g)
	heal := f.strike(g)
	resume()
	began := time.Now()
	node := g.ended(f.bound + endTime)
	t.Logf("%s at %s: the migration has ended after %v, the VM is on %s", f.name, p.name, time.Since(began).Round(time.Millisecond), g.c.hosts[node].Name)
	if heal != nil {
		heal()
	}
	g.m.host = node
	g.settled()
	g.witness.check(node)
}

// ended waits until the VM is RUNNING without a migration, and returns its host.
func (g *faultyGuest) ended(within time.Duration) (host int) {
	err := lab.Until(g.c.context(within), "the migration has ended", func(ctx context.Context) error {
		r, err := g.c.admin.Operator.GetMigration(ctx, &operatorv1.GetMigrationRequest{VmId: g.id, OrgId: "default", ProjectId: "default"})
		if err != nil {
			return err
		}
		if phase := r.GetMigration().GetPhase(); phase != "" {
			return fmt.Errorf("it is in the phase %s", phase)
		}
		vm, err := g.c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: g.id})
		if err != nil {
			return err
		}
		for i, id := range g.c.ids {
			if id == vm.GetNodeId() && vm.GetState() == vmv1.VmState_VM_STATE_RUNNING {
				host = i
				return nil
			}
		}
		return fmt.Errorf("it is %v on %s: %s", vm.GetState(), vm.GetNodeId(), vm.GetStatus().GetLastError())
	})
	if err != nil {
		for i, h := range g.c.hosts {
			text, _ := os.ReadFile(g.record(i))
			g.c.t.Logf("%s: QEMU %d, record %s", h.Name, g.qemu(i), text)
		}
	}
	require.NoError(g.c.t, err)
	return host
}

// settled waits until the guest answers on its host, and the other host has removed the VM.
func (g *faultyGuest) settled() {
	require.NoError(g.c.t, lab.Until(g.c.context(2*time.Minute), "one host has the guest", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if _, err := g.m.try(ctx, "true"); err != nil {
			return err
		}
		other := 1 - g.m.host
		if _, err := os.Stat(g.record(other)); err == nil || g.qemu(other) != 0 {
			return fmt.Errorf("%s has not removed the VM", g.c.hosts[other].Name)
		}
		return nil
	}))
}

// migrate begins the migration.
func (g *faultyGuest) migrate() {
	_, err := g.c.vms.MigrateVm(g.c.context(time.Minute), &vmv1.MigrateVmRequest{VmId: g.id, DestinationNodeId: g.c.ids[g.target]})
	require.NoError(g.c.t, err)
}

func (g *faultyGuest) await(what string, reached func() bool) {
	g.c.t.Helper()
	ctx := g.c.context(time.Minute)
	for !reached() {
		require.NoError(g.c.t, ctx.Err(), what)
		time.Sleep(2 * time.Millisecond)
	}
}

// suspendAgent suspends the agent of a host until the returned function is called.
func (g *faultyGuest) suspendAgent(host int) (resume func()) {
	name := g.c.hosts[host].Name
	g.c.dir.Signal(name, syscall.SIGSTOP)
	return func() { g.c.dir.Signal(name, syscall.SIGCONT) }
}

func (g *faultyGuest) killAgent(host int) func() {
	require.NoError(g.c.t, g.c.dir.Kill(g.c.hosts[host].Name))
	require.NoError(g.c.t, g.c.hosts[host].Start(""))
	return nil
}

func (g *faultyGuest) killLeader() func() {
	leader := g.c.leader(1)
	require.NoError(g.c.t, g.c.dir.Kill(g.c.trio.Name(leader)))
	require.NoError(g.c.t, g.c.trio.Start(leader))
	return nil
}

// killQEMU kills the guest's QEMU on a host, if it still runs there.
func (g *faultyGuest) killQEMU(host int) func() {
	if pid := g.qemu(host); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return nil
}

// cutLink drops all packets between the two hosts.
func (g *faultyGuest) cutLink() func() {
	require.NoError(g.c.t, g.c.spaces.Cut(1, 2))
	require.NoError(g.c.t, g.c.spaces.Cut(2, 1))
	return func() { require.NoError(g.c.t, g.c.spaces.Heal()) }
}

// record is the path of a host's record of the VM.
func (g *faultyGuest) record(host int) string {
	return filepath.Join(g.c.hosts[host].DataDir(), "records", g.id+".json")
}

func (g *faultyGuest) home(host int) string {
	return filepath.Join(g.c.hosts[host].DataDir(), "vms", g.id)
}

// attempt returns a field of the migrations in a host's record of the VM, or 0.
func (g *faultyGuest) attempt(host int, field string) (n uint64) {
	text, err := os.ReadFile(g.record(host))
	if err != nil {
		return 0
	}
	return number64(text, "migration", field)
}

// paused reports whether a migration has paused the guest on a host.
func (g *faultyGuest) paused(host int) bool {
	_, err := os.Stat(filepath.Join(g.home(host), "migrating"))
	return err == nil
}

// tunnel returns the pid of a host's tunnel process.
func (g *faultyGuest) tunnel(host int) int {
	text, err := os.ReadFile(filepath.Join(g.home(host), "migration", "tunnel.json"))
	require.NoError(g.c.t, err)
	return int(number64(text, "pid"))
}

// qemu returns the pid of the guest's QEMU on a host, or 0.
func (g *faultyGuest) qemu(host int) int { return g.c.hosts[host].Guest(g.id) }

// restore ends all failures that last.
func (g *faultyGuest) restore() {
	for _, h := range g.c.hosts {
		g.c.dir.Signal(h.Name, syscall.SIGCONT)
	}
	require.NoError(g.c.t, g.c.spaces.Heal())
}
