package volume

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

const mib = 1 << 20

// host is a host with one storage pool. Several hosts can have the same directory.
type host struct {
	*testing.T
	*Pool
	dir   string
	image disk.Image // the only image that the host can fetch: 1 MiB
	// content has the bytes of the file of image.
	content []byte
}

func id(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

var imageContent = bytes.Repeat([]byte("i"), mib)

func newHost(t *testing.T, dir string, shared bool) *host {
	t.Helper()
	state := t.TempDir()
	h := &host{T: t, dir: dir, content: imageContent}
	images, err := disk.OpenImages(filepath.Join(state, "images"), func(_ context.Context, _ string, offset int64) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(h.content[offset:])), nil
	})
	require.NoError(t, err)
	t.Cleanup(images.Close)
	sum := sha256.Sum256(imageContent)
	h.image = disk.Image{SHA256: hex.EncodeToString(sum[:]), Size: mib, Format: qcow2.Raw}
	h.Pool, err = OpenPool(t.Context(), Options{
		Name: "local", Host: "host-" + filepath.Base(state), Path: dir, Shared: shared, State: filepath.Join(state, "pool.json"), Images: images,
	})
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return h
}

// again closes the pool and opens it again, as an agent does after a restart.
func (h *host) again() error {
	h.Helper()
	h.Close()
	p, err := OpenPool(h.Context(), h.o)
	if err == nil {
		h.Pool = p
		h.Cleanup(p.Close)
	}
	return err
}

func (h *host) make(v Volume) {
	h.Helper()
	require.NoError(h, h.Create(h.Context(), v))
}

// names returns the names of all files in the pool except those that every pool has.
func (h *host) names() []string {
	h.Helper()
	entries, err := os.ReadDir(h.dir)
	require.NoError(h, err)
	var out []string
	for _, e := range entries {
		if e.Name() != markerName && e.Name() != lockName {
			out = append(out, e.Name())
		}
	}
	return out
}

func (h *host) list() Listing {
	h.Helper()
	l, err := h.List()
	require.NoError(h, err)
	return l
}

// TestPoolHasVolumes makes a blank volume and one over an image, grows and deletes them, and repeats each call.
func TestPoolHasVolumes(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	blank, over := Volume{ID: id(1), Size: 64 * mib}, Volume{ID: id(2), Size: 64 * mib, Image: &h.image}
	for range 2 {
		h.make(blank)
		h.make(over)
	}
	require.Equal(t, []string{id(1) + ".json", id(1) + ".raw", id(2) + ".json", id(2) + ".qcow2"}, h.names())
	list := h.list().Volumes
	require.Len(t, list, 2)
	require.Equal(t, uint64(64*mib), list[0].Size)
	require.Less(t, list[0].Allocated, uint64(mib), "the file is sparse")
	require.Equal(t, &h.image, list[1].Image)

	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(1), Size: 64 * mib, Image: &h.image}), ErrRefused)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: "../x", Size: mib}), ErrRefused)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(3), Size: 1000}), ErrRefused)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(3), Size: 512, Image: &h.image}), ErrRefused)

	for range 2 {
		require.NoError(t, h.Resize(t.Context(), id(1), 128*mib))
		require.NoError(t, h.Resize(t.Context(), id(2), 128*mib))
	}
	h.make(blank) // an outdated assignment may have the old size
	require.ErrorIs(t, h.Resize(t.Context(), id(1), 64*mib), ErrRefused)
	require.ErrorIs(t, h.Resize(t.Context(), id(3), 64*mib), ErrNotFound)
	files, err := h.Open(t.Context(), id(1), Attachment{"vm", 1})
	require.NoError(t, err)
	st, err := files.Content.Stat()
	require.NoError(t, err)
	require.Equal(t, int64(128*mib), st.Size())
	require.Equal(t, uint64(128*mib), files.Size)
	require.Nil(t, files.Base)
	files.Close()
	files, err = h.Open(t.Context(), id(2), Attachment{"vm", 1})
	require.NoError(t, err)
	require.Equal(t, []any{qcow2.QCOW2, qcow2.Raw, uint64(128 * mib)}, []any{files.Format, files.BaseFormat, files.Size})
	files.Close()

	for range 2 {
		require.NoError(t, h.Delete(t.Context(), id(1)))
		require.NoError(t, h.Delete(t.Context(), id(2)))
	}
	require.Empty(t, h.names())
}

