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
	vm := w.create("web", withNICs(cloud.NIC{ID: "nic0"}, cloud.NIC{ID: "nic1"}), withMetadata(map[string]string{SSHKeys: sshKey}))
	ports := [2]string{vm.Spec.Network[0].PortID, vm.Spec.Network[1].PortID}
	bindings := [2]uint64{w.port(ports[0]).BindingGeneration, w.port(ports[1]).BindingGeneration}
	db := w.create("db")
	foreign, err := w.vms.Create(w.as(other, ""), other, small("web"), [32]byte{})
	require.NoError(t, err)
	records := w.records()

	renamed, err := w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
	require.NoError(t, err)
	require.Equal(t, "shop", renamed.Name)
	for i, port := range ports {
		require.Equal(t, "shop", w.port(port).HostName, "NIC %d", i)
		require.Equal(t, bindings[i], w.port(port).BindingGeneration, "the host does not bind the port of NIC %d again", i)
	}
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
		{db.ID, "shop", fault.AlreadyExists},
		{db.ID, "Not a name", fault.InvalidArgument},
		{db.ID, "", fault.InvalidArgument},
		{"web", "new", fault.InvalidArgument},
		{"00000000-0000-7000-8000-00000000dead", "new", fault.NotFound},
		{foreign.VM.ID, "new", fault.NotFound},
	} {
		_, err := w.vms.Rename(w.as(acme, ""), acme, tc.vm, tc.name)
		require.True(t, fault.Is(err, tc.kind), "%s: %v", tc.name, err)
	}
	require.Equal(t, records, w.records())

	_, err = w.vms.Rename(w.as(other, ""), other, vm.ID, "new")
	require.True(t, fault.Is(err, fault.NotFound), "the VM of another tenant: %v", err)
	require.Equal(t, "shop", w.get(vm.ID).Name)

	w.create("web") // the old name is free
	_, err = w.vms.Rename(w.as(acme, ""), acme, db.ID, "web")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
}

// TestRenameMigrating checks that a VM is not renamed while it is migrated.
func TestRenameMigrating(t *testing.T) {
	w := newWorld(t)
	a, b := w.migrationHost("n1"), w.migrationHost("n2")
	id := w.runs("web")
	if w.get(id).Node == b {
		a, b = b, a
	}
	require.Equal(t, a, w.get(id).Node)
	w.migrate(id, b)
	_, err := w.vms.Rename(w.as(acme, ""), acme, id, "shop")
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "cannot rename VM web: it is MIGRATING")
}

// TestRenameInEachState checks that a VM in each other state gets the name, and that its state and its host do not change.
func TestRenameInEachState(t *testing.T) {
	for _, state := range []cloud.State{cloud.Creating, cloud.Stopped, cloud.Starting, cloud.Running, cloud.Stopping, cloud.Error, cloud.Failed} {
		w := newWorld(t)
		w.AddHost("n1", plenty())
		vm := w.createInState(state, "web")
		renamed, err := w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
		require.NoError(t, err, state)
		require.Equal(t, []any{"shop", state, vm.Node}, []any{renamed.Name, renamed.State, renamed.Node})
		require.Equal(t, renamed, *w.get(vm.ID))
	}
}

// TestRenamePending checks that a VM that waits for a host is placed under its new name.
func TestRenamePending(t *testing.T) {
	w := newWorld(t)
	w.sharedHost("n1", 1024)
	vm := w.running("web")
	next := w.sharedHost("n2", 256)
	w.lose(next)
	w.recover()
	w.flush(vm.Spec.Volumes()[0])
	w.recover()
	require.Equal(t, cloud.Pending, w.get(vm.ID).State, "the other host has too little memory")
	renamed, err := w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
	require.NoError(t, err)
	require.Equal(t, []any{"shop", cloud.Pending}, []any{renamed.Name, renamed.State})
	larger := w.sharedHost("n3", 1024)
	w.recover()
	placed := w.get(vm.ID)
	require.Equal(t, []any{"shop", larger}, []any{placed.Name, placed.Node}, placed.Status.LastError)
}

// TestRenameDeleted checks that a VM that is being deleted is not found.
func TestRenameDeleted(t *testing.T) {
	w := newWorld(t)
	w.AddHost("n1", plenty())
	vm := w.createInState(cloud.Running, "web")
	_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, true, [32]byte{})
	require.NoError(t, err)
	records := w.records()
	_, err = w.vms.Rename(w.as(acme, ""), acme, vm.ID, "shop")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.Equal(t, records, w.records())
}
