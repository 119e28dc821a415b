package volume

import (
	"context"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// fakeExternal is a fakeRBD with an image that can be removed and need not have exclusive-lock.
type fakeExternal struct {
	*fakeRBD
	lock bool
}

func (f *fakeExternal) GetImage(
	ctx context.Context, in *rbdv1.GetImageRequest, opts ...grpc.CallOption,
) (*rbdv1.Image, error) {
	i, err := f.fakeRBD.GetImage(ctx, in, opts...)
	if err == nil {
		i.ExclusiveLock = f.lock
	}
	return i, err
}

// TestRegisteredImage checks an RBD image that existed before its volume: only a suitable image becomes a volume, it
// becomes only one volume, and it stays when the volume is deleted.
func TestRegisteredImage(t *testing.T) {
	ctx := t.Context()
	f := &fakeExternal{fakeRBD: &fakeRBD{}}
	p := NewRBDPool(RBDOptions{Client: f, Pool: "vms"}).Registered("disk")
	v := Volume{ID: id(1), Size: 8 * mib}
	require.ErrorContains(t, p.Create(ctx, v), "the Ceph pool vms has no RBD image disk")
	f.size = 4 * mib
	require.ErrorContains(t, p.Create(ctx, v), "has 4194304 bytes, and the volume 8388608 bytes")
	f.size = 8 * mib
	require.ErrorContains(t, p.Create(ctx, v), "lacks the feature exclusive-lock")
	f.lock, f.clients = true, []string{"192.0.2.1:0/1"}
	err := p.Create(ctx, v)
	require.Error(t, err, "an image that a client has open became a volume")
	require.NotErrorIs(t, err, ErrInUse, "the error must be reported to the control plane")
	require.ErrorContains(t, err, "192.0.2.1:0/1")
	require.Empty(t, f.record, "a refused image has no record")
	f.clients = nil
	require.NoError(t, p.Create(ctx, v))
	require.NoError(t, p.Create(ctx, v), "a repeated call")
	s, err := p.Status(ctx, id(1))
	require.NoError(t, err)
	require.EqualValues(t, 8*mib, s.Size)

	second := Volume{ID: id(2), Size: 8 * mib}
	err = p.Create(ctx, second)
	require.ErrorIs(t, err, ErrRefused, "one image became two volumes")
	require.ErrorContains(t, err, "is registered as volume "+id(1))
	_, err = p.Status(ctx, id(2))
	require.ErrorIs(t, err, ErrNotFound)
	_, err = p.Open(ctx, id(2), Attachment{VM: "two", Generation: 9})
	require.ErrorIs(t, err, ErrNotFound)
	require.NoError(t, p.Detach(ctx, id(2), 9))
	require.NoError(t, p.Fence(ctx, id(2), 9))
	require.NoError(t, p.Delete(ctx, id(2)), "nothing of this volume exists")
	s, err = p.Status(ctx, id(1))
	require.NoError(t, err, "the deletion of another volume released the image")
	require.Zero(t, s.Attachment.Generation)

	// A client in the record, whose connection is lost, is blocked before the image is released.
	_, err = p.Open(ctx, id(1), Attachment{VM: "one", Generation: 1})
	require.NoError(t, err)
	f.clients = []string{"192.0.2.1:0/2"}
	require.NoError(t, p.Confirm(ctx, id(1), Attachment{VM: "one", Generation: 1}))
	f.clients = nil
	require.NoError(t, p.Delete(ctx, id(1)))
	require.EqualValues(t, 8*mib, f.size, "the image was deleted with the volume")
	require.Equal(t, []string{"192.0.2.1:0/2"}, f.blocked)
	require.Empty(t, f.record)
	require.NoError(t, p.Delete(ctx, id(1)), "a repeated call")
	require.ErrorIs(t, p.Create(ctx, v), errDeleted, "the image belongs to a deleted volume")
	require.ErrorIs(t, p.Create(ctx, second), errDeleted)
	require.Empty(t, f.record)
	require.NoError(t, p.Create(ctx, Volume{ID: id(3), Size: 8 * mib}), "the image was released")
}

// registerImage registers an image of the cluster, and uses it on two hosts while a client that is not Trivet's opens it.
func (l *rbdLab) registerImage(a, b *RBDPool) {
	l.Helper()
	ctx := l.Context()
	l.ceph.Run("rbd", "create", "--size", "8M", rbdtest.Pool+"/old-disk")
	a, b = a.Registered("old-disk"), b.Registered("old-disk")
	foreign := l.writer("old-disk")
	foreign.do("write -P 7 0 4k", "ops;")
	v := Volume{ID: id(30), Size: 8 * mib}
	require.ErrorContains(l, a.Create(ctx, v), "clients of the Ceph cluster have RBD image old-disk open")
	foreign.quit()
	for _, host := range []*RBDPool{a, b} {
		require.NoError(l, host.Create(ctx, v))
	}
	require.ErrorContains(l, b.Create(ctx, Volume{ID: id(31), Size: 8 * mib}), "is registered as volume "+id(30))

	first := Attachment{VM: "one", Generation: 1}
	foreign = l.writer("old-disk")
	foreign.do("write -P 8 4k 4k", "ops;")
	_, err := b.Open(ctx, id(30), first)
	require.ErrorIs(l, err, ErrInUse)
	require.ErrorIs(l, err, ErrForeignClient)
	require.ErrorContains(l, err, "clients of the Ceph cluster have the registered RBD image open: old-disk (")
	foreign.quit()
	files, err := b.Open(ctx, id(30), first)
	require.NoError(l, err)
	require.Equal(l, "old-disk", files.RBD.Image)
	w := l.writer(files.RBD.Image)
	require.NoError(l, b.Confirm(ctx, id(30), first))
	w.do("read -P 7 0 4k", "ops;")
	w.do("write -P 9 0 4k", "ops;")
	require.ErrorIs(l, a.Delete(ctx, id(30)), ErrInUse)
	w.quit()
	require.NoError(l, b.Release(ctx, id(30), first))
	require.NoError(l, b.Detach(ctx, id(30), 1))
	require.NoError(l, a.Resize(ctx, id(30), 16*mib))
	require.NoError(l, a.Delete(ctx, id(30)))
	require.NotContains(l, l.ceph.Run("rados", "-p", rbdtest.Pool, "ls"), "trivet.record.old-disk")
	content := l.ceph.Output("rbd", "export", "--no-progress", rbdtest.Pool+"/old-disk", "-")
	require.Len(l, content, 16*mib)
	require.Equal(l, []byte{9, 8, 0}, []byte{content[0], content[4<<10], content[8<<10]})
	_, err = b.Open(ctx, id(30), Attachment{VM: "one", Generation: 2})
	require.ErrorIs(l, err, ErrNotFound)
	l.ceph.Run("rbd", "rm", "--no-progress", rbdtest.Pool+"/old-disk")
}

// quit makes the writer close the image and end.
func (w *writer) quit() {
	w.Helper()
	_, err := io.WriteString(w.input, "quit\n")
	require.NoError(w, err)
	require.NoError(w, w.cmd.Wait())
}