// TestOlderAttachmentIsRefused checks that a volume that was opened for an attachment cannot be opened for an older
// one, nor for another VM with the same generation, neither by another host of a shared pool nor after a restart of the
// agent.
func TestOlderAttachmentIsRefused(t *testing.T) {
	dir := t.TempDir()
	a, b := newHost(t, dir, true), newHost(t, dir, true)
	a.make(Volume{ID: id(1), Size: mib})
	open := func(h *host, at Attachment) error {
		files, err := h.Open(t.Context(), id(1), at)
		files.Close()
		return err
	}
	require.NoError(t, open(a, Attachment{"x", 5}))
	require.NoError(t, open(a, Attachment{"x", 5}), "a VM may start again")
	require.NoError(t, a.again())
	for _, h := range []*host{a, b} {
		require.ErrorIs(t, open(h, Attachment{"x", 4}), ErrStale)
		require.ErrorIs(t, open(h, Attachment{"y", 5}), ErrStale)
		require.ErrorIs(t, h.Release(t.Context(), id(1), Attachment{"x", 4}), ErrStale)
		require.ErrorIs(t, open(h, Attachment{"x", 0}), ErrRefused)
	}
	require.NoError(t, open(b, Attachment{"y", 6}))
	require.ErrorIs(t, open(a, Attachment{"x", 5}), ErrStale)
}

// TestOpenVolumeIsLocked checks that a volume is opened once, also in a pool of two hosts, and that it counts as
// flushed only after the last process has closed it. The test duplicates the descriptor in place of QEMU.
func TestOpenVolumeIsLocked(t *testing.T) {
	dir := t.TempDir()
	a, b := newHost(t, dir, true), newHost(t, dir, true)
	a.make(Volume{ID: id(1), Size: mib})
	files, err := a.Open(t.Context(), id(1), Attachment{"x", 1})
	require.NoError(t, err)
	fd, err := unix.FcntlInt(files.Content.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	files.Close()

	for _, h := range []*host{a, b} {
		_, err = h.Open(t.Context(), id(1), Attachment{"y", 2})
		require.ErrorIs(t, err, ErrInUse)
		require.ErrorIs(t, h.Release(t.Context(), id(1), Attachment{"x", 1}), ErrInUse)
		require.ErrorIs(t, h.Delete(t.Context(), id(1)), ErrInUse)
	}
	require.Zero(t, a.list().Volumes[0].Flushed)
	require.Equal(t, Attachment{"x", 1}, b.list().Volumes[0].Attachment, "a refused attachment is not recorded")
	time.AfterFunc(closeTimeout/4, func() { _ = unix.Close(fd) }) // Release waits for a process that is ending
	require.NoError(t, a.Release(t.Context(), id(1), Attachment{"x", 1}))
	require.Equal(t, uint64(1), b.list().Volumes[0].Flushed)
	files, err = b.Open(t.Context(), id(1), Attachment{"x", 1})
	require.NoError(t, err)
	require.Zero(t, b.list().Volumes[0].Flushed, "the content of an open volume is not complete")
	files.Close()
	require.NoError(t, b.Release(t.Context(), id(1), Attachment{"x", 1}))
	require.NoError(t, b.Release(t.Context(), id(9), Attachment{"x", 1}), "a volume that was deleted needs no release")
}

// TestDetachedVolumeStaysClosed checks that a volume cannot be opened for a detached attachment, even if it was never
// opened for this attachment before.
func TestDetachedVolumeStaysClosed(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: mib, Format: qcow2.QCOW2})
	files, err := h.Open(t.Context(), id(1), Attachment{"x", 2})
	require.NoError(t, err)
	require.Equal(t, qcow2.QCOW2, files.Format)
	require.ErrorIs(t, h.Detach(t.Context(), id(1), 1), ErrStale)
	require.ErrorIs(t, h.Detach(t.Context(), id(1), 2), ErrInUse)
	files.Close()
	for range 2 {
		require.NoError(t, h.Detach(t.Context(), id(1), 2))
		require.NoError(t, h.Release(t.Context(), id(1), Attachment{"x", 2}), "it was released by Detach")
	}
	for _, generation := range []uint64{5, 7} { // the host never opened the volume for them
		require.NoError(t, h.Detach(t.Context(), id(1), generation))
		require.Equal(t, generation, h.list().Volumes[0].Flushed)
		for _, a := range []Attachment{{"x", 2}, {"y", 4}, {"y", generation}} {
			_, err = h.Open(t.Context(), id(1), a)
			require.ErrorIs(t, err, ErrStale)
		}
	}
	files, err = h.Open(t.Context(), id(1), Attachment{"y", 8})
	require.NoError(t, err)
	files.Close()
	require.NoError(t, h.Detach(t.Context(), id(9), 1), "a volume that was deleted needs no detachment")
}

