package transport

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// nonMember returns a Transport that serves nothing. Its certificate is for the member ID id, which need not belong to
// the cluster.
func (w *testCluster) nonMember(id uint64, members map[uint64]string) *Transport {
	m, err := New(Options{
		Self: id, Members: members, Certificate: issued(w.t, w.authority, mtls.Member, strconv.FormatUint(id, 10), time.Now()),
		Authority: w.authority, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(w.t, err)
	return m
}

// TestMembersChange adds, moves and removes members with SetMembers while the transport runs, and checks who may call
// which commands.
func TestMembersChange(t *testing.T) {
	w := newTestCluster(t, 2)
	ctx := limited(t)
	one := w.servers[1].mesh
	one.HandleDirect("who", func(_ context.Context, from uint64, body []byte) ([]byte, error) {
		return fmt.Appendf(nil, "%d says %s", from, body), nil
	})
	one.HandleNonMember("join", func(_ context.Context, from uint64, _ []byte) ([]byte, error) {
		if from == 0 {
			return nil, fault.New(fault.FailedPrecondition, "no id")
		}
		return fmt.Appendf(nil, "%d", from), nil
	})
	met := make(chan uint64, 10)
	one.opts.UnknownMember = func(id uint64) { met <- id }
	answer, err := w.servers[2].mesh.Direct(ctx, 1, "who", []byte("hello"))
	require.NoError(t, err)
	require.Equal(t, "2 says hello", string(answer))

	// A caller that is not a known member may call only the commands of HandleNonMember, by address.
	three := w.nonMember(3, map[uint64]string{1: w.addresses[1]})
	answer, err = three.Ask(ctx, w.addresses[1], "join", nil)
	require.NoError(t, err)
	require.Equal(t, "3", string(answer))
	_, err = three.Ask(ctx, w.addresses[1], "who", nil)
	require.ErrorContains(t, err, "member 3 is not known here")
	require.Equal(t, uint64(3), <-met)
	_, err = three.Call(ctx, 1, "anything", nil, nil)
	require.ErrorContains(t, err, "member 3 is not known here")
	_, err = w.nonMember(0, nil).Ask(ctx, w.addresses[1], "join", nil)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)

	members := maps.Clone(w.addresses)
	members[3] = "127.0.0.1:1"
	require.NoError(t, one.SetMembers(members, nil))
	_, err = three.Ask(ctx, w.addresses[1], "who", []byte("hello"))
	require.NoError(t, err)
	require.Equal(t, []uint64{2, 3}, slices.Sorted(maps.Keys(one.Members())))
	kept := one.link(2)
	require.NoError(t, one.SetMembers(w.addresses, []uint64{3}))
	require.Same(t, kept, one.link(2), "the connection to a member that stays is kept")
	require.Nil(t, one.link(3))
	one.Send(message.Envelope{From: 1, To: 3, Kind: message.KindDirIDRequest})
	_, err = one.Direct(ctx, 3, "who", nil)
	require.ErrorIs(t, err, leader.ErrNotSent)
	_, err = three.Ask(ctx, w.addresses[1], "who", nil)
	require.ErrorContains(t, err, "member 3 was removed from the cluster")
	require.True(t, isRemoved(err), "%v", err)

	// A member whose address changes must get a new connection.
	moved := maps.Clone(w.addresses)
	moved[2] = "127.0.0.1:1"
	require.NoError(t, one.SetMembers(moved, nil))
	require.NotSame(t, kept, one.link(2))
	_, err = one.Direct(ctx, 2, "who", nil)
	require.ErrorIs(t, err, leader.ErrNotSent)
}

// TestRemovedMemberIsInformed removes a member while it is not connected. When it connects, its callback Removed must
// be called.
func TestRemovedMemberIsInformed(t *testing.T) {
	w := newTestCluster(t, 2)
	informed := make(chan struct{}, 1)
	w.servers[2].mesh.opts.Removed = func() {
		select {
		case informed <- struct{}{}:
		default:
		}
	}
	require.NoError(t, w.servers[1].mesh.SetMembers(nil, []uint64{2}))
	w.servers[1].stopServing() // closes the open connections
	l, err := net.Listen("tcp", w.addresses[1])
	require.NoError(t, err)
	w.servers[1].serve(l)
	select {
	case <-informed:
	case <-limited(t).Done():
		t.Fatal("the removed member was not informed")
	}
}
