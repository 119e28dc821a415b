package vpc

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// storedID is the ID of a VPC, a UUID as all IDs of the control plane: only such VPCs are stored.
const storedID = "0190a6b2-0000-7000-8000-00000000000a"

// storedFile is the file of the VPC storedID.
func (h *labHost) storedFile() string { return filepath.Join(h.dir, storedID+storedSuffix) }

// TestServersWithoutControlPlane requires that a restarted agent answers DHCP, DNS and metadata before the control
// plane has sent anything, that it programs nothing meanwhile, and that the first snapshot replaces what was stored.
func TestServersWithoutControlPlane(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	records := strings.ReplaceAll(shop, "shop", storedID)
	h.snapshot(1, records)
	front := h.endpoint("p5")
	requireServers(l, front)
	before := l.state(h, storedID)

	t.Log("the agent restarts, and the control plane is not reachable")
	h.stop()
	info, err := os.Stat(h.storedFile())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	l.run("ip", "netns", "exec", l.prefix+h.vpcName(storedID), "iptables-nft", "-A", "OUTPUT", "-j", "ACCEPT")
	changed := l.state(h, storedID)
	require.NotEqual(t, before, changed)
	// The sockets of the DHCP server join the group of all DHCPv6 servers, ff02::1:2.
	joined := "33:33:00:01:00:02 dev br101 self permanent\n"
	require.NotContains(t, changed, joined)
	h.start()
	requireServers(l, front)
	require.Zero(t, h.Counts().Writes)
	require.Equal(t, changed, strings.Replace(l.state(h, storedID), joined, "", 1), "the file must program nothing")
	require.Empty(t, h.Status())
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = h.OpenTap(short, "p6")
	require.ErrorContains(t, err, "has not sent the networks")

	t.Log("changes without a snapshot have no effect, and the snapshot replaces what was stored")
	h.Apply(cloud.NetworkUpdate{Node: h.node, Stream: h.stream, Revision: 2, Deleted: []string{storedID}})
	requireServers(l, front)
	h.snapshot(3, strings.ReplaceAll(records, "port p5 vpc="+storedID+" subnet=s1 at=10.0.1.5", "port p5 vpc="+storedID+" subnet=s1 at=10.0.1.9"))
	h.Networks.mu.RLock()
	require.Empty(t, h.restored)
	h.Networks.mu.RUnlock()
	require.Nil(t, l.offer(front, 2*time.Second), "no port of the subnet has the former MAC address")

	t.Log("a VPC that the first snapshot does not name is removed, with its file")
	h.snapshot(4, records)
	h.stop()
	require.FileExists(t, h.storedFile())
	h.start()
	requireServers(l, front)
	h.snapshot(5, "")
	require.NoFileExists(t, l.path(h.vpcName(storedID)))
	require.Eventually(t, func() bool { _, err := os.Stat(h.storedFile()); return os.IsNotExist(err) }, wait, time.Millisecond)
}

// offer returns the address that a DHCP server offers to an endpoint, or nil if none answers within the time.
func (l *lab) offer(from string, within time.Duration) *netip.Addr {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), within)
	defer cancel()
	var client *nclient4.Client
	require.NoError(l, l.in(from, func() (err error) {
		client, err = nclient4.New("eth0")
		return err
	}))
	defer client.Close()
	offer, err := client.DiscoverOffer(ctx)
	if err != nil {
		return nil
	}
	a, _ := netip.AddrFromSlice(offer.YourIPAddr.To4())
	return &a
}

// TestWrongStoredVPC requires that a file that is damaged, belongs to another VPC, or to a VPC without a namespace,
// does not keep the agent from starting, and that the next state replaces it.
func TestWrongStoredVPC(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	records := strings.ReplaceAll(shop, "shop", storedID)
	h.snapshot(1, records)
	h.stop()
	gone := filepath.Join(h.dir, "0190a6b2-0000-7000-8000-00000000000b"+storedSuffix)
	require.NoError(t, os.WriteFile(gone, []byte("{}"), 0o600))
	good, err := os.ReadFile(h.storedFile())
	require.NoError(t, err)
	for _, content := range []string{"{", strings.Replace(string(good), storedID, "other", 1)} {
		require.NoError(t, os.WriteFile(h.storedFile(), []byte(content), 0o600))
		h.start()
		require.Empty(t, h.restored)
		require.Contains(t, h.log.String(), "a stored VPC has no DHCP")
		require.NoFileExists(t, gone)
		h.stop()
	}
	h.start()
	h.snapshot(2, records)
	h.stop()
	again, err := os.ReadFile(h.storedFile())
	require.NoError(t, err)
	require.Equal(t, string(good), string(again))
}

// TestServedPart requires that the stored part of a VPC has no forwarding state, which would be out of date after a
// restart.
func TestServedPart(t *testing.T) {
	v := cloud.HostVPC{
		ID: "v", MTU: 1450, CIDR: netip.MustParsePrefix("10.0.0.0/16"), LooseTCP: true,
		Subnets: []cloud.HostSubnet{{
			ID: "s", Ports: []cloud.HostPort{{ID: "p", HostName: "web"}}, Routes: []cloud.HostRoute{{Peering: "x"}},
		}},
		Groups: []cloud.HostGroup{{ID: "g"}}, Members: []cloud.GroupMembers{{ID: "g"}}, Denied: []netip.Addr{{}},
		NAT: &cloud.HostNAT{}, Gateways: []cloud.HostGateway{{}}, Floating: []cloud.HostFloating{{}},
		Peerings: []cloud.HostPeering{{ID: "x"}},
		Services: []cloud.HostService{{
			ID: "api", Name: "api", Address: netip.MustParseAddr("10.0.0.9"), Backends: []cloud.HostBackend{{Healthy: true}},
		}},
	}
	require.Equal(t, cloud.HostVPC{
		ID: "v", MTU: 1450, CIDR: v.CIDR,
		Subnets:  []cloud.HostSubnet{{ID: "s", Ports: v.Subnets[0].Ports}},
		Services: []cloud.HostService{{ID: "api", Name: "api", Address: v.Services[0].Address}},
	}, servedPart(&v))
	require.NotEmpty(t, v.Subnets[0].Routes, "the VPC in force is not changed")
}
