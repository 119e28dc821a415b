package volume

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// openAtOnce opens a volume on two hosts at the same time, 100 times, for different VMs with the same generation, as
// after a forged assignment. One host must get the volume, and the error of the other host must name the VM that has
// it.
func (l *rbdLab) openAtOnce(a, b *RBDPool) {
	l.Helper()
	ctx := l.Context()
	require.NoError(l, a.Create(ctx, Volume{ID: id(2), Size: mib}))
	for generation := uint64(1); generation <= 100; generation++ {
		var errs [2]error
		at := []Attachment{{"vm-x", generation}, {"vm-y", generation}}
		var calls sync.WaitGroup
		for i, h := range []*RBDPool{a, b} {
			calls.Go(func() { _, errs[i] = h.Open(ctx, id(2), at[i]) })
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(l, errs[winner])
		require.ErrorIs(l, errs[1-winner], ErrStale, "two hosts have the volume open")
		require.ErrorContains(l, errs[1-winner], "belongs to VM "+at[winner].VM)
		require.ErrorIs(l, []*RBDPool{a, b}[1-winner].Confirm(ctx, id(2), at[1-winner]), ErrStale)
		require.NoError(l, b.Release(ctx, id(2), at[winner]), "each host can release what no process has open")
	}
	require.NoError(l, a.Delete(ctx, id(2)))
}

// slowRBD is a connection to a fakeRBD. It calls beforeSet, unless it is nil, before it replaces a record.
type slowRBD struct {
	*fakeRBD
	beforeSet func()
}

func (s *slowRBD) SetRecord(
	ctx context.Context, in *rbdv1.SetRecordRequest, opts ...grpc.CallOption,
) (*emptypb.Empty, error) {
	if before := s.beforeSet; before != nil {
		s.beforeSet = nil
		before()
	}
	return s.fakeRBD.SetRecord(ctx, in, opts...)
}

// TestRecordChangesDuringOpen opens a volume on a host that is slow: between its read and its write of the record,
// another host opens the volume for another VM. The slow host must not get the volume.
func TestRecordChangesDuringOpen(t *testing.T) {
	ctx := t.Context()
	cluster := &fakeRBD{}
	slow := &slowRBD{fakeRBD: cluster}
	a := NewRBDPool(RBDOptions{Client: slow, Pool: "pool", User: "user", Key: "key"})
	b := NewRBDPool(RBDOptions{Client: cluster, Pool: "pool", User: "user", Key: "key"})
	require.NoError(t, a.Create(ctx, Volume{ID: id(1), Size: 64 * mib}))
	tests := []struct {
		generation uint64
		other      Attachment
		want       string
	}{
		{1, Attachment{"vm-y", 1}, "generation 1 belongs to VM vm-y"},
		{2, Attachment{"vm-y", 3}, "generation 2 is older than 3, which VM vm-y has"},
	}
	for _, test := range tests {
		slow.beforeSet = func() {
			_, err := b.Open(ctx, id(1), test.other)
			require.NoError(t, err)
		}
		_, err := a.Open(ctx, id(1), Attachment{"vm-x", test.generation})
		require.ErrorIs(t, err, ErrStale, "two hosts have the volume open")
		require.ErrorContains(t, err, test.want)
		require.NoError(t, b.Detach(ctx, id(1), test.other.Generation))
	}
}

// TestFenceOfOlderRecord fences volumes that an older agent attached. Their records do not have the addresses of the
// processes that had the image open, so only the present clients of the image can be blocked. A process that the Ceph
// cluster has forgotten is not blocked, as docs/operations.md says.
func TestFenceOfOlderRecord(t *testing.T) {
	const record = `{"version":1,"state":"ready","size":67108864,"format":"raw","attachment":{"vm":"one","generation":3},` +
		`"flushed":2,"detached":2}` + "\n"
	for _, clients := range [][]string{{"192.0.2.1:0/1", "192.0.2.1:0/2"}, nil} {
		t.Run(fmt.Sprint(len(clients), " clients"), func(t *testing.T) {
			ctx := t.Context()
			fake := &fakeRBD{record: []byte(record), size: 64 * mib, clients: clients}
			p := NewRBDPool(RBDOptions{Client: fake, Pool: "pool", User: "user", Key: "key"})
			require.NoError(t, p.Fence(ctx, id(1), 3))
			require.Equal(t, clients, fake.blocked)
			status, err := p.Status(ctx, id(1))
			require.NoError(t, err)
			require.EqualValues(t, 3, status.Flushed)
			require.ErrorIs(t, p.Confirm(ctx, id(1), Attachment{"one", 3}), ErrStale)
			fake.clients = nil
			_, err = p.Open(ctx, id(1), Attachment{"two", 4})
			require.NoError(t, err)
		})
	}
}
