package kv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The leader detects members whose data differs, as etcd does with --corrupt-check-time and
// --compact-hash-check-enabled: it compares the hashes of all members and raises the alarm CORRUPT for each member
// whose hash differs from the majority's. Without a majority it raises the alarm for member 0, which means all members.
// Nothing is repaired.
//
// Two kinds of hashes are compared. Hashes that members stored at compactions are cheap, and are compared every minute.
// A hash of the current keyspace needs a full read on every member. These hashes are compared about every
// Options.CorruptCheck, or less often for a large keyspace, so that hashing takes at most about a fiftieth of the time.

// DefaultCorruptCheck is the default of Options.CorruptCheck, the pause between two comparisons of the current keyspace
// on all members.
const DefaultCorruptCheck = 10 * time.Minute

const (
	compactionHashInterval = time.Minute
	// hashPauseFactor is the minimum pause between two hashes of the keyspace, as a multiple of the time that the last
	// hash took. Jitter then changes the pause by up to 25 %.
	hashPauseFactor = 50
	// damageInterval is the interval at which watchDamage reads the engine's count of data with wrong checksums.
	damageInterval = time.Second
)

// hashCommand is the name under which the leader requests a hash from a member.
const hashCommand = "kv.hash"

// hashRequest is the leader's request to a member for a hash of its keyspace.
type hashRequest struct {
	Revision int64
	// If Remembered is set, the member returns the hash that it stored when it compacted at Revision, and computes no
	// new hash.
	Remembered bool
}

// hashResponse is a member's response to hashRequest.
type hashResponse struct {
	Hash            uint32
	CompactRevision int64 `cbor:"Floor"`
	// Unknown means that the member has no hash to return: it stored none for a compaction at Revision, or Revision was
	// compacted.
	Unknown bool
	// Behind means that the member's revision is lower than the requested one, although the member has executed
	// everything that the leader had acknowledged. Its data therefore differs from the leader's.
	Behind bool
}

// findDiffering compares the hashes of all members and returns the IDs of the members whose hash differs from the
// majority's. If hashes differ and no majority has the same hash, it returns ID 0, which means all members. The
// parameter self is this member's ID, responses maps member IDs to hashes, and members is the number of members. The
// result all is false if the hash of any member is missing or cannot be compared with this member's.
func findDiffering(self uint64, responses map[uint64]hashResponse, members int) (differing []uint64, all bool) {
	byHash := map[hashResponse][]uint64{}
	compared := 0
	for member, h := range responses {
		if h.Behind {
			h = hashResponse{Behind: true}
		} else if h.Unknown || h.CompactRevision != responses[self].CompactRevision {
			continue // hashes after compactions at different revisions cannot be compared
		}
		compared++
		byHash[h] = append(byHash[h], member)
	}
	all = compared == members
	if len(byHash) <= 1 || mutant.On(mutant.HideCorruption) {
		return nil, all
	}
	for _, group := range byHash {
		if len(group) > members/2 {
			for _, other := range byHash {
				if !slices.Equal(other, group) {
					differing = append(differing, other...)
				}
			}
			slices.Sort(differing)
			return differing, all
		}
	}
	return []uint64{0}, all
}

// hashKeys hashes the keyspace up to the given revision; 0 means the current revision. If the engine finds damaged
// data, hashKeys raises the alarm CORRUPT for this member.
func (s *Service) hashKeys(ctx context.Context, revision int64) (mvcc.Hash, error) {
	began := time.Now()
	h, err := s.opts.Engine.HashKV(ctx, revision)
	s.counters.hashes.Observe(time.Since(began).Seconds())
	if errors.Is(err, mvcc.ErrCorrupt) {
		return h, s.raise(ctx, pb.AlarmType_CORRUPT, err)
	}
	return h, err
}

// serveHash returns this member's response to a hash request of the leader. A member computes only one hash of the
// keyspace at a time: a concurrent request to compute another one fails.
func (s *Service) serveHash(ctx context.Context, request hashRequest) (hashResponse, error) {
	if request.Remembered {
		h, ok := s.opts.Engine.CompactionHash(request.Revision)
		return hashResponse{Hash: h.Hash, CompactRevision: h.CompactRevision, Unknown: !ok}, nil
	}
	if !s.hashMu.TryLock() {
		return hashResponse{}, errors.New("another hash is being computed")
	}
	defer s.hashMu.Unlock()
	if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
		return hashResponse{}, err
	}
	h, err := s.hashKeys(ctx, request.Revision)
	switch {
	case errors.Is(err, mvcc.ErrCompacted):
		return hashResponse{Unknown: true}, nil
	case errors.Is(err, mvcc.ErrFutureRevision):
		return hashResponse{Behind: true}, nil
	}
	return hashResponse{Hash: h.Hash, CompactRevision: h.CompactRevision}, err
}

func (s *Service) handleHash() {
	s.opts.Transport.HandleDirect(hashCommand, func(ctx context.Context, _ uint64, body []byte) ([]byte, error) {
		var request hashRequest
		if err := cbor.Unmarshal(body, &request); err != nil {
			return nil, fmt.Errorf("decode %s: %w", hashCommand, err)
		}
		response, err := s.serveHash(ctx, request)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(response)
	})
}

