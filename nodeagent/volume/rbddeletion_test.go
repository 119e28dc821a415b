package volume

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// cutOffRBD is the connection of a host to a fakeRBD. The connection is lost for some time: cutOffRBD calls away before
// its call of the given name takes effect.
type cutOffRBD struct {
	*fakeRBD
	call string
	away func()
}

func (c *cutOffRBD) pause(call string) {
	if c.call == call {
		c.call = ""
		c.away()
	}
}

func (c *cutOffRBD) GetRecord(ctx context.Context, in *rbdv1.GetRecordRequest, opts ...grpc.CallOption) (*rbdv1.Record, error) {
	c.pause("GetRecord")
	return c.fakeRBD.GetRecord(ctx, in, opts...)
}

func (c *cutOffRBD) SetRecord(ctx context.Context, in *rbdv1.SetRecordRequest, opts ...grpc.CallOption) (*emptypb.Empty, error) {
	c.pause("SetRecord")
	return c.fakeRBD.SetRecord(ctx, in, opts...)
}

func (c *cutOffRBD) CreateImage(
	ctx context.Context, in *rbdv1.CreateImageRequest, opts ...grpc.CallOption,
) (*emptypb.Empty, error) {
	c.pause("CreateImage")
	return c.fakeRBD.CreateImage(ctx, in, opts...)
}

// TestDeletedVolumeIsNotMade interrupts the connection of a host while the host makes a volume. Meanwhile another host
// makes and deletes the volume, or only deletes it. The first host continues afterwards, and must leave neither a
// record nor an image.
func TestDeletedVolumeIsNotMade(t *testing.T) {
	for _, call := range []string{"GetRecord", "SetRecord", "CreateImage"} {
		for _, made := range []bool{true, false} {
			t.Run(fmt.Sprintf("before %s, made by the other host: %t", call, made), func(t *testing.T) {
				ctx := t.Context()
				cluster := &fakeRBD{}
				cut := &cutOffRBD{fakeRBD: cluster, call: call}
				old := NewRBDPool(RBDOptions{Client: cut, Pool: "pool", User: "user", Key: "key"})
				other := NewRBDPool(RBDOptions{Client: cluster, Pool: "pool", User: "user", Key: "key"})
				v := Volume{ID: id(1), Size: mib}
				cut.away = func() {
					if made {
						require.NoError(t, other.Create(ctx, v))
					}
					require.NoError(t, other.Delete(ctx, id(1)))
					require.NoError(t, other.Delete(ctx, id(1)), "a repeated call")
				}
				err := old.Create(ctx, v)
				require.ErrorIs(t, err, ErrRefused, "a deleted volume was made again")
				require.ErrorContains(t, err, "the volume was deleted")
				require.Empty(t, cluster.record)
				require.Zero(t, cluster.size, "the image of a deleted volume remains")
				_, err = old.Open(ctx, id(1), Attachment{VM: "one", Generation: 1})
				require.ErrorIs(t, err, ErrNotFound)
			})
		}
	}
}

// TestDeletionsAreForgotten fills a list of deleted volumes. The oldest entry must be removed. No list may begin with
// another list, because SetRecord compares only the beginning.
func TestDeletionsAreForgotten(t *testing.T) {
	ctx := t.Context()
	f := &fakeRBD{}
	p := NewRBDPool(RBDOptions{Client: f, Pool: "pool"})
	name := p.deletionsOf(id(1)).GetImage()
	full := deletions{Version: deletionsVersion, Volumes: map[string]int64{}}
	for n := range maxDeletions {
		full.Volumes[fmt.Sprintf("%08x-0000-4000-8000-0000000000%s", n+0x100, id(1)[34:])] = 1000 + int64(n)
	}
	text, err := json.Marshal(full)
	require.NoError(t, err)
	require.Less(t, len(text), 62<<10)
	f.deleted = map[string][]byte{name: append(text, '\n')}
	require.NoError(t, p.recordDeletion(ctx, id(1)))
	now, _, err := p.readDeletions(ctx, p.deletionsOf(id(1)))
	require.NoError(t, err)
	require.Len(t, now.Volumes, maxDeletions)
	require.Contains(t, now.Volumes, id(1))
	require.NotContains(t, now.Volumes, "00000100-0000-4000-8000-0000000000"+id(1)[34:], "the oldest entry")

	f.deleted[name] = []byte(`{"version":9}` + "\n")
	require.ErrorContains(t, p.Create(ctx, Volume{ID: id(1), Size: mib}), "version 9 is unknown to this agent")
	require.Empty(t, f.record)
}

// TestSweepKeepsVolumes sweeps while a host deletes a complete volume whose image a client has open. Only that host may
// remove the record and the image. Until then the deletion must not be forgotten.
func TestSweepKeepsVolumes(t *testing.T) {
	ctx := t.Context()
	f := &sweptRBD{fakeRBD: &fakeRBD{}}
	p := NewRBDPool(RBDOptions{Client: f, Pool: "pool"})
	require.NoError(t, p.Create(ctx, Volume{ID: id(1), Size: mib}))
	f.clients = []string{"192.0.2.1:0/1"}
	require.ErrorIs(t, p.Delete(ctx, id(1)), ErrInUse)
	require.NoError(t, p.SweepDeletions(ctx, 0))
	require.NotEmpty(t, f.record)
	require.NotZero(t, f.size)
	f.clients = nil
	require.NoError(t, p.Delete(ctx, id(1)))
	require.ErrorIs(t, p.Create(ctx, Volume{ID: id(1), Size: mib}), errDeleted)
	f.size = mib // A host has made the image and then ended.
	require.NoError(t, p.SweepDeletions(ctx, time.Hour))
	require.Zero(t, f.size)
	require.ErrorIs(t, p.Create(ctx, Volume{ID: id(1), Size: mib}), errDeleted)
	require.NoError(t, p.SweepDeletions(ctx, 0))
	require.NoError(t, p.Create(ctx, Volume{ID: id(1), Size: mib}), "the deletion is forgotten")
}

// sweptRBD is a fakeRBD that lists its image, and refuses to remove it while a client has it open.
type sweptRBD struct{ *fakeRBD }

func (f *sweptRBD) ListImages(context.Context, *rbdv1.ListImagesRequest, ...grpc.CallOption) (*rbdv1.ListImagesResponse, error) {
	out := &rbdv1.ListImagesResponse{Images: []string{"image-of-others"}}
	if f.size > 0 {
		out.Images = append(out.Images, volumeImage(id(1)))
	}
	return out, nil
}

func (f *sweptRBD) RemoveImage(
	ctx context.Context, in *rbdv1.RemoveImageRequest, opts ...grpc.CallOption,
) (*emptypb.Empty, error) {
	if len(f.clients) > 0 {
		return nil, status.Error(codes.FailedPrecondition, "a client has the image open")
	}
	return f.fakeRBD.RemoveImage(ctx, in, opts...)
}

// deleteBeforeOther deletes a volume on one host before another host makes it.
func (l *rbdLab) deleteBeforeOther(a, b *RBDPool) {
	l.Helper()
	ctx := l.Context()
	v := Volume{ID: id(3), Size: mib}
	require.NoError(l, a.Create(ctx, v))
	require.NoError(l, a.Delete(ctx, v.ID))
	l.ceph.Run("rbd", "create", "--size", "1M", rbdtest.Pool+"/"+volumeImage(v.ID)) // what another host was making
	require.ErrorIs(l, b.Create(ctx, v), errDeleted)
}
