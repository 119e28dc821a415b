package volume

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// rbdLab is a Ceph cluster with hosts that use its pool.
type rbdLab struct {
	*testing.T
	ceph    *rbdtest.Ceph
	program string
}

func newRBDLab(t *testing.T) *rbdLab {
	return &rbdLab{T: t, ceph: rbdtest.Start(t), program: rbdtest.Program(t)}
}

// host returns the pool as another host sees it: with its own helper and image cache. The function edit can change the
// address and the user. The hosts can fetch the given images.
func (l *rbdLab) host(edit func(*rbdv1.ConnectRequest), content ...[]byte) *RBDPool {
	l.Helper()
	images, err := disk.OpenImages(filepath.Join(l.TempDir(), "images"), func(_ context.Context, sum string, at int64) (io.ReadCloser, error) {
		for _, c := range content {
			if imageOf(c).SHA256 == sum {
				return io.NopCloser(bytes.NewReader(c[at:])), nil
			}
		}
		return nil, os.ErrNotExist
	})
	require.NoError(l, err)
	l.Cleanup(images.Close)
	connect := l.ceph.Connect()
	if edit != nil {
		edit(connect)
	}
	cluster := rbd.New(rbd.Options{Program: l.program, UID: 65534, GID: 65534, Timeout: 60 * time.Second, Log: slog.Default()}, connect)
	l.Cleanup(cluster.Close)
	return NewRBDPool(RBDOptions{
		Client: rbdv1.NewRbdServiceClient(cluster), Monitors: []string{l.ceph.Address}, Pool: rbdtest.Pool,
		User: connect.User, Key: connect.Key, Images: images,
	})
}

// imageOf describes an image file with this content.
func imageOf(content []byte) disk.Image {
	sum := sha256.Sum256(content)
	return disk.Image{SHA256: hex.EncodeToString(sum[:]), Size: int64(len(content)), Format: qcow2.Detect(content)}
}

// writer is a process of qemu-io that has an RBD image open.
type writer struct {
	*rbdLab
	cmd   *exec.Cmd
	input io.Writer
	lines *bufio.Scanner
}

func (l *rbdLab) writer(image string) *writer {
	l.Helper()
	w := &writer{rbdLab: l, cmd: l.ceph.Command("qemu-io", "-f", "raw", "rbd:"+rbdtest.Pool+"/"+image+":conf="+l.ceph.Conf)}
	var err error
	w.input, err = w.cmd.StdinPipe()
	require.NoError(l, err)
	output, err := w.cmd.StdoutPipe()
	require.NoError(l, err)
	w.cmd.Stderr = w.cmd.Stdout
	w.lines = bufio.NewScanner(output)
	require.NoError(l, w.cmd.Start())
	l.Cleanup(func() { _ = w.cmd.Process.Kill(); _ = w.cmd.Wait() })
	return w
}

// do makes the writer execute a command of qemu-io, and waits until a line of its output contains text.
func (w *writer) do(command, text string) {
	w.Helper()
	_, err := io.WriteString(w.input, command+"\n")
	require.NoError(w, err)
	for w.lines.Scan() {
		if strings.Contains(w.lines.Text(), text) {
			return
		}
	}
	require.Fail(w, "qemu-io has ended", "%s", text)
}

// content returns the bytes of a volume.
func (l *rbdLab) content(id string) []byte {
	l.Helper()
	return l.ceph.Output("rbd", "export", "--no-progress", rbdtest.Pool+"/"+volumeImage(id), "-")
}

