package convert

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestEncryptionFrom checks the conversion of keys, and that errors about invalid keys do not contain the keys.
func TestEncryptionFrom(t *testing.T) {
	key := bytes.Repeat([]byte("K"), len(cloud.ESPKey{}))
	state := &agentv1.EspState{Spi: 300, Key: key}
	convert := func(p ...*agentv1.EncryptedPeer) (cloud.NetworkUpdate, error) {
		var u cloud.NetworkUpdate
		err := AddNetworkUpdate(&u, &agentv1.SyncNetworksResponse{Encryption: &agentv1.HostEncryption{Peers: p}})
		return u, err
	}
	u, err := convert(&agentv1.EncryptedPeer{Vtep: "192.0.2.2", Send: state, Receive: []*agentv1.EspState{state, state}})
	require.NoError(t, err)
	want := cloud.ESPState{SPI: 300, Key: cloud.ESPKey(key)}
	require.Equal(t, []cloud.EncryptedPeer{
		{VTEP: netip.MustParseAddr("192.0.2.2"), Send: want, Receive: []cloud.ESPState{want, want}},
	}, u.Encryption)
	u, err = convert()
	require.NoError(t, err)
	require.NotNil(t, u.Encryption, "no peers are not the same as no change")
	require.NoError(t, AddNetworkUpdate(&cloud.NetworkUpdate{}, &agentv1.SyncNetworksResponse{}))

	for name, p := range map[string]*agentv1.EncryptedPeer{
		"no address":   {Send: state},
		"no state":     {Vtep: "192.0.2.2"},
		"reserved SPI": {Vtep: "192.0.2.2", Send: &agentv1.EspState{Spi: 255, Key: key}},
		"short key":    {Vtep: "192.0.2.2", Send: state, Receive: []*agentv1.EspState{{Spi: 300, Key: key[1:]}}},
	} {
		u, err := convert(p)
		require.Error(t, err, name)
		require.NotContains(t, err.Error(), "KKK", name)
		require.Empty(t, u.Encryption, name)
	}
}
