package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// rbdCloud is a cloud whose hosts use a real Ceph cluster.
type rbdCloud struct {
	*world
	ceph   *rbdtest.Ceph
	images lab.GuestImages
	hosts  []*lab.Agent
}

// newRBDCloud starts a cloud with three hosts. The function change changes the settings of the host with this number
// before it starts; helper is the path of trivet-rbd, without which the host serves no RBD.
func newRBDCloud(t *testing.T, change func(n int, agent *lab.Agent, helper string)) *rbdCloud {
	c := &rbdCloud{ceph: rbdtest.Start(t)}
	helper := rbdtest.Program(t)
	c.world = newWorld(t)
	ctx := c.context(2 * time.Minute)
	for n := 1; n <= 3; n++ {
		first, prefix := 640_000+lab.RunID()%1000*1000+n*100, fmt.Sprintf("e2erbd%d-", n)
		agent := &lab.Agent{
			Dir: c.dir, Bin: c.trio.Bin, Name: fmt.Sprintf("host-%d", n), Members: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"},
			Cgroup: fmt.Sprintf("trivet-e2e-%d-%d", lab.RunID(), n), UIDRange: fmt.Sprintf("%d-%d", first, first+99),
			Metrics: fmt.Sprintf("127.0.0.%d:7444", n), Network: map[string]any{"prefix": prefix},
			Labels: map[string]string{"host": fmt.Sprintf("host-%d", n)},
		}
		change(n, agent, helper)
		token, err := c.admin.NodeToken(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { c.end(agent, prefix) })
		require.NoError(t, agent.Start(token))
		require.NoError(t, agent.Healthy(ctx))
		_, err = c.admin.AwaitNode(ctx, agent.Name)
		require.NoError(t, err)
		c.hosts = append(c.hosts, agent)
	}
	var err error
	c.images, err = lab.ImportGuest(ctx, c.trio, c.admin, guest(t))
	require.NoError(t, err)
	return c
}

// end ends an agent and its guests, and removes the packet filter of its guests.
func (c *rbdCloud) end(agent *lab.Agent, prefix string) {
	if c.dir.Running(agent.Name) != 0 {
		require.NoError(c.t, c.dir.Stop(agent.Name, 12*time.Second))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := agent.EndGuests(ctx)
	require.NoError(c.t, err)
	if agent.RBDHelper != "" {
		table := strings.TrimRight(prefix, "-") + "-qemu"
		out, err := exec.CommandContext(ctx, "nft", "delete", "table", "inet", table).CombinedOutput()
		require.NoError(c.t, err, "%s", out)
	}
}

// createClass creates a storage class of the driver RBD with the command line.
func (c *rbdCloud) createClass(ctx context.Context, name string, flags ...string) {
	c.t.Helper()
	home := c.t.TempDir()
	key, token := filepath.Join(home, "ceph.key"), filepath.Join(home, "admin.token")
	require.NoError(c.t, os.WriteFile(key, []byte(c.ceph.Key+"\n"), 0o600))
	require.NoError(c.t, os.WriteFile(token, []byte(c.adminToken), 0o600))
	command := []string{"--endpoint", "127.0.0.1", "--token-file", token, "storage-class", "create", name, "--driver", "rbd",
		"--fsid", c.ceph.FSID, "--monitors", c.ceph.Address, "--pool", rbdtest.Pool, "--user", rbdtest.User, "--key-file", key}
	out, errs, code := c.trivet(ctx, home, append(command, flags...)...)
	require.Zero(c.t, code, errs)
	require.Contains(c.t, out, "RBD")
	require.NotContains(c.t, out+errs, c.ceph.Key)
}

// createVolume creates a volume of a class, and waits until a host has made it.
func (c *rbdCloud) createVolume(ctx context.Context, class, name, image string) string {
	c.t.Helper()
	v, err := c.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
		Name: name, OrgId: "default", ProjectId: "default", SizeGib: 1, StorageClass: class, ImageId: image,
	})
	require.NoError(c.t, err)
	require.NoError(c.t, lab.Until(ctx, "volume "+name+" is made", func(ctx context.Context) error {
		v, err := c.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: v.GetId()})
		if err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
			err = fmt.Errorf("it is %s: %v", v.GetStatus(), v.GetMetadata())
		}
		return err
	}))
	return v.GetId()
}