// TestLinksAreRefused replaces files of a pool by links, which the agent must not follow.
func TestLinksAreRefused(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, make([]byte, mib), 0o600))
	content := filepath.Join(h.dir, id(1)+".raw")
	for _, link := range []func(from, to string) error{os.Symlink, os.Link} {
		h.make(Volume{ID: id(1), Size: mib})
		require.NoError(t, os.Remove(content))
		require.NoError(t, link(secret, content))
		_, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrNotFound)
		require.Error(t, h.Delete(t.Context(), id(1)))
		require.NotEmpty(t, h.list().Volumes[0].Error)
		require.NoError(t, os.Remove(content))
		require.NoError(t, h.Delete(t.Context(), id(1)))
	}
	require.NoError(t, os.Symlink(secret, filepath.Join(h.dir, id(2)+".json")))
	require.Error(t, h.Create(t.Context(), Volume{ID: id(2), Size: mib}))
	data, err := os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, make([]byte, mib), data)
}

// TestUnknownFilesAreKept checks that files without a record are reported, and neither used nor removed.
func TestUnknownFilesAreKept(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: mib})
	for _, name := range []string{id(2) + ".raw", "backup.tar"} {
		require.NoError(t, os.WriteFile(filepath.Join(h.dir, name), []byte("keep"), 0o600))
	}
	require.NoError(t, h.again())
	require.Equal(t, []string{id(2) + ".raw", "backup.tar"}, h.list().Unknown)
	require.ErrorIs(t, h.Create(t.Context(), Volume{ID: id(2), Size: mib}), ErrRefused)
	require.NoError(t, h.Delete(t.Context(), id(2)))
	data, err := os.ReadFile(filepath.Join(h.dir, id(2)+".raw"))
	require.NoError(t, err)
	require.Equal(t, "keep", string(data))
}

// TestInterruptedChanges puts the files of a pool into the states that a crash at each step of Create and Delete
// leaves. After a restart the agent must finish the creation or deletion. It must not make a new file in place of the
// lost file of a complete volume.
func TestInterruptedChanges(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	v := Volume{ID: id(1), Size: mib}
	for _, content := range []string{"", "partial"} {
		require.NoError(t, h.write(id(1), record{State: creating, Size: mib, Format: qcow2.Raw}))
		if content != "" {
			require.NoError(t, os.WriteFile(filepath.Join(h.dir, id(1)+".raw"), []byte(content), 0o600))
		}
		require.NoError(t, os.WriteFile(filepath.Join(h.dir, "."+id(1)+".raw1234567890123456"), nil, 0o600))
		require.NoError(t, h.again())
		require.Empty(t, h.list().Volumes)
		_, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
		require.ErrorIs(t, err, ErrNotFound)
		h.make(v)
		require.Equal(t, uint64(mib), h.list().Volumes[0].Size)
		require.Equal(t, []string{id(1) + ".json", id(1) + ".raw"}, h.names())
		require.NoError(t, h.Delete(t.Context(), id(1)))
	}
	for _, lost := range []bool{false, true} {
		h.make(v)
		require.NoError(t, h.write(id(1), record{State: deleting, Size: mib, Format: qcow2.Raw}))
		if lost {
			require.NoError(t, os.Remove(filepath.Join(h.dir, id(1)+".raw")))
		}
		require.NoError(t, h.again())
		require.ErrorIs(t, h.Create(t.Context(), v), ErrRefused)
		require.NoError(t, h.Delete(t.Context(), id(1)))
		require.Empty(t, h.names())
	}
	h.make(v)
	require.NoError(t, os.Remove(filepath.Join(h.dir, id(1)+".raw")))
	require.ErrorContains(t, h.Create(t.Context(), v), "missing from the pool")
	_, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
	require.ErrorContains(t, err, "missing from the pool")
	require.Contains(t, h.list().Volumes[0].Error, "missing from the pool")
}