// TestRBDAttachments checks that an RBD image has one writer: two hosts open it for attachments of growing generations,
// while processes still have it open, hang or were killed.
func TestRBDAttachments(t *testing.T) {
	l := newRBDLab(t)
	a, b := l.host(nil), l.host(nil)
	ctx := t.Context()
	first, second := Attachment{VM: "one", Generation: 1}, Attachment{VM: "two", Generation: 2}
	for _, host := range []*RBDPool{a, b} {
		require.NoError(t, host.Create(ctx, Volume{ID: id(1), Size: 64 * mib}))
	}
	files, err := a.Open(ctx, id(1), first)
	require.NoError(t, err)
	require.EqualValues(t, 64*mib, files.Size)
	require.Equal(t, "volume-"+id(1), files.RBD.Image)
	status, err := b.Status(ctx, id(1))
	require.NoError(t, err)
	require.Equal(t, first, status.Attachment, "every host sees the attachment before QEMU opens the image")
	_, err = b.Open(ctx, id(1), second)
	require.ErrorIs(t, err, ErrInUse, "the first attachment is not flushed")
	_, err = b.Open(ctx, id(1), Attachment{VM: "other", Generation: 1})
	require.ErrorIs(t, err, ErrStale)

	w := l.writer(files.RBD.Image)
	w.do("write -P 1 0 4k", "ops;")
	_, err = a.Open(ctx, id(1), first)
	require.ErrorIs(t, err, ErrInUse, "a process has the image open")
	require.ErrorIs(t, a.Detach(ctx, id(1), 1), ErrInUse)
	require.ErrorIs(t, a.Delete(ctx, id(1)), ErrInUse)
	status, err = a.Status(ctx, id(1))
	require.NoError(t, err)
	require.Zero(t, status.Flushed)

	// A process that hangs while its host releases the image cannot write afterwards.
	require.NoError(t, w.cmd.Process.Signal(syscall.SIGSTOP))
	require.NoError(t, a.Release(ctx, id(1), first))
	require.NoError(t, a.Release(ctx, id(1), first), "a repeated call")
	require.NoError(t, w.cmd.Process.Signal(syscall.SIGCONT))
	w.do("write -P 2 0 4k", "write failed")
	require.NoError(t, w.cmd.Process.Kill())
	require.NoError(t, a.Detach(ctx, id(1), 1))

	files, err = b.Open(ctx, id(1), second)
	require.NoError(t, err)
	_, err = a.Open(ctx, id(1), first)
	require.ErrorIs(t, err, ErrStale, "the first attachment is over on every host")
	require.ErrorIs(t, a.Release(ctx, id(1), first), ErrStale)
	w = l.writer(files.RBD.Image)
	w.do("read -P 1 0 4k", "ops;")
	w.do("write -P 3 4k 4k", "ops;")
	_, err = io.WriteString(w.input, "quit\n")
	require.NoError(t, err)
	require.NoError(t, b.Release(ctx, id(1), second))
	require.NoError(t, b.Detach(ctx, id(1), 2))
	_, err = b.Open(ctx, id(1), second)
	require.ErrorIs(t, err, ErrStale, "a detached attachment is over")

	l.fenceWriter(a, b)
	l.openAtOnce(a, b)
	require.NoError(t, b.Resize(ctx, id(1), 96*mib))
	require.NoError(t, a.Resize(ctx, id(1), 96*mib), "a repeated call")
	require.ErrorIs(t, a.Resize(ctx, id(1), 64*mib), ErrRefused)
	require.Len(t, l.content(id(1)), 96*mib)
	for _, host := range []*RBDPool{b, a} {
		require.NoError(t, host.Delete(ctx, id(1)))
	}
	_, err = a.Open(ctx, id(1), Attachment{VM: "one", Generation: 3})
	require.ErrorIs(t, err, ErrNotFound)
	l.deleteBeforeOther(a, b)
	require.Empty(t, l.ceph.Run("rbd", "ls", rbdtest.Pool))
	require.NoError(t, a.SweepDeletions(ctx, 0))
	require.NotContains(t, l.ceph.Run("rados", "-p", rbdtest.Pool, "ls"), "trivet.record")
}

