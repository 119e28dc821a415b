package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// sharedStory has two hosts that share the storage pool "shared". The first one is the host of cloud.
type sharedStory struct {
	*world
	ctx    context.Context
	images lab.GuestImages
	dir    string // the directory of the pool
	hosts  [2]*lab.Agent
	vms    [2]string // a VM on each host
}

// newSharedStory adds the shared pool to the host of the cloud, which restarts its agent, and starts a second host.
func newSharedStory(t *testing.T, w *world, images lab.GuestImages) *sharedStory {
	t.Helper()
	s := &sharedStory{world: w, ctx: w.context(6 * time.Minute), images: images, dir: w.dir.Path("shared")}
	require.NoError(t, os.Mkdir(s.dir, 0o700))
	first := 1_640_000 + lab.RunID()%1000*100 // above the uids of the first host
	second := &lab.Agent{
		Dir: w.dir, Bin: w.trio.Bin, Name: "host-2", Members: w.agent.Members, Cgroup: w.agent.Cgroup + "-2",
		UIDRange: fmt.Sprintf("%d-%d", first, first+99), Metrics: "127.0.0.2:7444", Network: map[string]any{"prefix": "e2eshared-"},
	}
	s.hosts = [2]*lab.Agent{w.agent, second}
	for i, agent := range s.hosts {
		at, local := w.dir.Path(fmt.Sprintf("mount-%d", i+1)), filepath.Join(agent.DataDir(), "volumes")
		require.NoError(t, os.Mkdir(at, 0o700))
		require.NoError(t, unix.Mount(s.dir, at, "", unix.MS_BIND, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(at, unix.MNT_DETACH)) })
		require.NoError(t, os.MkdirAll(local, 0o700))
		agent.Pools = []map[string]any{{"name": "local", "path": local}, {"name": "shared", "path": at, "shared": true}}
		agent.Labels = map[string]string{"host": agent.Name}
	}
	require.NoError(t, w.dir.Stop(w.agent.Name, 12*time.Second))
	require.NoError(t, w.agent.Start(""))
	token, err := w.admin.NodeToken(s.ctx)
	require.NoError(t, err)
	t.Cleanup(func() {
		if w.dir.Running(second.Name) != 0 {
			require.NoError(t, w.dir.Stop(second.Name, 12*time.Second))
		}
		s.endGuests(second)
	})
	require.NoError(t, second.Start(token))
	for _, agent := range s.hosts {
		require.NoError(t, agent.Healthy(s.ctx))
		require.NoError(t, lab.Until(s.ctx, agent.Name+" serves the class", func(ctx context.Context) error {
			n, err := w.admin.AwaitNode(ctx, agent.Name)
			if err == nil && !strings.Contains(strings.Join(n.GetSupportedStorageClasses(), " "), "shared") {
				err = fmt.Errorf("it serves %v", n.GetSupportedStorageClasses())
			}
			return err
		}))
	}
	return s
}

// endGuests kills the guests of an agent that has stopped.
func (s *sharedStory) endGuests(agent *lab.Agent) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := agent.EndGuests(ctx)
	require.NoError(s.t, err)
}

// guest writes a line to the serial port of the VM on a host, and waits for the answer.
func (s *sharedStory) guest(host int, line, answer string) {
	s.t.Helper()
	before := s.agent
	defer func() { s.agent = before }()
	s.agent = s.hosts[host]
	s.command(s.ctx, s.vms[host], line, answer)
}

func (s *sharedStory) attach(host int, volume, disk string) error {
	_, err := s.admin.VMs.AttachDisk(s.ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: s.vms[host], Disk: &vmv1.DiskSpec{
		Id: disk, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
	}})
	return err
}

// detach detaches the disk "data" of the VM on a host, and waits until the volume is AVAILABLE.
func (s *sharedStory) detach(host int, volume string) {
	s.t.Helper()
	require.NoError(s.t, lab.Until(s.ctx, "the volume is detached", func(ctx context.Context) error {
		_, err := s.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: "default", ProjectId: "default", VmId: s.vms[host], DiskId: "data"})
		return err
	}))
	s.available(volume)
}

func (s *sharedStory) available(volume string) {
	s.t.Helper()
	require.NoError(s.t, lab.Until(s.ctx, "the volume is AVAILABLE", func(ctx context.Context) error {
		v, err := s.volume(ctx, volume)
		if err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
			err = fmt.Errorf("it is %s: %v", v.GetStatus(), v.GetMetadata())
		}
		return err
	}))
}

func (s *sharedStory) volume(ctx context.Context, id string) (*vmv1.Volume, error) {
	return s.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: id})
}