// createVM creates a VM on the host with this number, with volumes as further disks, and starts it unless the call
// fails.
func (c *rbdCloud) createVM(ctx context.Context, name string, host int, volumes ...string) (string, error) {
	disks := []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1}}
	for i, v := range volumes {
		disks = append(disks, &vmv1.DiskSpec{Id: fmt.Sprintf("data-%d", i), Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: v}}})
	}
	vm, err := c.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: name, OrgId: "default", ProjectId: "default", Labels: map[string]string{"trivet/node-selector": fmt.Sprintf("host=host-%d", host)},
		Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192}, Disks: disks,
			Boot: &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: guestCmdline},
		},
	})
	if err != nil {
		return "", err
	}
	if _, err := c.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: vm.GetId()}); err != nil {
		return "", err
	}
	return vm.GetId(), consoleSays(ctx, c.world, vm.GetId(), banner, 1)
}

// on makes command talk to guests of the host with this number.
func (c *rbdCloud) on(host int) *world {
	c.agent = c.hosts[host-1]
	return c.world
}

// TestVolumesRBD makes volumes in a real Ceph cluster, blank and from an image, through the API. A volume is attached
// to a running VM, grows, gets snapshots (testSnapshots), and moves to a VM on the second host, which
// is migrated there and back while it writes (moveWithVolume). An image of the cluster
// is registered as a volume, while the key of the storage class changes. Volumes of an encrypted class are used
// (useEncrypted). Processes are killed and the cluster is stopped (testFaults). A VM of a lost host starts on the other
// host (recoverVM), and the second host is lost and evicted (loseHost).
// The first host must then delete the images. The key of the Ceph user must be in no file of members and hosts.
func TestVolumesRBD(t *testing.T) {
	c := newRBDCloud(t, func(n int, agent *lab.Agent, helper string) {
		if n < 3 {
			agent.RBDHelper = helper
		}
	})
	ctx := c.context(15 * time.Minute)
	c.createClass(ctx, "ceph")
	data, clone := c.createVolume(ctx, "ceph", "data", ""), c.createVolume(ctx, "ceph", "clone", c.images.Disk)
	_, err := c.createVM(ctx, "nowhere", 3, data)
	require.Contains(t, fmt.Sprint(status.Convert(err).Details()...), "does not serve RBD volumes: rbd_helper is empty: set it to the path of trivet-rbd")
	one, err := c.createVM(ctx, "one", 1, clone)
	require.NoError(t, err)
	attach := func(vm string) error {
		_, err := c.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
			Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: data}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
		}})
		return err
	}
	require.NoError(t, attach(one))
	c.on(1).command(ctx, one, "write vdc first", written("first"))
	_, err = c.admin.Volumes.ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: data, SizeGib: 2})
	require.NoError(t, err)
	c.on(1).command(ctx, one, "disks", "vdc:4194304")
	c.testSnapshots(ctx, one, clone, data)

	require.NoError(t, lab.Until(ctx, "the volume is detached", func(ctx context.Context) error {
		_, err := c.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: "default", ProjectId: "default", VmId: one, DiskId: "data"})
		return err
	}))
	two, err := c.createVM(ctx, "two", 2)
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the volume is attached on the other host", func(context.Context) error { return attach(two) }))
	c.on(2).command(ctx, two, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("second"))
	c.moveWithVolume(ctx, two, "vdb", c.hosts[1], c.hosts[0])
	c.moveWithVolume(ctx, two, "vdb", c.hosts[0], c.hosts[1])
	c.useRegisteredImage(ctx, one, two)
	c.useEncrypted(ctx, one, two)
	more := c.testFaults(ctx, one, two, data)
	c.requireNoKey(c.ceph.Key)
	c.recoverVM(ctx)
	c.loseHost(ctx, one, two, data, more)

	_, err = c.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: one, Force: true})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the volume is detached", func(ctx context.Context) error {
		v, err := c.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: data})
		if err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
			err = errors.New(v.GetStatus().String())
		}
		return err
	}))
	for _, id := range []string{data, clone} {
		require.NoError(t, lab.Until(ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := c.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: id})
			return err
		}))
	}
	require.NoError(t, lab.Until(ctx, "the images are deleted", func(context.Context) error {
		if left := c.ceph.Run("rbd", "ls", rbdtest.Pool); strings.Contains(left, "volume-") {
			return fmt.Errorf("%s are left", left)
		}
		return nil
	}))
}

// requireNoKey requires that no file of members and hosts contains this key of a Ceph user.
func (c *rbdCloud) requireNoKey(key string) {
	c.t.Helper()
	files := 0
	require.NoError(c.t, filepath.WalkDir(string(c.dir), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // a file that was removed meanwhile
		}
		if info, err := d.Info(); err != nil || info.Size() > 64<<20 { // disks
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			files++
			require.False(c.t, bytes.Contains(text, []byte(key)), "%s contains the key", path)
		}
		return nil
	}))
	require.Greater(c.t, files, 20)
}
