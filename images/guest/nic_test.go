package guest

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseNIC(t *testing.T) {
	n, err := ParseNIC("\r[1.2] noise TRIVET GUEST NIC name=eth1 mac=02:00:5e:10:00:01 addr=10.0.0.5/24 gw=10.0.0.1 host=web mtu=1450\r\n")
	require.NoError(t, err)
	require.Equal(t, NIC{Name: "eth1", MAC: "02:00:5e:10:00:01", Address: netip.MustParsePrefix("10.0.0.5/24"),
		Gateway: netip.MustParseAddr("10.0.0.1"), Host: "web", MTU: 1450}, n)
	n, err = ParseNIC("TRIVET GUEST NIC name=eth0 mac=02:00:5e:10:00:01 addr=10.0.0.5/24 gw= host= mtu=1450")
	require.NoError(t, err)
	require.False(t, n.Gateway.IsValid())
	n, err = ParseNIC6("TRIVET GUEST NIC6 name=eth0 mac=02:00:5e:10:00:01 addr=fd12::a/128 gw=fe80::5eff:fe00:1 mtu=1430")
	require.NoError(t, err)
	require.Equal(t, NIC{Name: "eth0", MAC: "02:00:5e:10:00:01", Address: netip.MustParsePrefix("fd12::a/128"),
		Gateway: netip.MustParseAddr("fe80::5eff:fe00:1"), MTU: 1430}, n)
	_, err = ParseNIC6("TRIVET GUEST NIC name=eth0 mac=02:00:5e:10:00:01 addr=10.0.0.5/24 gw= host= mtu=1450")
	require.ErrorIs(t, err, ErrNotNIC)
	for _, line := range []string{"", "TRIVET GUEST NIC name=eth0 removed", "TRIVET GUEST READY boot_id=x",
		"TRIVET GUEST NIC name=eth0 mac=x addr=10.0.0.5/24 gw= host= mtu=1450"} {
		_, err := ParseNIC(line)
		require.ErrorIs(t, err, ErrNotNIC, line)
	}
}

// TestGuestNetwork boots the guest with an interface on QEMU's user network, which has a DHCP server. The guest gets its
// address and name, and serves its name over HTTP. QEMU's router advertises a prefix for autonomous configuration and no
// DHCPv6, so the guest derives an IPv6 address from its MAC address. An interface that is added later gets an address
// too, until it is removed.
func TestGuestNetwork(t *testing.T) {
	img := build(t)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := free.Addr().(*net.TCPAddr).Port
	require.NoError(t, free.Close())
	m := start(t, append(img.direct(), "-machine", "q35", "-device", "pcie-root-port,id=late,chassis=1",
		"-netdev", fmt.Sprintf("user,id=n0,net=10.9.0.0/24,ipv6-net=fd09::/64,hostname=web,hostfwd=tcp:127.0.0.1:%d-:80", port),
		"-device", "virtio-net-pci,netdev=n0,mac=02:00:5e:10:00:01,romfile=",
		"-netdev", "user,id=n1,net=10.9.1.0/24")...)
	m.ready()
	n, err := ParseNIC(Prefix + "NIC " + m.hear("NIC"))
	require.NoError(t, err)
	require.Equal(t, NIC{Name: "eth0", MAC: "02:00:5e:10:00:01", Address: netip.MustParsePrefix("10.9.0.15/24"),
		Gateway: netip.MustParseAddr("10.9.0.2"), Host: "web", MTU: 1500}, n)
	n, err = ParseNIC6(Prefix + "NIC6 " + m.hear("NIC6"))
	require.NoError(t, err)
	require.Equal(t, netip.MustParsePrefix("fd09::5eff:fe10:1/64"), n.Address)
	require.True(t, n.Gateway.IsLinkLocalUnicast(), n.Gateway)
	client := http.Client{Timeout: 5 * time.Second}
	require.Eventually(t, func() bool {
		reply, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
		if err != nil {
			return false
		}
		defer reply.Body.Close()
		body, err := io.ReadAll(reply.Body)
		return err == nil && strings.TrimSpace(string(body)) == "web"
	}, time.Minute, 50*time.Millisecond, "the guest serves its name")

	reply, err := client.Post(fmt.Sprintf("http://127.0.0.1:%d/cgi-bin/run", port), "text/plain", strings.NewReader("uname; cat /nowhere; exit 3\n"))
	require.NoError(t, err)
	defer reply.Body.Close()
	said, err := io.ReadAll(reply.Body)
	require.NoError(t, err)
	require.Equal(t, "Linux\ncat: can't open '/nowhere': No such file or directory\nrc=3\n", string(said))
	require.Equal(t, "web", m.ask(`run printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 5 10.9.0.15 80 | tail -n 1`, "OUT"))

	m.do("device_add", map[string]any{"driver": "virtio-net-pci", "netdev": "n1", "id": "late-nic", "bus": "late", "romfile": ""})
	n, err = ParseNIC(Prefix + "NIC " + m.hear("NIC"))
	require.NoError(t, err)
	require.Equal(t, "eth1", n.Name)
	require.Equal(t, netip.MustParsePrefix("10.9.1.15/24"), n.Address)
	m.do("device_del", map[string]any{"id": "late-nic"})
	require.Equal(t, "name=eth1 removed", m.hear("NIC"))
	m.event("DEVICE_DELETED")
	require.Zero(t, m.count("ERROR"))
}