// TestForeignDirectoryIsNoPool checks which directories OpenPool refuses. One of them is the empty directory of a pool
// whose file system is not mounted.
func TestForeignDirectoryIsNoPool(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	path := h.o.Path
	h.o.Path = t.TempDir()
	require.ErrorContains(t, h.again(), "is its file system mounted?")
	h.o.Path = newHost(t, t.TempDir(), false).dir
	require.ErrorContains(t, h.again(), "is another pool")
	h.o.Path = filepath.Join(t.TempDir(), "none")
	require.ErrorIs(t, h.again(), os.ErrNotExist)
	h.o.Path, h.o.State = t.TempDir(), filepath.Join(t.TempDir(), "new")
	require.NoError(t, os.WriteFile(filepath.Join(h.o.Path, "photo"), nil, 0o600))
	require.ErrorContains(t, h.again(), "not empty")
	require.NoError(t, os.Remove(filepath.Join(h.o.Path, "photo")))
	require.NoError(t, os.Chmod(h.o.Path, 0o777))
	require.ErrorContains(t, h.again(), "other users can write")
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(path, link))
	h.o.Path = link
	require.Error(t, h.again())
	h.o.Path = path
	require.NoError(t, h.again(), "a host that has not used the pool before may join it")
}

// TestFullPool creates a volume in a pool that is too full. The failed creation must leave no file that is listed as a
// volume. The creation must succeed when the pool has room again.
func TestFullPool(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test-volume", dir, "tmpfs", 0, "size=1m,mode=700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	h := newHost(t, dir, false)
	t.Cleanup(h.Close) // before the file system is unmounted
	filler, err := os.Create(filepath.Join(dir, "filler"))
	require.NoError(t, err)
	defer filler.Close()
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, unix.ENOSPC)
	err = h.Create(t.Context(), Volume{ID: id(1), Size: mib, Image: &h.image})
	require.ErrorContains(t, err, "the storage pool is full")
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Empty(t, h.list().Volumes)
	space, err := h.Space()
	require.NoError(t, err)
	require.Equal(t, Space{Total: mib}, space)

	require.NoError(t, filler.Truncate(0))
	h.make(Volume{ID: id(1), Size: mib, Image: &h.image})
	files, err := h.Open(t.Context(), id(1), Attachment{"x", 1})
	require.NoError(t, err)
	files.Close()
}

// TestCallsWaitForTheirTurn checks that a method waits while another host changes the pool, and follows its context.
func TestCallsWaitForTheirTurn(t *testing.T) {
	dir := t.TempDir()
	a, b := newHost(t, dir, true), newHost(t, dir, true)
	inside, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- a.change(t.Context(), func() error { close(inside); <-leave; return nil })
	}()
	<-inside
	late, cancel := context.WithTimeout(t.Context(), 2*lockPause)
	defer cancel()
	err := b.Create(late, Volume{ID: id(1), Size: mib})
	require.True(t, errors.Is(err, context.DeadlineExceeded), "%v", err)
	require.Empty(t, b.names())
	close(leave)
	require.NoError(t, <-done)
	b.make(Volume{ID: id(1), Size: mib})
}