// fenceWriter fences a volume while a process of the host that had it still writes. The process must not be able to
// write when the next attachment begins, and what it has written before must be there.
func (l *rbdLab) fenceWriter(lost, other *RBDPool) {
	l.Helper()
	ctx, third := l.Context(), Attachment{VM: "three", Generation: 3}
	files, err := lost.Open(ctx, id(1), third)
	require.NoError(l, err)
	w := l.writer(files.RBD.Image)
	w.do("write -P 4 8k 4k", "ops;")
	require.NoError(l, lost.Confirm(ctx, id(1), third))
	require.ErrorIs(l, other.Detach(ctx, id(1), 4), ErrInUse)
	require.NoError(l, other.Fence(ctx, id(1), 4))
	require.NoError(l, other.Fence(ctx, id(1), 4), "a repeated call")
	require.ErrorIs(l, lost.Confirm(ctx, id(1), third), ErrStale)
	require.ErrorIs(l, other.Fence(ctx, id(1), 2), ErrStale)
	fifth := Attachment{VM: "five", Generation: 5}
	files, err = other.Open(ctx, id(1), fifth)
	require.NoError(l, err)
	next := l.writer(files.RBD.Image)
	next.do("read -P 4 8k 4k", "ops;")
	next.do("write -P 5 8k 4k", "ops;")
	require.NoError(l, other.Confirm(ctx, id(1), fifth))
	w.do("write -P 6 8k 4k", "write failed")
	next.do("read -P 5 8k 4k", "ops;")
	_, err = io.WriteString(next.input, "quit\n")
	require.NoError(l, err)
	require.NoError(l, w.cmd.Process.Kill())
	require.NoError(l, other.Release(ctx, id(1), fifth))
	require.NoError(l, other.Detach(ctx, id(1), 5))
}

// flattenAll flattens the volumes 0 to n-1 at once. Meanwhile the helper, which has their images open, must not be
// listed as a client: a VM could otherwise not open them, and Release would make the cluster block the helper.
func (l *rbdLab) flattenAll(host *RBDPool, n int) {
	l.Helper()
	var all errgroup.Group
	for i := range n {
		all.Go(func() error { return host.Flatten(l.Context(), id(i), nil) })
	}
	done := make(chan error, 1)
	go func() { done <- all.Wait() }()
	for {
		for i := range n {
			image, err := host.image(l.Context(), id(i))
			require.NoError(l, err)
			require.Empty(l, image.GetClients(), "volume %d", i)
		}
		select {
		case err := <-done:
			require.NoError(l, err)
			return
		default:
		}
	}
}

// removeBases deletes the two base images of the pool, which have no clones. Meanwhile a volume becomes a clone of the
// base image of one, which must remain until the volume is deleted.
func (l *rbdLab) removeBases(host *RBDPool, image disk.Image) {
	l.Helper()
	ctx := l.Context()
	bases := func() (n int) { return strings.Count(l.ceph.Run("rbd", "ls", rbdtest.Pool), "image-") }
	l.ceph.Run("rbd", "create", "--size", "1M", rbdtest.Pool+"/image-"+strings.Repeat("a", 64)+".partial")
	l.ceph.Run("rbd", "create", "--size", "1M", rbdtest.Pool+"/image-of-an-operator")
	for range 2 {
		require.NoError(l, host.RemoveUnusedBases(ctx, time.Hour))
		require.Equal(l, 4, bases(), "a base image is deleted too early")
	}
	require.NoError(l, host.Create(ctx, Volume{ID: id(9), Size: 8 * mib, Image: &image}))
	require.NoError(l, host.RemoveUnusedBases(ctx, 0))
	require.Equal(l, 2, bases(), "the base image of the volume, and the operator's image")
	require.NoError(l, host.Delete(ctx, id(9)))
	require.NoError(l, host.RemoveUnusedBases(ctx, 0))
	require.Equal(l, 2, bases(), "the base image had a clone at the last call")
	require.NoError(l, host.RemoveUnusedBases(ctx, 0))
	require.Equal(l, 1, bases())
	l.ceph.Run("rbd", "rm", "--no-progress", rbdtest.Pool+"/image-of-an-operator")
	require.NotContains(l, l.ceph.Run("rados", "-p", rbdtest.Pool, "ls"), "trivet.record.image-")
	require.NoError(l, host.Create(ctx, Volume{ID: id(10), Size: 8 * mib, Image: &image}), "the base image is imported again")
	require.NoError(l, host.Delete(ctx, id(10)))
}

