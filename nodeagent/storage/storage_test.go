package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	mib    = 1 << 20
	within = 20 * time.Second
	vm     = cloud.VMID("00000000-0000-4000-8000-0000000000aa")
	vol    = cloud.VolumeID("00000000-0000-4000-8000-000000000001")
)

// host is a host with a storage pool "local", and with the pools "late" and "shared", whose directories do not exist at
// first.
type host struct {
	*testing.T
	*Storage
	dir  string
	stop func()

	mu   sync.Mutex
	seen map[cloud.VolumeID]cloud.VolumeObservation
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{T: t, dir: t.TempDir(), seen: map[cloud.VolumeID]cloud.VolumeObservation{}}
	images, err := disk.OpenImages(filepath.Join(h.dir, "images"), func(context.Context, string, int64) (io.ReadCloser, error) {
		return nil, errors.New("no member has the image")
	})
	require.NoError(t, err)
	t.Cleanup(images.Close)
	require.NoError(t, os.Mkdir(filepath.Join(h.dir, "local"), 0o700))
	var pools []volume.Options
	for _, name := range []string{"local", "late", "shared"} {
		pools = append(pools, volume.Options{
			Name: name, Host: "host-1", Shared: name == "shared", Path: filepath.Join(h.dir, name), State: filepath.Join(h.dir, name+".json"), Images: images,
		})
	}
	h.Storage = New(t.Context(), Options{
		Pools: pools, Log: slog.New(slog.DiscardHandler),
		Report: func(o cloud.VolumeObservation) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.seen[o.Volume] = o
		},
		Forget: func(id cloud.VolumeID) {
			h.mu.Lock()
			defer h.mu.Unlock()
			delete(h.seen, id)
		},
	})
	t.Cleanup(h.Close)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Storage.Run(ctx) }()
	h.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(h.stop)
	return h
}

func (h *host) assign(all ...*agentv1.AssignedVolume) {
	volumes := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	for _, v := range all {
		volumes[cloud.VolumeID(v.GetVolumeId())] = v
	}
	h.Assign(volumes, false)
}

// sees waits until the report of the volume equals want.
func (h *host) sees(want cloud.VolumeObservation) {
	h.Helper()
	var have cloud.VolumeObservation
	defer func() {
		if h.Failed() {
			h.Logf("the last report is %+v", have)
		}
	}()
	require.Eventually(h, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		have = h.seen[want.Volume]
		return have.Equal(want)
	}, within, time.Millisecond, "the volume is reported as %+v", want)
}

func (h *host) exists() bool {
	_, err := os.Lstat(filepath.Join(h.dir, "local", string(vol)+".raw"))
	return err == nil
}

// next returns a copy of want with the next generation, which the function change has modified.
func next(want *agentv1.AssignedVolume, change func(*agentv1.AssignedVolume)) *agentv1.AssignedVolume {
	out := proto.CloneOf(want)
	out.Generation++
	change(out)
	return out
}

func detached() *agentv1.AssignedVolume {
	return &agentv1.AssignedVolume{VolumeId: string(vol), Generation: 1, Pool: "local", SizeBytes: mib}
}

func attach(want *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	return next(want, func(v *agentv1.AssignedVolume) {
		v.VmId, v.DiskId = string(vm), "data"
		v.AttachmentGeneration++
	})
}

func detach(want *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	return next(want, func(v *agentv1.AssignedVolume) { v.VmId, v.DiskId, v.MustExist = "", "", true })
}

// TestLifeOfVolume makes a volume, attaches it, grows it while it is open, detaches and deletes it.
func TestLifeOfVolume(t *testing.T) {
	h := newHost(t)
	v := detached()
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 1, Present: true, SizeBytes: mib})
	v = attach(v)
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib})
	files, err := h.Open(t.Context(), vm, "data", v)
	require.NoError(t, err)
	v = next(v, func(v *agentv1.AssignedVolume) { v.SizeBytes = 2 * mib })
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Present: true, SizeBytes: 2 * mib})
	require.ErrorIs(t, h.Release(t.Context(), "local", vol, vm, 1), volume.ErrInUse)

	v = detach(v) // while QEMU still has the volume open
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 4, Present: true, SizeBytes: 2 * mib})
	files.Close()
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 4, Present: true, SizeBytes: 2 * mib, FlushedGeneration: 1})
	require.NoError(t, h.Release(t.Context(), "local", vol, vm, 1), "it was released already")

	v = next(v, func(v *agentv1.AssignedVolume) { v.Deleted = true })
	h.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{vol: v}, true)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 5, Present: true, SizeBytes: 2 * mib, FlushedGeneration: 1})
	require.True(t, h.exists(), "a stored assignment deletes nothing")
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 5})
	require.False(t, h.exists())
	h.assign()
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Empty(t, h.seen)
}

// TestVolumeThatWasNeverOpened detaches a volume that no VM has opened. The host must report the attachment as flushed,
// and must not open the volume for this attachment afterwards.
func TestVolumeThatWasNeverOpened(t *testing.T) {
	h := newHost(t)
	attached := attach(detached())
	h.assign(detach(attached))
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Error: fmt.Sprintf("volume %s was in the storage pool local of this host before, and is missing now", vol)})
	h.assign(next(detach(attached), func(v *agentv1.AssignedVolume) { v.MustExist = false }))
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 4, Present: true, SizeBytes: mib, FlushedGeneration: 1})
	_, err := h.Open(t.Context(), vm, "data", attached)
	require.ErrorIs(t, err, errNotAttached)

	h.stop() // only the record in the pool shows that the assignment is outdated
	h.mu.Lock()
	h.Storage.volumes = map[cloud.VolumeID]*entry{}
	h.mu.Unlock()
	_, err = h.Open(t.Context(), vm, "data", attached)
	require.ErrorIs(t, err, volume.ErrStale)
}

// TestNewerAttachmentIsValid opens a volume with the assignment of a VM that is newer than the list of volumes. The
// volume must be made at once. Opening it for another VM or disk must fail.
func TestNewerAttachmentIsValid(t *testing.T) {
	h := newHost(t)
	v := attach(detached())
	h.assign(detached())
	_, err := h.Open(t.Context(), "other", "data", v)
	require.ErrorIs(t, err, errNotAttached)
	_, err = h.Open(t.Context(), vm, "other", v)
	require.ErrorIs(t, err, errNotAttached)
	files, err := h.Open(t.Context(), vm, "data", v)
	require.NoError(t, err)
	defer files.Close()
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib})
	h.assign(detached()) // a message of the older list
	require.EqualValues(t, 2, h.desired(vol).GetGeneration(), "the older desired state detaches the volume")
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib})
	_, err = h.Open(t.Context(), vm, "data", v)
	require.ErrorIs(t, err, volume.ErrInUse)
}

// TestPoolIsMissing checks the reports of volumes whose pool or image the host does not have. It also checks that the
// host uses a pool as soon as the pool can be opened.
func TestPoolIsMissing(t *testing.T) {
	h := newHost(t)
	unknown := next(detached(), func(v *agentv1.AssignedVolume) { v.Pool = "none" })
	h.assign(unknown)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Error: `this host has no storage pool "none"`})
	late := next(unknown, func(v *agentv1.AssignedVolume) { v.Pool = "late" })
	h.assign(late)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Error: "storage pool late: open (file): no such file or directory"})
	require.Len(t, h.Pools(), 1)
	require.NoError(t, os.Mkdir(filepath.Join(h.dir, "late"), 0o700))
	h.openPools(t.Context())
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Present: true, SizeBytes: mib})
	require.Len(t, h.Pools(), 2)
}
