//go:build long

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// volumeDisk is a volume of a storage class that both hosts of c serve.
func (c *networkCloud) volumeDisk(class string) migrationDisk {
	return migrationDisk{volume: true, create: func(vm string) *vmv1.DiskSpec {
		id := (&rbdCloud{world: c.world}).createVolume(c.context(time.Minute), class, vm, "")
		return &vmv1.DiskSpec{
			Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: id}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
		}
	}}
}

// newSharedPoolCloud starts a cloud with two hosts that share a storage pool, and returns the disks of a class of the pool.
func newSharedPoolCloud(t *testing.T) (*networkCloud, migrationDisk) {
	c := newNetworkCloud(t, 2, func(w *world, agent *lab.Agent) {
		shared, at, local := w.dir.Path("shared"), w.dir.Path("mount-"+agent.Name), filepath.Join(agent.DataDir(), "volumes")
		for _, dir := range []string{shared, at, local} {
			require.NoError(t, os.MkdirAll(dir, 0o700))
		}
		require.NoError(t, unix.Mount(shared, at, "", unix.MS_BIND, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(at, unix.MNT_DETACH)) })
		agent.Pools = []map[string]any{{"name": "local", "path": local}, {"name": "shared", "path": at, "shared": true}}
	})
	_, err := storagev1.NewStorageClassServiceClient(c.admin.Conn()).CreateStorageClass(c.context(time.Minute), &storagev1.CreateStorageClassRequest{
		Name: "shared", Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, Pool: "shared",
	})
	require.NoError(t, err)
	return c, c.volumeDisk("shared")
}

// newCephCloud starts a cloud with two hosts that use a Ceph cluster, and returns the disks of a class of the cluster.
func newCephCloud(t *testing.T) (*networkCloud, migrationDisk) {
	// The hosts reach this address of the network namespace that connects them.
	const address = "10.94.200.1"
	out, err := exec.Command("ip", "address", "add", address+"/32", "dev", "lo").CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Cleanup(func() { require.NoError(t, exec.Command("ip", "address", "del", address+"/32", "dev", "lo").Run()) })
	ceph := rbdtest.StartAt(t, address)
	helper := rbdtest.Program(t)
	c := newNetworkCloud(t, 2, func(_ *world, agent *lab.Agent) { agent.RBDHelper = helper })
	(&rbdCloud{world: c.world, ceph: ceph}).createClass(c.context(time.Minute), "ceph")
	return c, c.volumeDisk("ceph")
}