// compare sends the request to all other members and compares their hashes with the parameter mine, which is this
// member's hash. It raises the alarm CORRUPT for each member whose hash differs. The result all reports whether every
// member could be compared.
func (s *Service) compare(ctx context.Context, request hashRequest, mine mvcc.Hash, timeout time.Duration) (all bool, err error) {
	g, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return false, err
	}
	members := slices.Compact(slices.Sorted(slices.Values(slices.Concat(g.Voters, g.Learners, g.Outgoing))))
	body, err := cbor.Marshal(request)
	if err != nil {
		return false, fmt.Errorf("encode %s: %w", hashCommand, err)
	}
	responses := map[uint64]hashResponse{s.opts.Self: {Hash: mine.Hash, CompactRevision: mine.CompactRevision}}
	var mu sync.Mutex // guards responses
	var work sync.WaitGroup
	for _, member := range members {
		if member == s.opts.Self || s.opts.Transport == nil {
			continue
		}
		work.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			var h hashResponse
			responseBody, err := s.opts.Transport.Direct(ctx, member, hashCommand, body)
			if err == nil {
				err = cbor.Unmarshal(responseBody, &h)
			}
			if err != nil {
				s.opts.Log.Debug("no hash", "of", member, "revision", request.Revision, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			responses[member] = h
		})
	}
	work.Wait()
	differing, all := findDiffering(s.opts.Self, responses, len(members))
	for _, member := range differing {
		s.opts.Log.Error("members have different data", "differs", member, "revision", request.Revision, "hashes", responses)
		if _, alarmErr := s.setAlarm(ctx, &pb.AlarmMember{MemberID: member, Alarm: pb.AlarmType_CORRUPT}, true); alarmErr != nil {
			err = errors.Join(err, fmt.Errorf("raise alarm of member %d: %w", member, alarmErr))
		}
	}
	if err == nil {
		s.counters.compared.Add(1)
	}
	return all, err
}

// compareKeyspace compares the current keyspace of all members. It returns how long this member took to hash its own.
func (s *Service) compareKeyspace(ctx context.Context) (took time.Duration, err error) {
	if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
		return 0, err
	}
	began := s.opts.Clock()
	mine, err := s.hashKeys(ctx, 0)
	took = s.opts.Clock() - began
	if err != nil {
		return took, err
	}
	const slower = 10 // how many times slower than this member another member may hash
	_, err = s.compare(ctx, hashRequest{Revision: mine.Revision}, mine, s.requestTimeout()+slower*took)
	return took, err
}

// compareCompactionHashes compares the hashes that members stored at compactions, newest first. It stops at the first
// compaction for which every member could be compared, and returns the revision of that compaction. Otherwise it
// returns the parameter checked, which is the result of the previous call. Compactions up to the revision checked are
// not compared again.
func (s *Service) compareCompactionHashes(ctx context.Context, checked int64) (int64, error) {
	for _, mine := range s.opts.Engine.CompactionHashes() {
		if mine.Revision <= checked {
			break
		}
		all, err := s.compare(ctx, hashRequest{Revision: mine.Revision, Remembered: true}, mine, s.requestTimeout())
		if err != nil {
			return checked, err
		}
		if all {
			return mine.Revision, nil
		}
	}
	return checked, nil
}

// compareHashes compares the data of all members regularly while this member leads, until ctx ends.
func (s *Service) compareHashes(ctx context.Context) {
	interval := cmp.Or(s.opts.CorruptCheck, DefaultCorruptCheck)
	tick := time.NewTicker(min(compactionHashInterval, interval))
	defer tick.Stop()
	// Without random pauses, clusters that run on the same hosts and were started together would hash at the same time.
	pause := func(took time.Duration) time.Duration {
		return time.Duration(float64(max(interval, hashPauseFactor*took)) * (3 + 2*rand.Float64()) / 4)
	}
	next := s.opts.Clock() + pause(0)
	var checked int64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if s.Leader() != s.opts.Self {
			checked, next = 0, s.opts.Clock()+pause(0)
			continue
		}
		var err error
		if checked, err = s.compareCompactionHashes(ctx, checked); err == nil && s.opts.Clock() >= next {
			var took time.Duration
			took, err = s.compareKeyspace(ctx)
			next = s.opts.Clock() + pause(took)
		}
		if err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("compare members' data", "err", err)
		}
	}
}

// watchDamage raises this member's CORRUPT alarm when its engine has found data with a wrong checksum. After the alarm
// is disarmed, further damage raises it again.
func (s *Service) watchDamage(ctx context.Context) {
	tick := time.NewTicker(damageInterval)
	defer tick.Stop()
	var reported int64
	for {
		if found := s.opts.Engine.Damage(); found > reported {
			_, err := s.setAlarm(ctx, &pb.AlarmMember{MemberID: s.opts.Self, Alarm: pb.AlarmType_CORRUPT}, true)
			if err == nil {
				reported = found
			} else if ctx.Err() == nil {
				s.opts.Log.Warn("raise alarm", "type", pb.AlarmType_CORRUPT.String(), "err", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
