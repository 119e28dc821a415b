//go:build mutant

package drain

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of this package, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ShutDownMovable, TestForceWaits, "shut down before the others have moved")
	mutanttest.Notices(t, mutant.ShutDownObstructed, TestForceSparesObstructed, "only the VM that nothing helps may be shut down")
	mutanttest.Notices(t, mutant.CreatingIsOff, TestActivityOf, "is CREATING and stays on this host")
	mutanttest.Notices(t, mutant.MaintenanceEarly, TestEmpty, "a host with a VM that may run is not empty")
}
