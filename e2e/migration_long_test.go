//go:build long

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// roundsEnv is the variable with the number of times that TestMigrationFaults runs each cell.
const roundsEnv = "TRIVET_MIGRATION_ROUNDS"

// restartLimit is cloud.RestartLimit: the control plane restarts a guest so often within ten minutes.
const restartLimit = 3

// TestMigrationFaults runs the matrix of all failures at all points of a migration, as often as roundsEnv says, by
// default once. TestMigration runs a few cells of the matrix.
func TestMigrationFaults(t *testing.T) {
	rounds := int(number(t, roundsEnv, 1))
	c := newNetworkCloud(t, 2)
	_, subnets := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24")
	g := c.newFaultyGuest("guest", subnets[0], 0)
	guests, cells, failures, deaths := 1, 0, 0, 0
	replace := func() {
		_, err := c.vms.DeleteVm(c.context(time.Minute), &vmv1.DeleteVmRequest{VmId: g.id, Force: true})
		require.NoError(t, err)
		guests, deaths = guests+1, 0
		g = c.newFaultyGuest(fmt.Sprintf("guest-%d", guests), subnets[0], 0)
	}
	for round := range rounds {
		for _, f := range migrationFaults {
			for _, p := range migrationPoints {
				if slices.Contains(f.never, p.name) {
					continue
				}
				ok := true // also for a cell that the flag -run excludes
				c.run(fmt.Sprintf("%d/%s at %s", round+1, f.name, p.name), func(*testing.T) {
					cells, ok = cells+1, false
					if strings.HasSuffix(f.name, "QEMU") {
						if deaths == restartLimit { // A guest that dies more often within ten minutes stays in ERROR.
							replace()
						}
						deaths++
					}
					g.strike(f, p)
					ok = true
				})
				if !ok { // The other cells get another guest.
					failures++
					replace()
				}
			}
		}
	}
	t.Logf("%d of %d cells failed", failures, cells)
}
