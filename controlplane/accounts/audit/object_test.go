package audit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestObjectName(t *testing.T) {
	names := map[string]string{"vm1": "web", "d1": "data", "n1": "rack7", "s1": "before", "g1": "ssh"}
	for _, c := range []struct{ method, target, want string }{
		{"/vmcontroller.v1.VmService/DeleteVm", "org_id=acme project_id=shop vm_id=vm1", "web"},
		{"/vmcontroller.v1.VmService/MigrateVm", "node_id=n1 vm_id=vm1", "web"},
		{"/vmcontroller.v1.VmService/AttachDisk", "vm_id=vm1", "web"},
		{"/vmcontroller.v1.NodeService/DrainNode", "node_id=n1", "rack7"},
		{"/x/AttachVolume", "vm_id=vm1 volume_id=d1", "data"},
		{"/x/DeletePort", "id=d1 vm_id=vm1", "data"},
		{"/x/AddSecurityGroupRule", "security_group_id=g1", "ssh"},
		// The name of a new object is in the request.
		{"/storage.v1.SnapshotService/CreateSnapshot", "disk_id=d1 name=now volume_id=d1", ""},
		{"/x/CreateVmSnapshots", "vm_id=vm1", "web"},
		{"/x/RenameVm", "name=new vm_id=vm1", "web"},
		{"/x/DeleteProject", "id=unknown", ""},
		{"/x/DeleteVm", "DELETE /api/v1/vms/vm1", "web"},
		{"/x/DetachVolume", "POST /api/v1/volumes/d1/detach", "data"},
		{"/x/DeleteVm", "DELETE /api/v1/vms/other", ""},
		{"/x/RotateKeys", "", ""},
	} {
		require.Equal(t, c.want, objectName(c.method, c.target, func(id string) string { return names[id] }), c.method+" "+c.target)
	}
}

// TestRecordHasNameOfObject checks that the record of a change has the name that the object had before the change.
func TestRecordHasNameOfObject(t *testing.T) {
	s := newService(t, new(time.Time))
	vms := store.NewTable[cloud.VM]("vm")
	update := func(method string, change func(*store.Tx) error) {
		_, err := s.opts.Store.Update(t.Context(), func(tx *store.Tx) error {
			err := change(tx)
			Add(tx, &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Method: "/x/" + method, Target: "vm_id=vm1", RequestID: method})
			return err
		})
		require.NoError(t, err)
	}
	update("CreateVm", func(tx *store.Tx) error {
		vms.Put(tx, &cloud.VM{ID: "vm1", Name: "web"}, "vm1")
		return nil
	})
	update("RenameVm", func(tx *store.Tx) error {
		vm, err := vms.Get(tx, "vm1")
		require.NoError(t, err)
		vm.Name = "shop"
		vms.Put(tx, vm, "vm1")
		_, err = vms.Get(tx, "vm1")
		return err
	})
	update("DeleteVm", func(tx *store.Tx) error {
		_, err := vms.Get(tx.Unguarded(), "vm1")
		vms.Delete(tx, "vm1")
		return err
	})
	got := map[string]string{}
	for _, r := range s.all(t) {
		got[r.ID] = r.Target
	}
	require.Equal(t, map[string]string{"CreateVm": "vm_id=vm1", "RenameVm": "object=web vm_id=vm1", "DeleteVm": "object=shop vm_id=vm1"}, got)
}

// TestQuotedName checks that a name with spaces or equals signs cannot be mistaken for other parts of a target.
func TestQuotedName(t *testing.T) {
	for name, want := range map[string]string{
		"web-1": "web-1", "Ada Lovelace": `"Ada Lovelace"`, "x user_id=ada": `"x user_id=ada"`, "a=b": `"a=b"`, `"`: `"\""`,
	} {
		require.Equal(t, want, quoted(name))
	}
}