// TestRBDVolumesOfImages makes volumes from a raw and a QCOW2 image, on two hosts at once. Each image is imported once.
// Then a registered image is used. Then calls fail: for images without a record, in a missing pool, with a wrong key, and while the cluster is stopped.
func TestRBDVolumesOfImages(t *testing.T) {
	l := newRBDLab(t)
	ctx := t.Context()
	raw := append(bytes.Repeat([]byte("trivet! "), mib/8), make([]byte, 5*mib)...)
	path := filepath.Join(t.TempDir(), "image")
	require.NoError(t, os.WriteFile(path, raw, 0o600))
	out, err := exec.Command("qemu-img", "convert", "-c", "-O", "qcow2", "-f", "raw", path, path+".qcow2").CombinedOutput()
	require.NoError(t, err, "%s", out)
	packed, err := os.ReadFile(path + ".qcow2")
	require.NoError(t, err)
	a, b := l.host(nil, raw, packed), l.host(nil, raw, packed)
	var group errgroup.Group
	for n := range 8 {
		image := imageOf([][]byte{raw, packed}[n%2])
		for _, host := range []*RBDPool{a, b} {
			group.Go(func() error { // as Storage does, until the import that another call has begun is complete
				var err error
				for range 600 {
					if err = host.Create(ctx, Volume{ID: id(n), Size: 8 * mib, Image: &image}); err == nil {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
				return err
			})
		}
	}
	require.NoError(t, group.Wait())
	require.Len(t, strings.Fields(l.ceph.Run("rbd", "ls", rbdtest.Pool)), 8+2, "one base image for each image")
	for n := range 2 {
		content := l.content(id(n))
		require.Len(t, content, 8*mib)
		require.True(t, bytes.Equal(raw, content[:len(raw)]), "volume %d", n)
	}
	l.flattenAll(a, 8)
	require.NoError(t, a.Flatten(ctx, id(1), nil), "a repeated call")
	flat, err := b.Status(ctx, id(1))
	require.NoError(t, err)
	require.Equal(t, []any{true, (*disk.Image)(nil), ""}, []any{flat.Flattened, flat.Image, flat.Error})
	require.NotContains(t, l.ceph.Run("rbd", "info", rbdtest.Pool+"/"+volumeImage(id(1))), "parent:")
	require.True(t, bytes.Equal(raw, l.content(id(1))[:len(raw)]))
	l.removeBases(a, imageOf(raw))
	image := imageOf(raw)
	require.ErrorIs(t, a.Create(ctx, Volume{ID: id(20), Size: 4 * mib, Image: &image}), ErrRefused, "the image does not fit")
	l.ceph.Run("rbd", "create", "--size", "1M", rbdtest.Pool+"/"+volumeImage(id(21)))
	require.ErrorContains(t, a.Create(ctx, Volume{ID: id(21), Size: mib}), "no record of it")
	l.ceph.Run("rbd", "rm", "--no-progress", rbdtest.Pool+"/"+volumeImage(id(0)))
	status, err := a.Status(ctx, id(0))
	require.NoError(t, err)
	require.Contains(t, status.Error, "missing from the Ceph pool")

	l.registerImage(a, b)

	elsewhere := l.host(nil)
	elsewhere.o.Pool = "other"
	require.ErrorContains(t, elsewhere.Create(ctx, Volume{ID: id(22), Size: mib}), "open pool other")
	stranger := l.host(func(c *rbdv1.ConnectRequest) { c.Key = l.ceph.Run("ceph-authtool", "--gen-print-key") })
	require.ErrorContains(t, stranger.Create(ctx, Volume{ID: id(22), Size: mib}), "refuses the user or its key")
	away := l.host(func(c *rbdv1.ConnectRequest) { c.Monitors = []string{"127.0.0.99:3300"} })
	require.ErrorContains(t, away.Create(ctx, Volume{ID: id(22), Size: mib}), "does not answer")
	l.ceph.Pause()
	require.ErrorContains(t, a.Create(ctx, Volume{ID: id(22), Size: mib}), "does not answer")
	l.ceph.Continue()
	err = a.Create(ctx, Volume{ID: id(22), Size: mib})
	for end := time.Now().Add(2 * time.Minute); err != nil && time.Now().Before(end); time.Sleep(time.Second) {
		err = a.Create(ctx, Volume{ID: id(22), Size: mib})
	}
	require.NoError(t, err, "the cluster answers again")
	for n := range 8 {
		require.NoError(t, b.Delete(ctx, id(n)))
	}
	require.NoError(t, b.Delete(ctx, id(22)))
	require.NoError(t, b.SweepDeletions(ctx, 0))
	require.NotContains(t, fmt.Sprint(l.ceph.Run("rados", "-p", rbdtest.Pool, "ls")), "trivet.record")
}
