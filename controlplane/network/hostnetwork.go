package network

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostNetworks has what each host offers to VPCs, at net-host-network/<node>.
var hostNetworks = store.NewTable[cloud.HostNetwork]("net-host-network")

// SetHostNetwork stores what a host offers to VPCs. It writes nothing if the stored value is equal.
func SetHostNetwork(tx *store.Tx, node cloud.NodeID, n cloud.HostNetwork) error {
	stored, err := hostNetworks.Get(tx, string(node))
	if err != nil {
		return err
	}
	if stored != nil && stored.VTEP == n.VTEP && stored.UnderlayMTU == n.UnderlayMTU &&
		slices.Equal(stored.External, n.External) && slices.Equal(stored.Missing, n.Missing) {
		return nil
	}
	hostNetworks.Put(tx, &n, string(node))
	return nil
}

// HostNetworkOf returns what a host offers to VPCs, or nil if its agent has not reported it.
func HostNetworkOf(v store.Reader, node cloud.NodeID) (*cloud.HostNetwork, error) {
	return hostNetworks.Get(v, string(node))
}

// DeleteHostNetwork deletes what a host offered to VPCs. It is called when the host is removed from the cluster.
func DeleteHostNetwork(tx *store.Tx, node cloud.NodeID) { hostNetworks.Delete(tx, string(node)) }
