package vm

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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
