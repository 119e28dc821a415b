package kv

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

func TestWhoHasOtherData(t *testing.T) {
	a, b, c := hashTold{Hash: 1, Floor: 5}, hashTold{Hash: 2, Floor: 5}, hashTold{Hash: 3, Floor: 5}
	elsewhere, unknown, behind := hashTold{Hash: 2, Floor: 6}, hashTold{Unknown: true}, hashTold{Behind: true}
	for name, c := range map[string]struct {
		told    map[uint64]hashTold
		members int
		who     []uint64
		all     bool
	}{
		"all agree":               {map[uint64]hashTold{1: a, 2: a, 3: a}, 3, nil, true},
		"one is silent":           {map[uint64]hashTold{1: a, 2: a}, 3, nil, false},
		"one differs":             {map[uint64]hashTold{1: a, 2: a, 3: b}, 3, []uint64{3}, true},
		"the leader differs":      {map[uint64]hashTold{1: b, 2: a, 3: a}, 3, []uint64{1}, true},
		"two of five differ":      {map[uint64]hashTold{1: a, 2: b, 3: a, 4: c, 5: a}, 5, []uint64{2, 4}, true},
		"no majority":             {map[uint64]hashTold{1: a, 2: b, 3: c}, 3, []uint64{0}, true},
		"no majority of all":      {map[uint64]hashTold{1: a, 2: b}, 3, []uint64{0}, false},
		"a majority, one silent":  {map[uint64]hashTold{1: a, 2: a, 4: b}, 4, []uint64{0}, false},
		"of two":                  {map[uint64]hashTold{1: a, 2: b}, 2, []uint64{0}, true},
		"compacted elsewhere":     {map[uint64]hashTold{1: a, 2: elsewhere, 3: a}, 3, nil, false},
		"not remembered":          {map[uint64]hashTold{1: a, 2: unknown, 3: unknown}, 3, nil, false},
		"one lacks revisions":     {map[uint64]hashTold{1: a, 2: a, 3: behind}, 3, []uint64{3}, true},
		"the leader has too many": {map[uint64]hashTold{1: a, 2: behind, 3: behind}, 3, []uint64{1}, true},
		"alone":                   {map[uint64]hashTold{1: a}, 1, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			who, all := differing(1, c.told, c.members)
			require.Equal(t, c.who, who)
			require.Equal(t, c.all, all)
		})
	}
}

func (s *seat) sound(t *testing.T) {
	t.Helper()
	_, err := s.Put(t.Context(), &pb.PutRequest{Key: []byte("a"), Value: []byte("sound")})
	require.NoError(t, err)
}

func (s *seat) alarmed(t *testing.T) (who []uint64) {
	t.Helper()
	r, err := s.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_GET, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	for _, a := range r.Alarms {
		who = append(who, a.MemberID)
	}
	return who
}

func (s *seat) disarm(t *testing.T, member uint64) {
	t.Helper()
	_, err := s.Alarm(t.Context(), &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: member, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
}

func quiet(o *Options) { o.CorruptCheck = -1 }

// Whoever came to other data than the majority has the alarm, a follower or the leader, and nobody writes until it is
// taken away. It comes back as long as the data differs.
func TestAMemberWithOtherDataIsFound(t *testing.T) {
	for name, pick := range map[string]func(leads *seat, others []*seat) *seat{
		"a follower": func(_ *seat, others []*seat) *seat { return others[1] },
		"the leader": func(leads *seat, _ []*seat) *seat { return leads },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			w := newTrio(t, quiet)
			leads, others := w.leader(t)
			leads.sound(t)
			_, err := leads.compareNow(ctx)
			require.NoError(t, err)
			require.Empty(t, leads.alarmed(t))

			spoiled := pick(leads, others)
			w.garbles.Store(spoiled.id)
			leads.sound(t)
			_, err = leads.compareNow(ctx)
			require.NoError(t, err)
			require.Equal(t, []uint64{spoiled.id}, leads.alarmed(t))
			for _, s := range w.members {
				_, err := s.Put(ctx, &pb.PutRequest{Key: []byte("a")})
				require.Equal(t, rpctypes.ErrGRPCCorrupt, err)
			}
			leads.disarm(t, spoiled.id)
			require.Empty(t, leads.alarmed(t))
			leads.sound(t)
			_, err = leads.compareNow(ctx)
			require.NoError(t, err)
			require.Equal(t, []uint64{spoiled.id}, leads.alarmed(t))
		})
	}
}

