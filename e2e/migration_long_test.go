//go:build long

package e2e

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// roundsEnv is the variable with the number of times that the tests TestMigrationFaults run each cell.
const roundsEnv = "TRIVET_MIGRATION_ROUNDS"

// restartLimit is cloud.RestartLimit: the control plane restarts a guest so often within ten minutes.
const restartLimit = 3

// TestMigrationFaults runs the matrix of all failures at all points of a migration of a VM with a local disk, as often as
// roundsEnv says, by default once. TestMigration runs a few cells of the matrix.
func TestMigrationFaults(t *testing.T) { newNetworkCloud(t, 2).runCells(localDisk) }

// TestMigrationFaultsShared runs the matrix for a VM whose disk is a volume in a shared storage pool.
func TestMigrationFaultsShared(t *testing.T) {
	c, disk := newSharedPoolCloud(t)
	c.runCells(disk)
}

// TestMigrationFaultsCeph runs the matrix for a VM whose disk is an RBD volume.
func TestMigrationFaultsCeph(t *testing.T) {
	c, disk := newCephCloud(t)
	c.runCells(disk)
}

// runCells runs all cells of the matrix with one guest after the other.
func (c *networkCloud) runCells(disk migrationDisk) {
	rounds := int(number(c.t, roundsEnv, 1))
	_, subnets := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24")
	guests, ran, failures, deaths := 0, 0, 0, 0
	var g *faultyGuest
	replace := func() {
		if g != nil {
			_, err := c.vms.DeleteVm(c.context(time.Minute), &vmv1.DeleteVmRequest{VmId: g.id, Force: true})
			require.NoError(c.t, err)
		}
		guests, deaths = guests+1, 0
		g = c.newFaultyGuest(fmt.Sprintf("guest-%d", guests), subnets[0], disk)
	}
	for round := range rounds {
		for _, x := range cells() {
			ok := true // also for a cell that the flag -run excludes
			c.run(fmt.Sprintf("%d/%v", round+1, x), func(*testing.T) {
				ran, ok = ran+1, false
				if g == nil || x.dies() && deaths == restartLimit { // A guest that dies more often within ten minutes stays in ERROR.
					replace()
				}
				if x.dies() {
					deaths++
				}
				g.strike(x)
				ok = true
			})
			if !ok { // The other cells get another guest.
				failures++
				if g != nil {
					replace()
				}
			}
		}
	}
	c.t.Logf("%d of %d cells failed", failures, ran)
}

// TestMigrationWitness shows that the witness of the matrix notices each of these faults of the hosts.
func TestMigrationWitness(t *testing.T) {
	agent := faultyAgent(t)
	c, shared := newSharedPoolCloud(t)
	_, subnets := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24")
	for i, one := range []struct {
		mutant, fault, point string
		disk                 migrationDisk
		notices              string
	}{
		{mutant.RunHandedOver, targetQuorum, "arrive", localDisk, "ran on the hosts|counted"},
		{mutant.CopyNewWritesOnly, "leader", "transfer", localDisk, "the disk has lost"},
		{mutant.TakeBackActivated, targetQuorum, "arrive", shared, "continued from an old memory"},
	} {
		c.run(one.mutant, func(t *testing.T) {
			for _, h := range c.hosts {
				h.Bin.NodeAgent, h.Env = agent, []string{"TRIVET_MUTANT=" + one.mutant}
				require.NoError(t, c.dir.Stop(h.Name, 12*time.Second))
				require.NoError(t, h.Start(""))
				require.NoError(t, h.Healthy(c.context(time.Minute)))
			}
			g := c.newFaultyGuest(fmt.Sprintf("guest-%d", i), subnets[0], one.disk)
			err := g.tryStrike(cellOf(one.fault, one.point))
			require.Error(t, err)
			require.Regexp(t, one.notices, err.Error())
			t.Log(err)
			_, err = c.vms.DeleteVm(c.context(time.Minute), &vmv1.DeleteVmRequest{VmId: g.id, Force: true})
			require.NoError(t, err)
		})
	}
}

// faultyAgent builds the agent with the tag mutant, and returns its path.
func faultyAgent(t *testing.T) string {
	t.Helper()
	path := lab.Mutant(binaries(t).NodeAgent)
	out, err := exec.Command("go", "build", "-trimpath", "-tags", "mutant", "-o", path, "../nodeagent").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// dies reports whether the guest may end in this cell.
func (c cell) dies() bool {
	return strings.HasSuffix(c.fault.name, "QEMU") || c.mayComeBack() || c.fault.name == targetQuorum && c.point.name == "release"
}
