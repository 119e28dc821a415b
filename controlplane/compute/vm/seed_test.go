package vm

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const sshKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ6WxdvRv5Xk3WqvRkZ2m4o5oM2m0p8F1Wq1xJ8mBq2P ada@example.org"

func withMetadata(pairs map[string]string) func(*CreateRequest) {
	return func(q *CreateRequest) { q.Metadata = pairs }
}

// assigned returns the desired state of a VM as its host receives it.
func (w *world) assigned(vm *cloud.VM) (out *agentv1.AssignedVm) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		all, err := w.vms.Assigned(v, vm.Node, vm.ID)
		require.NoError(w.t, err)
		require.Len(w.t, all, 1)
		out = all[0].State
		return nil
	}))
	return out
}

// TestSeed checks that SSH keys and user data reach the VM's host, are not in the VM's record, and are deleted with the
// VM.
func TestSeed(t *testing.T) {
	w := newWorld(t)
	w.AddHost("n1", plenty())
	vm := w.create("web", withMetadata(map[string]string{
		SSHKeys: "# ada's\n" + sshKey + "\n\n", UserData: "#!/bin/sh\necho hello\n", "team": "shop",
	}))
	require.Equal(t, map[string]string{"team": "shop"}, vm.Metadata)
	seed := w.assigned(vm).GetSeed()
	require.Equal(t, "web", seed.GetHostName())
	require.Equal(t, []string{sshKey}, seed.GetSshKeys())
	require.Equal(t, "#!/bin/sh\necho hello\n", string(seed.GetUserData()))

	_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, true, [32]byte{})
	require.NoError(t, err)
	w.update(func(tx *store.Tx) {
		left, err := seeds.Has(tx, string(vm.ID))
		require.NoError(t, err)
		require.False(t, left)
	})

	plain := w.create("plain", withMetadata(map[string]string{SSHKeys: "", UserData: ""}))
	require.Nil(t, w.assigned(plain).GetSeed(), "a VM without keys and user data has no seed")
}

// TestSeedNICs checks that the seed has the network configuration of the VM's interfaces. A VM without keys gets a seed
// if one of its subnets has no DHCP, and its host gets the current configuration of the subnet.
func TestSeedNICs(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	vpc, err := w.networks.CreateVPC(w.as(acme, ""), acme, network.VPCRequest{
		CIDR: netip.MustParsePrefix("10.1.0.0/16"), CIDR6: netip.MustParsePrefix("fd12::/48")}, [32]byte{})
	require.NoError(t, err)
	subnet, err := w.networks.CreateSubnet(w.as(acme, ""), acme, network.SubnetRequest{
		VPC: vpc.Value.ID, CIDR: netip.MustParsePrefix("10.1.0.0/24"), CIDR6: netip.MustParsePrefix("fd12:0:0:1::/64"), DHCP: true}, [32]byte{})
	require.NoError(t, err)
	vm := w.create("web", withNICs(cloud.NIC{ID: "nic0", SubnetID: string(subnet.Value.ID)}))
	require.Nil(t, w.assigned(vm).GetSeed(), "DHCP configures the interface")

	servers := []netip.Addr{netip.MustParseAddr("192.0.2.53")}
	_, err = w.networks.UpdateSubnet(w.as(acme, ""), acme, network.SubnetUpdate{ID: subnet.Value.ID, DHCP: new(bool)}, [32]byte{1})
	require.NoError(t, err)
	want := &agentv1.AssignedSeedNic{
		NicId: "nic0", Addresses: []string{"10.1.0.2/24", vm.Spec.Network[0].IP6 + "/64"}, Gateways: []string{"10.1.0.1", "fd12:0:0:1::1"},
		DnsServers: []string{"10.1.0.1", "fd12:0:0:1::1"}, Domain: string(acme.Project) + ".internal", Mtu: 1450,
	}
	seed := w.assigned(vm).GetSeed()
	require.Equal(t, "web", seed.GetHostName())
	require.Len(t, seed.GetNics(), 1)
	require.Equal(t, want.String(), seed.GetNics()[0].String())

	_, err = w.networks.UpdateSubnet(w.as(acme, ""), acme, network.SubnetUpdate{ID: subnet.Value.ID, DNS: &servers}, [32]byte{2})
	require.NoError(t, err)
	want.DnsServers = []string{"192.0.2.53"}
	require.Equal(t, want.String(), w.assigned(vm).GetSeed().GetNics()[0].String())
}

// TestBadSeed checks that malformed keys and user data are refused, and that they cannot be changed.
func TestBadSeed(t *testing.T) {
	w := newWorld(t)
	w.AddHost("n1", plenty())
	for _, c := range []struct{ key, value, want string }{
		{SSHKeys, "not a key", "trivet/ssh-keys"},
		{SSHKeys, strings.Repeat(sshKey+"\n", cloudinit.MaxSSHKeys/len(sshKey)+1), "at most 65536 bytes"},
		{UserData, "#!\n", "names no interpreter"},
		{UserData, strings.Repeat("x", cloudinit.MaxUserData+1), "65536"},
	} {
		q := CreateRequest{Name: "bad", Spec: cloud.Spec{}, Metadata: map[string]string{c.key: c.value}}
		_, err := w.vms.Create(w.as(acme, ""), acme, q, [32]byte{})
		require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
		require.ErrorContains(t, err, c.want)
	}
	vm := w.create("web")
	_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: map[string]string{UserData: "#!/bin/sh\n"}})
	require.ErrorContains(t, err, "trivet/user-data is fixed when a VM is created")
}
