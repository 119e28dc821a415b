package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRename checks that a rename changes the VM, its name in DNS and its host name, that the old name is free
// afterwards, and that a refused rename changes nothing.
func TestRename(t *testing.T) {
	w := newWorld(t)
	w.networkHost("n1")
	vm := w.create("web", withNICs(cloud.NIC{ID: "nic0"}), withMetadata(map[string]string{SSHKeys: sshKey}))
	port := vm.Spec.Network[0].PortID
	binding := w.port(port).BindingGeneration
	other := w.create("db")
	records := w.records()

	renamed, err := w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
	require.NoError(t, err)
	require.Equal(t, "shop", renamed.Name)
	require.Equal(t, "shop", w.port(port).HostName)
	require.Equal(t, binding, w.port(port).BindingGeneration, "the host does not bind the port again")
	require.Equal(t, "shop", w.assigned(&renamed).GetSeed().GetHostName())
	require.Greater(t, renamed.Generation, vm.Generation, "the host receives the name")
	require.Equal(t, records, w.records(), "no record is left behind")

	again, err := w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
	require.NoError(t, err)
	require.Equal(t, renamed, again, "a repeat changes nothing")

	for _, tc := range []struct {
		vm   cloud.VMID
		name string
		kind fault.Kind
	}{
		{other.ID, "shop", fault.AlreadyExists},
		{other.ID, "Not a name", fault.InvalidArgument},
		{other.ID, "", fault.InvalidArgument},
		{"web", "new", fault.InvalidArgument},
		{"00000000-0000-7000-8000-00000000dead", "new", fault.NotFound},
	} {
		_, err := w.vms.Rename(w.as(acme, ""), acme, tc.vm, tc.name)
		require.True(t, fault.Is(err, tc.kind), "%s: %v", tc.name, err)
	}
	require.Equal(t, records, w.records())

	w.create("web") // the old name is free
	_, err = w.vms.Rename(w.as(acme, ""), acme, other.ID, "web")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
}

// TestRenameMigrating checks that a VM is not renamed while it is migrated.
func TestRenameMigrating(t *testing.T) {
	w := newWorld(t)
	w.migrationHost("n1")
	b := w.migrationHost("n2")
	id := w.runs("web")
	w.migrate(id, b)
	_, err := w.vms.Rename(w.as(acme, ""), acme, id, "shop")
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "cannot rename VM web: it is MIGRATING")
}
