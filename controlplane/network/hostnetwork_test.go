package network

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestHostNetwork stores what hosts report about their networks, and checks which of them can have VMs with NICs.
func TestHostNetwork(t *testing.T) {
	w := newWorld(t)
	good := cloud.HostNetwork{VTEP: netip.MustParseAddr("192.0.2.1"), UnderlayMTU: 1500, External: []string{"internet"}}
	lacking := good
	lacking.Missing = []string{"kernel module vxlan", "nft"}
	w.update(func(tx *store.Tx) error {
		require.NoError(t, SetHostNetwork(tx, "n1", good))
		require.NoError(t, SetHostNetwork(tx, "n2", lacking))
		require.NoError(t, SetHostNetwork(tx, "n3", cloud.HostNetwork{}))
		small := good
		small.UnderlayMTU = 1499
		require.NoError(t, SetHostNetwork(tx, "n5", small))
		encrypting := good
		encrypting.Encrypt, encrypting.UnderlayMTU = true, 1536
		require.NoError(t, SetHostNetwork(tx, "n7", encrypting))
		encrypting.UnderlayMTU = 1537
		require.NoError(t, SetHostNetwork(tx, "n8", encrypting))
		v6 := good
		v6.VTEP = netip.MustParseAddr("fd00::1")
		return SetHostNetwork(tx, "n6", v6)
	})
	require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
		stored, err := HostNetworkOf(v, "n1")
		require.NoError(t, err)
		require.Equal(t, good, *stored)
		for node, shortage := range map[cloud.NodeID]string{
			"n1": "", "n2": "kernel module vxlan, nft", "n3": "the host has reported no underlay address",
			"n4": "the host has not reported its network",
			"n5": "its underlay has an MTU of 1499, and the VPC needs 1500",
			"n6": "its underlay has an MTU of 1500, and the VPC needs 1520",
			"n7": "its underlay has an MTU of 1536, and the VPC needs 1537 with encryption", "n8": "",
		} {
			n, err := HostNetworkOf(v, node)
			require.NoError(t, err)
			require.Equal(t, shortage, n.Shortage(1450), node)
		}
		return nil
	}))

	before := w.store.Revision()
	w.update(func(tx *store.Tx) error { return SetHostNetwork(tx, "n1", good) })
	require.Equal(t, before, w.store.Revision(), "an equal report writes nothing")
	w.update(func(tx *store.Tx) error { DeleteHostNetwork(tx, "n1"); return nil })
	require.Equal(t, 6, w.records()["host-network"])
}
