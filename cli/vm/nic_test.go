package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func TestNICs(t *testing.T) {
	for text, want := range map[string]nic{
		"front":             {id: "nic3", subnet: "front"},
		"default":           {id: "nic3"},
		"vpc:prod":          {id: "nic3", vpc: "prod"},
		"port:web-1,id=wan": {id: "wan", port: "web-1", named: true},
		"front,ip=10.0.1.10,mac=02:00:5e:10:00:01,group=web,group=ssh,model=e1000": {
			id: "nic3", subnet: "front", ip: "10.0.1.10", mac: "02:00:5e:10:00:01", groups: []string{"web", "ssh"}, model: "e1000",
		},
	} {
		got, err := parseNIC(3, text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, text := range []string{
		"", ",", "front,", "front,ip", "front,ip=", "front,ip=ten", "front,ip=10.0.1.1,ip=10.0.1.2", "front,mac=x", "front,mac=01:00:5e:10:00:01",
		"front,group=", "front,model=ne2k", "front,id=", "front,subnet=x", "port:", "vm:web", "port:a,ip=10.0.1.1", "port:a,group=web",
	} {
		_, err := parseNIC(0, text)
		require.ErrorContains(t, err, "--network", text)
	}
	absent, err := parseNICs(nil)
	require.NoError(t, err)
	require.Equal(t, []nic{{id: "nic0"}}, absent, "without --network, a NIC in the default VPC")
	none, err := parseNICs([]string{"none"})
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = parseNICs([]string{"front", "none"})
	require.ErrorContains(t, err, "cannot be combined")
}

func TestFreeNICID(t *testing.T) {
	require.Equal(t, "nic0", freeNICID(nil))
	require.Equal(t, "nic1", freeNICID([]*vmv1.NetworkSpec{{Id: "nic2"}, {Id: "nic0"}}))
}