// What differed before a compaction is found by what members remember of it, though all of them have the same since.
func TestOtherDataIsFoundAfterItWasCompacted(t *testing.T) {
	ctx := t.Context()
	w := newTrio(t, quiet)
	leads, others := w.leader(t)
	remembered := func(revision int64) {
		t.Helper()
		_, err := leads.Compact(ctx, &pb.CompactionRequest{Revision: revision})
		require.NoError(t, err)
		for _, s := range w.members {
			require.Eventually(t, func() bool { _, ok := s.opts.Engine.CompactionHash(revision); return ok }, 20*time.Second, time.Millisecond)
		}
	}
	leads.sound(t) // 2
	remembered(2)
	checked, err := leads.compareRemembered(ctx, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, checked)
	require.Empty(t, leads.alarmed(t))

	w.garbles.Store(others[0].id)
	leads.sound(t) // 3
	require.Eventually(t, func() bool { return others[0].opts.Engine.Revision() == 3 }, 20*time.Second, time.Millisecond)
	w.garbles.Store(0)
	leads.sound(t) // 4
	leads.sound(t) // 5
	remembered(4)
	checked, err = leads.compareRemembered(ctx, checked)
	require.NoError(t, err)
	require.EqualValues(t, 4, checked)
	require.Equal(t, []uint64{others[0].id}, leads.alarmed(t))
	_, err = leads.compareNow(ctx)
	require.NoError(t, err)
	leads.disarm(t, others[0].id)
	_, err = leads.compareNow(ctx)
	require.NoError(t, err)
	require.Empty(t, leads.alarmed(t), "what is left is the same everywhere")
}

// Nobody has to ask: whoever leads compares from time to time.
func TestMembersAreComparedAllTheTime(t *testing.T) {
	w := newTrio(t, func(o *Options) { o.CorruptCheck = 10 * time.Millisecond })
	leads, others := w.leader(t)
	w.garbles.Store(others[0].id)
	leads.sound(t)
	require.Eventually(t, func() bool { return len(leads.Alarms()) > 0 }, 20*time.Second, time.Millisecond)
	require.Equal(t, []uint64{others[0].id}, leads.alarmed(t))
}

// A member that does not lead compares nothing, and one that cannot reach the others raises no alarm.
func TestASilentMemberIsNoAlarm(t *testing.T) {
	ctx := t.Context()
	w := newTrio(t, quiet)
	leads, others := w.leader(t)
	leads.sound(t)
	others[0].calls[hashCommand] = func(context.Context, uint64, []byte) ([]byte, error) { return nil, errors.New("no") }
	_, err := leads.compareNow(ctx)
	require.NoError(t, err)
	require.Empty(t, leads.alarmed(t))
}

// A member whose own files are damaged has the alarm as soon as somebody reads them, and keeps it out of what others sent.
func TestDamagedFilesAreAnAlarm(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	w.put(t, "a", strings.Repeat("sound", 40))
	_, err := w.engine.Flush(ctx)
	require.NoError(t, err)
	names, err := w.fs.List("kv/1")
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, ".sst") {
			flip(t, w.fs, "kv/1/"+name, 10)
		}
	}
	w.run(t)
	_, err = w.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	require.ErrorIs(t, err, mvcc.ErrCorrupt)
	require.Eventually(t, func() bool { return len(w.Alarms()) > 0 }, 20*time.Second, time.Millisecond)
	alarms := w.alarms(t)
	require.Equal(t, pb.AlarmType_CORRUPT, alarms[0].Alarm)
	require.EqualValues(t, 1, alarms[0].MemberID)
	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("b")})
	require.Equal(t, rpctypes.ErrGRPCCorrupt, err)

	_, err = w.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT})
	require.NoError(t, err)
	require.Empty(t, w.alarms(t))
	_, err = w.HashKV(ctx, &pb.HashKVRequest{})
	require.ErrorIs(t, err, mvcc.ErrCorrupt)
	require.NotEmpty(t, w.alarms(t), "at once: whoever hashes raises it")
}

// flip changes one byte of a file.
func flip(t *testing.T, fs vfs.FS, path string, at int64) {
	t.Helper()
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	require.NoError(t, err)
	b[0] ^= 0x55
	_, err = f.WriteAt(b[:], at)
	require.NoError(t, errors.Join(err, f.Close()))
}
