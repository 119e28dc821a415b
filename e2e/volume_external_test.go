package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// openImage opens an RBD image for writing, as a program that is not Trivet's. The returned function closes it.
func (c *rbdCloud) openImage(image string) (closeImage func()) {
	c.t.Helper()
	cmd := c.ceph.Command("qemu-io", "-f", "raw", "rbd:"+rbdtest.Pool+"/"+image+":conf="+c.ceph.Conf)
	in, err := cmd.StdinPipe()
	require.NoError(c.t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, cmd.Start())
	ended := false
	c.t.Cleanup(func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	_, err = io.WriteString(in, "write -P 1 512k 4k\n")
	require.NoError(c.t, err)
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "ops;") {
	}
	return func() {
		ended = true
		_, err := io.WriteString(in, "quit\n")
		require.NoError(c.t, err)
		_, _ = io.Copy(io.Discard, out)
		require.NoError(c.t, cmd.Wait())
	}
}

// awaitVolume waits until a volume has a status, and its error contains a text.
func (c *rbdCloud) awaitVolume(ctx context.Context, id string, want vmv1.VolumeStatus, why string) {
	c.t.Helper()
	require.NoError(c.t, lab.Until(ctx, "volume "+id+" is "+want.String(), func(ctx context.Context) error {
		v, err := c.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: id})
		if err == nil && (v.GetStatus() != want || !strings.Contains(v.GetMetadata()["trivet/error"], why)) {
			err = fmt.Errorf("it is %s: %v", v.GetStatus(), v.GetMetadata())
		}
		return err
	}))
}

// attachOld attaches the volume to a VM as the disk named old.
func (c *rbdCloud) attachOld(ctx context.Context, vm, volume string) error {
	_, err := c.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
		Id: "old", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
	}})
	return err
}

// detachOld detaches the disk named old from a VM.
func (c *rbdCloud) detachOld(ctx context.Context, vm string) {
	c.t.Helper()
	require.NoError(c.t, lab.Until(ctx, "the volume is detached", func(ctx context.Context) error {
		_, err := c.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, DiskId: "old"})
		return err
	}))
}

// useRegisteredImage registers an RBD image with content as a volume, and attaches it in turn to the running VMs one
// and two, in whose guests it is the disk vdc. Between the two attachments, the test sets a wrong key for the storage
// class, and then another Ceph user with its key. At the end, the volume is deleted, and the image must still have its
// content.
func (c *rbdCloud) useRegisteredImage(ctx context.Context, one, two string) {
	c.t.Helper()
	c.ceph.Run("rbd", "create", "--size", "1G", rbdtest.Pool+"/old")
	closeImage := c.openImage("old")
	register := []string{"volume", "register", "old", "--image", "old", "--size", "1", "--class", "ceph"}
	out, errs, code := c.adminCommand(ctx, register...)
	require.Zero(c.t, code, errs)
	require.Contains(c.t, out, "PENDING")
	list, err := c.admin.Volumes.ListVolumes(ctx, &vmv1.ListVolumesRequest{OrgId: "default", ProjectId: "default"})
	require.NoError(c.t, err)
	old := ""
	for _, v := range list.GetVolumes() {
		if v.GetName() == "old" {
			old = v.GetId()
			require.Equal(c.t, "old", v.GetBacking().GetRbd().GetImage())
		}
	}
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_ERROR, "clients of the Ceph cluster have RBD image old open")
	require.ErrorContains(c.t, c.attachOld(ctx, one, old), "no host has checked its RBD image old yet")
	closeImage()
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE, "")
	register[2] = "again"
	_, errs, code = c.adminCommand(ctx, register...)
	require.NotZero(c.t, code)
	require.Contains(c.t, errs, "RBD image rbd/old is registered as volume old in project default")

	closeImage = c.openImage("old")
	require.ErrorContains(c.t, c.attachOld(ctx, one, old), "clients of the Ceph cluster have the registered RBD image open: old (")
	closeImage()
	require.NoError(c.t, lab.Until(ctx, "the volume is attached", func(ctx context.Context) error { return c.attachOld(ctx, one, old) }))
	c.on(1).command(ctx, one, "write vdc registered", written("registered"))
	c.detachOld(ctx, one)
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE, "")

	c.updateClass(ctx, "", c.ceph.Run("ceph-authtool", "--gen-print-key"))
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_ERROR, "refuses the user or its key")
	c.on(1).command(ctx, one, "write vdb replaced", written("replaced")) // a QEMU that runs keeps its connection
	c.ceph.Run("ceph", "auth", "get-or-create", "client.trivet2", "mon", "profile rbd", "osd", "profile rbd")
	key := c.ceph.Run("ceph", "auth", "get-key", "client.trivet2")
	c.updateClass(ctx, "trivet2", key)
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE, "")
	require.NoError(c.t, lab.Until(ctx, "the volume is attached on the other host", func(ctx context.Context) error { return c.attachOld(ctx, two, old) }))
	c.on(2).command(ctx, two, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("registered"))
	c.requireNoKey(key)
	c.detachOld(ctx, two)
	c.awaitVolume(ctx, old, vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE, "")
	_, errs, code = c.adminCommand(ctx, "volume", "delete", "old")
	require.Zero(c.t, code, errs)
	require.NoError(c.t, lab.Until(ctx, "the image is released", func(context.Context) error {
		if strings.Contains(c.ceph.Run("rados", "-p", rbdtest.Pool, "ls"), "trivet.record.old") {
			return errors.New("its record exists")
		}
		return nil
	}))
	require.Contains(c.t, "\n"+c.ceph.Run("rbd", "ls", rbdtest.Pool)+"\n", "\nold\n", "the image was deleted with the volume")
}

// updateClass changes the Ceph user, unless user is empty, and the key of the storage class.
func (c *rbdCloud) updateClass(ctx context.Context, user, key string) {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "ceph.key")
	require.NoError(c.t, os.WriteFile(file, []byte(key+"\n"), 0o600))
	args := []string{"storage-class", "update", "ceph", "--key-file", file}
	if user != "" {
		args = append(args, "--user", user)
	}
	out, errs, code := c.adminCommand(ctx, args...)
	require.Zero(c.t, code, errs)
	require.NotContains(c.t, out+errs, key)
}
