package ipsec

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPlainVXLANIsDropped checks that a host with encryption accepts no VXLAN packet that is not encrypted, and sends
// none to a host without keys, over IPv4 and IPv6. Other packets pass. After Remove, VXLAN packets pass again.
func TestPlainVXLANIsDropped(t *testing.T) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, v6)
			a, b := l.hosts[0], l.hosts[1]
			atA, atB := a.listen(a.inner), b.listen(b.inner)
			require.True(t, arrives(atA, atB, patience), "the hosts are connected without encryption")

			writes, err := a.ipsec.Protect(t.Context())
			require.NoError(t, err)
			require.Len(t, writes, 2)
			wire := b.capture()
			require.False(t, arrives(atB, atA, time.Second), "a VXLAN packet that is not encrypted arrives")
			wire.read()
			require.NotZero(t, wire.sentBare, "host 2 has sent packets")
			require.False(t, arrives(atA, atB, time.Second), "a VXLAN packet is sent without encryption")
			wire.read()
			require.Zero(t, wire.bare, "host 1 has sent VXLAN packets without encryption")
			underA, underB := a.listen(a.vtep.String()), b.listen(b.vtep.String())
			require.True(t, arrives(underA, underB, patience), "packets to other ports are not affected")
			require.True(t, arrives(underB, underA, patience), "packets to other ports are not affected")

			writes, err = a.ipsec.Protect(t.Context())
			require.NoError(t, err)
			require.Empty(t, writes, "unchanged policies are not written")
			writes, err = Remove(t.Context(), a.path)
			require.NoError(t, err)
			require.Len(t, writes, 2)
			require.True(t, arrives(atB, atA, patience), "encryption is switched off")
			writes, err = Remove(t.Context(), a.path)
			require.NoError(t, err)
			require.Empty(t, writes)
		})
	}
}

// TestPoliciesAreRepaired deletes and changes policies, and checks that one call repairs them and leaves policies of
// other programs alone.
func TestPoliciesAreRepaired(t *testing.T) {
	l := newLab(t, false)
	h := l.hosts[0]
	_, err := h.ipsec.Protect(t.Context())
	require.NoError(t, err)
	_, network, err := net.ParseCIDR("198.51.100.0/24")
	require.NoError(t, err)
	foreign := &netlink.XfrmPolicy{
		Src: network, Dst: network, Dir: netlink.XFRM_DIR_OUT, Tmpls: []netlink.XfrmPolicyTmpl{{
			Src: net.IPv4zero, Dst: net.IPv4zero, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TRANSPORT, Reqid: 7,
		}},
	}
	own := wantedPolicy(out, h.vtep).message()
	h.in(func() error { return netlink.XfrmPolicyAdd(foreign) })
	protect := func() []string {
		t.Helper()
		writes, err := h.ipsec.Protect(t.Context())
		require.NoError(t, err)
		return writes
	}
	require.Empty(t, protect())

	h.in(func() error { return netlink.XfrmPolicyDel(own) })
	require.Equal(t, []string{"add the policy out for VXLAN of 192.0.2.1"}, protect())
	require.Empty(t, protect())

	// This policy has the same selector as the host's policy, and replaces it.
	own.Tmpls[0].Optional = 1
	h.in(func() error { return netlink.XfrmPolicyUpdate(own) })
	require.Equal(t, []string{"replace the policy out for VXLAN of 192.0.2.1"}, protect())
	require.Empty(t, protect())

	// The address of the host changes. VXLAN devices with the former address must not send without encryption either.
	moved, err := New(Options{VTEP: l.hosts[1].vtep, Namespace: h.path})
	require.NoError(t, err)
	defer moved.Close()
	writes, err := moved.Protect(t.Context())
	require.NoError(t, err)
	require.Len(t, writes, 2)
	require.Empty(t, protect(), "the policies for the former address are still there")
	wrong := wantedPolicy(in, h.vtep).message()
	wrong.DstPort++
	h.in(func() error { return netlink.XfrmPolicyAdd(wrong) })
	require.Len(t, protect(), 1, "a policy for another port is deleted")
	writes, err = Remove(t.Context(), h.path)
	require.NoError(t, err)
	require.Len(t, writes, 4)
	h.in(func() error {
		list, err := netlink.XfrmPolicyList(unix.AF_INET)
		require.Len(t, list, 1, "the policy of another program is still there")
		return err
	})
}

// TestMissingFeatures checks that the check names each missing feature once, and leaves nothing in the namespace of the
// caller.
func TestMissingFeatures(t *testing.T) {
	missing, err := MissingFeatures(t.Context())
	require.NoError(t, err)
	for _, m := range missing {
		require.Contains(t, m, "CONFIG_")
	}
	t.Log("missing features:", missing)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = MissingFeatures(canceled)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, nsthread.Do(func() error {
		k, err := openKernel("")
		require.NoError(t, err)
		defer k.close()
		have, err := k.read(t.Context())
		require.Empty(t, have.policies)
		require.Empty(t, have.states)
		return err
	}))
}

// TestWrongPeers checks that wrong peers and wrong addresses cause an error and no change.
func TestWrongPeers(t *testing.T) {
	l := newLab(t, false)
	a, b := l.hosts[0], l.hosts[1]
	right := a.peerOf(b, 5)
	own, v6, reserved, keyless, twice := right, right, right, right, right
	own.VTEP, v6.VTEP = a.vtep, parseAddr("fd99::2")
	reserved.Send.SPI = 255
	keyless.Send.Key = cloud.ESPKey{}
	twice.Receive = append(twice.Receive[:2:2], twice.Receive[1])
	for name, p := range map[string]cloud.EncryptedPeer{
		"own address": own, "IPv6": v6, "reserved SPI": reserved, "no key": keyless, "SPI twice": twice,
	} {
		writes, err := a.ipsec.Set(t.Context(), []cloud.EncryptedPeer{p})
		require.Error(t, err, name)
		require.Empty(t, writes, name)
	}
	_, err := New(Options{})
	require.ErrorContains(t, err, "not the underlay address")
	_, err = New(Options{VTEP: a.vtep, Namespace: "/nowhere"})
	require.ErrorContains(t, err, "/nowhere")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = a.ipsec.Set(canceled, nil)
	require.ErrorIs(t, err, context.Canceled)
	_, err = a.ipsec.Protect(t.Context())
	require.NoError(t, err, "the errors before have changed nothing")
}
