package live

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// checkMigration checks a change of the host or of the migration of a VM. The VM may change its host only to the target
// at the switchover, and back to the source after it.
func (a *witness) checkMigration(before, now *cloud.VM) error {
	if (now.State == cloud.Migrating) != (now.Migration != nil) {
		return fmt.Errorf("VM %s is %s with the migration %+v", now.ID, now.State, now.Migration)
	}
	if before.Node == "" && before.State == cloud.Pending && now.Node != "" {
		a.f.count("VMs placed again")
	}
	m := before.Migration
	switch {
	case m == nil:
		if now.Migration != nil {
			a.f.count("migrations")
		}
		return nil
	case now.Node != m.Source && now.Node != m.Target:
		return fmt.Errorf("VM %s goes from %s to %s in a migration to %s", now.ID, before.Node, now.Node, m.Target)
	case now.Node == m.Target && before.Node == m.Source && (now.Migration == nil || now.Migration.Phase != cloud.MigrationSwitchover):
		return fmt.Errorf("VM %s goes to %s without a switchover", now.ID, now.Node)
	}
	if now.Migration == nil {
		if now.LastMigration.Moved {
			a.f.count("VMs that were migrated")
		} else {
			a.f.count("migrations that were undone")
		}
	}
	return nil
}
