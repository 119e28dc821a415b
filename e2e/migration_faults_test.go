package e2e

import (
	"slices"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
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
	endTime = 5 * time.Minute
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
	// The members roll the migration back when the lease of the target has ended. The source then has 60 s.
	{name: targetQuorum, strike: (*faultyGuest).cutTarget, bound: lostTime + 60*time.Second},
}

// targetQuorum is the name of the failure that cuts the target off from the members.
const targetQuorum = "target quorum"

// cell is one failure at one point of a migration.
type cell struct {
	fault migrationFault
	point migrationPoint
}

// cells returns all cells of the matrix.
func cells() (all []cell) {
	for _, f := range migrationFaults {
		for _, p := range migrationPoints {
			if !slices.Contains(f.never, p.name) && (p.only == "" || p.only == f.name) {
				all = append(all, cell{f, p})
			}
		}
	}
	return all
}

// cellOf returns the cell with this failure and this point.
func cellOf(fault, point string) cell {
	all := cells()
	return all[slices.IndexFunc(all, func(c cell) bool { return c.fault.name == fault && c.point.name == point })]
}

func (c cell) String() string { return c.fault.name + " at " + c.point.name }

// mayComeBack reports whether the guest may run on the target, and then on the source again. At the point commit, the
// agent of the target may have received the switchover before it was cut off.
func (c cell) mayComeBack() bool {
	return c.fault.name == targetQuorum && slices.Contains([]string{"commit", "arrive"}, c.point.name)
}

// strike moves the guest to the other host with the failure of the cell x. Exactly one host must run the guest at each
// time, the guest must keep each write that its disk has acknowledged, and the migration must end without an operator.
func (g *faultyGuest) strike(x cell) { require.NoError(g.c.t, g.tryStrike(x)) }

// tryStrike is strike, but returns what the witness has noticed.
func (g *faultyGuest) tryStrike(x cell) error {
	t := g.c.t
	for _, id := range g.c.ids { // The fault of the previous cell (fault and point) may have made a host NOT_READY.
		g.c.awaitState(g.c.context(time.Minute), id, vmv1.NodeState_NODE_STATE_READY)
	}
	g.source, g.target = g.m.host, 1-g.m.host
	g.witness = g.watch()
	defer g.witness.stop()
	defer g.restore()
	resume := x.point.reach(g)
	heal := x.fault.strike(g)
	began := time.Now()
	resume()
	node := g.ended(x.fault.bound + endTime)
	took := time.Since(began)
	t.Logf("%v: the migration has ended after %v, %v after its time-outs; the VM is on %s", x, took.Round(time.Millisecond),
		max(0, took-x.fault.bound).Round(time.Millisecond), g.c.hosts[node].Name)
	if heal != nil {
		heal()
	}
	g.m.host = node
	g.settled()
	return g.witness.check(x, node)
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

// cutTarget drops all packets between the target and the members at least until the target's lease has ended.
func (g *faultyGuest) cutTarget() func() {
	host := g.c.hosts[g.target]
	heal := g.c.cutControlPlane(g.target)
	return func() {
		require.NoError(g.c.t, g.c.lease(g.c.context(5*time.Minute), host, func(seconds float64) bool { return seconds == 0 }))
		heal()
	}
}