// testSharedPool moves a volume of a shared pool between VMs on two hosts, which also try to attach it at the same time.
// A VM with the volume is migrated there and back while it writes (moveWithVolume). A snapshot that the first host made
// becomes a volume on the second one. The first host is drained. The second host is lost with the volume: while
// its guest still runs, no other host gets the volume, and afterwards the first host does.
func testSharedPool(t *testing.T, w *world, images lab.GuestImages) {
	classes := storagev1.NewStorageClassServiceClient(w.admin.Conn())
	_, err := classes.CreateStorageClass(w.context(time.Minute), &storagev1.CreateStorageClassRequest{
		Name: "shared", Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, Pool: "shared",
	})
	require.NoError(t, err)
	s := newSharedStory(t, w, images)
	const org = "default"
	created, err := w.admin.Volumes.CreateVolume(s.ctx, &vmv1.CreateVolumeRequest{
		Name: "shared-data", OrgId: org, ProjectId: org, SizeGib: 1, StorageClass: "shared",
	})
	require.NoError(t, err)
	data := created.GetId()
	for i, host := range s.hosts {
		vm, err := w.admin.VMs.CreateVm(s.ctx, &vmv1.CreateVmRequest{
			Name: "on-" + host.Name, OrgId: org, ProjectId: org, Labels: map[string]string{"trivet/node-selector": "host=" + host.Name},
			Spec: &vmv1.VmSpec{
				Memory: &vmv1.MemorySpec{SizeMib: 192},
				Boot:   &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: guestCmdline},
				Disks:  []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1}},
			},
		})
		require.NoError(t, err)
		s.vms[i] = vm.GetId()
		_, err = w.admin.VMs.StartVm(s.ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId()})
		require.NoError(t, err)
		require.NoError(t, consoleSays(s.ctx, w, vm.GetId(), banner, 1))
	}
	require.NoError(t, s.attach(0, data, "data"))
	s.guest(0, "write vdb first", written("first"))
	require.ErrorContains(t, s.attach(1, data, "data"), "is attached to VM "+s.vms[0])
	snapshots := storagev1.NewSnapshotServiceClient(w.admin.Conn())
	snapshot, err := snapshots.CreateSnapshot(s.ctx, &storagev1.CreateSnapshotRequest{OrgId: org, ProjectId: org, VolumeId: data, Name: "shared"})
	require.NoError(t, err)
	(&snapshotStory{w, s.ctx, snapshots}).available(snapshot.GetId())
	s.guest(0, "write vdb second", written("second"))
	s.detach(0, data)

	for range 2 {
		var errs [2]error
		var calls sync.WaitGroup
		for host := range s.hosts {
			calls.Go(func() { errs[host] = s.attach(host, data, "data") })
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(t, errs[winner])
		require.ErrorContains(t, errs[1-winner], "is attached to VM "+s.vms[winner])
		s.guest(winner, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("second"))
		s.detach(winner, data)
	}
	require.NoError(t, s.attach(1, data, "data"))
	s.moveWithVolume(s.ctx, s.vms[1], "vdb", s.hosts[1], s.hosts[0])
	s.moveWithVolume(s.ctx, s.vms[1], "vdb", s.hosts[0], s.hosts[1])
	s.guest(1, "write vdb third", written("third"))
	copied, err := snapshots.CreateVolumeFromSnapshot(s.ctx, &storagev1.CreateVolumeFromSnapshotRequest{
		OrgId: org, ProjectId: org, SnapshotId: snapshot.GetId(), Name: "shared-copy",
	})
	require.NoError(t, err)
	require.NoError(t, lab.Until(s.ctx, "the copy is attached", func(context.Context) error { return s.attach(1, copied.GetId(), "copy") }))
	s.guest(1, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("first"))

	s.drainPortable()
	s.loseHost(data)
	require.NoError(t, s.attach(0, data, "data"))
	s.guest(0, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("third"))
	s.detach(0, data)
	s.available(copied.GetId())
	_, err = snapshots.DeleteSnapshot(s.ctx, &storagev1.DeleteSnapshotRequest{OrgId: org, ProjectId: org, SnapshotId: snapshot.GetId()})
	require.NoError(t, err)
	for _, id := range []string{data, copied.GetId()} {
		require.NoError(t, lab.Until(s.ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := w.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: id})
			return err
		}))
	}
	require.NoError(t, lab.Until(s.ctx, "all files are deleted", func(context.Context) error {
		left, err := filepath.Glob(filepath.Join(s.dir, "*-*"))
		left = slices.DeleteFunc(left, func(name string) bool { return strings.HasSuffix(name, ".deleted") })
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v are left", left)
		}
		return err
	}))
}

// loseHost kills the agent of the second host, deletes its VM by force and evicts the host. While the guest still runs,
// the volume must stay IN_USE with the reason. Then loseHost kills the guest, and waits until the volume is AVAILABLE.
func (s *sharedStory) loseHost(volume string) {
	s.t.Helper()
	t, second := s.t, s.hosts[1]
	require.NoError(t, s.world.dir.Kill(second.Name))
	require.NoError(t, lab.Until(s.ctx, "the VM is deleted", func(ctx context.Context) error {
		_, err := s.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: s.vms[1], Force: true})
		return err
	}))
	err := s.attach(0, volume, "data")
	require.Error(t, err, "the lost host may still write the volume")
	require.Contains(t, status.Convert(err).Message(), "is attached to VM "+s.vms[1])
	home := t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(s.adminToken), 0o600))
	out, errs, code := s.trivet(s.ctx, home, "--token-file", token, "--endpoint", "127.0.0.2", "node", "evict", second.Name)
	require.Zero(t, code, out+errs)
	require.NoError(t, lab.Until(s.ctx, "the volume says who has it", func(ctx context.Context) error {
		v, err := s.volume(ctx, volume)
		if err != nil {
			return err
		}
		require.Equal(t, vmv1.VolumeStatus_VOLUME_STATUS_IN_USE, v.GetStatus(), "the lost host still writes the volume")
		if reason := v.GetMetadata()["trivet/error"]; !strings.Contains(reason, "host host-2 opened it for VM "+s.vms[1]) {
			return errors.New(reason)
		}
		return nil
	}))
	require.ErrorContains(t, s.attach(0, volume, "data"), "has not flushed")
	s.endGuests(second)
	s.available(volume)
}
