package e2e

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	pattern "github.com/trivet-cloud/trivet/images/guest"
)

// command writes a line to the serial port of a guest, and waits until its console log contains the answer.
func (w *world) command(ctx context.Context, vm, line, answer string) {
	w.t.Helper()
	dir, err := os.Open(filepath.Join(w.agent.DataDir(), "vms", vm)) // the path of the socket is too long for sockaddr_un
	require.NoError(w.t, err)
	defer dir.Close()
	c, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/console.sock", dir.Fd()))
	require.NoError(w.t, err)
	done := make(chan struct{})
	go func() { defer close(done); _, _ = io.Copy(io.Discard, c) }()
	defer func() { _ = c.Close(); <-done }()
	require.NoError(w.t, lab.Until(ctx, "the guest answers "+answer, func(context.Context) error {
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			return err
		}
		var text []byte
		for range 20 { // the guest may answer that it does not have the disk yet
			var err error
			if text, err = os.ReadFile(filepath.Join(dir.Name(), "console.log")); err != nil { // works without an agent
				return err
			}
			if strings.Contains(string(text), answer) {
				return nil
			}
			time.Sleep(100 * time.Millisecond)
		}
		return fmt.Errorf("no answer to %s; the end of the console log: %q", line, text[max(0, len(text)-1000):])
	}))
}

// written returns the text that the guest's disk commands print about the first MiB of a disk, to which they wrote the
// pattern of seed.
func written(seed string) string {
	buf := make([]byte, 1<<20)
	pattern.Pattern(buf, seed, 0)
	return fmt.Sprintf("sha256=%x", sha256.Sum256(buf))
}

// TestVolumes attaches a volume to a running VM, grows it, moves it to another VM and deletes it, through the API. The
// agent is killed while the volume is attached. The second VM also gets a blank disk while it runs. Then a second host
// joins the cloud, and the hosts share a pool (testSharedPool).
func TestVolumes(t *testing.T) {
	w, images, _ := cloud(t)
	ctx := w.context(5 * time.Minute)
	org := "default"
	_, err := storagev1.NewStorageClassServiceClient(w.admin.Conn()).CreateStorageClass(ctx, &storagev1.CreateStorageClassRequest{
		Name: "fast", Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, IsDefault: true, Pool: "local",
	})
	require.NoError(t, err)
	volume, err := w.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
		Name: "data", OrgId: org, ProjectId: org, SizeGib: 1, Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED,
	})
	require.NoError(t, err)
	var vms []string
	for _, name := range []string{"one", "two"} {
		vm, err := w.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: name, OrgId: org, ProjectId: org, Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192},
			Boot:   &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: guestCmdline},
			Disks:  []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1}},
		}})
		require.NoError(t, err)
		vms = append(vms, vm.GetId())
		_, err = w.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId()})
		require.NoError(t, err)
		require.NoError(t, consoleSays(ctx, w, vm.GetId(), banner, 1))
	}
	attach := func(vm string) error {
		_, err := w.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: org, ProjectId: org, VmId: vm, Disk: &vmv1.DiskSpec{
			Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume.GetId()}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
		}})
		return err
	}
	require.NoError(t, attach(vms[0]))
	w.command(ctx, vms[0], "write vdb first", written("first"))
	require.Error(t, attach(vms[1]), "a volume is attached to one VM at a time")
	_, err = w.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: volume.GetId()})
	require.Error(t, err, "the volume is in use")
	_, err = w.admin.Volumes.ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{OrgId: org, ProjectId: org, VolumeId: volume.GetId(), SizeGib: 2})
	require.NoError(t, err)
	w.command(ctx, vms[0], "disks", "vdb:4194304")

	require.NoError(t, w.dir.Kill(w.agent.Name))
	w.command(ctx, vms[0], "write vdb second", written("second"))
	require.NoError(t, w.agent.Start(""))
	require.NoError(t, lab.Until(ctx, "the volume is detached", func(ctx context.Context) error {
		_, err := w.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: org, ProjectId: org, VmId: vms[0], DiskId: "data"})
		return err
	}))
	require.NoError(t, lab.Until(ctx, "the volume is attached", func(context.Context) error { return attach(vms[1]) }))
	w.command(ctx, vms[1], "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("second"))
	blank, err := w.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: org, ProjectId: org, VmId: vms[1], Disk: &vmv1.DiskSpec{
		Id: "scratch", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1,
	}})
	require.NoError(t, err)
	w.command(ctx, vms[1], "write vdc third", written("third"))
	scratch := blank.GetSpec().GetDisks()[2].GetSource().GetVolumeId()

	for _, id := range vms {
		_, err = w.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: org, ProjectId: org, VmId: id, Force: true})
		require.NoError(t, err)
	}
	for _, id := range []string{volume.GetId(), scratch} {
		require.NoError(t, lab.Until(ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := w.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: id})
			return err
		}))
	}
	require.NoError(t, lab.Until(ctx, "the files of the volumes are deleted", func(context.Context) error {
		left, err := filepath.Glob(filepath.Join(w.agent.DataDir(), "volumes", "*-*"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v are left", left)
		}
		return err
	}))
	testSharedPool(t, w, images)
}
