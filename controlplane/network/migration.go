package network

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MigrateNICs sets the hosts of the ports of all NICs of a VM during a live migration. Packets for the ports are sent
// to the host node. The host other, if not empty, also creates the ports' devices (cloud.Port.MigrationNode). If node
// is a new host for a port, MigrateNICs calls BindNIC.
func MigrateNICs(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, node, other cloud.NodeID, hostName string) error {
	all, err := nicPorts(tx, t, vm)
	if err != nil {
		return err
	}
	for _, port := range all {
		changed := port.MigrationNode != other
		port.MigrationNode = other
		switch {
		case port.Node != node:
			if err := BindNIC(tx, port, node, hostName); err != nil {
				return err
			}
		case changed:
			port.UpdatedAt = tx.Now()
			ports.Put(tx, port, string(port.Project), string(port.ID))
		}
	}
	return nil
}
