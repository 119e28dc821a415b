package kv

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fxamacker/cbor/v2"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/lessor"
	"github.com/trivet-cloud/trivet/controlplane/kv/translate"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// LeaseGrant makes a lease. One without an id gets one, of 1 to 2^53-1, so that every JSON reader keeps it exactly.
func (s *Service) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if r.TTL > lessor.MaxTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	ttl := max(r.TTL, s.grant)
	for {
		id := cmp.Or(r.ID, newLeaseID())
		found, err := s.write(ctx, []command.Step{{Kind: command.StepGrant, Lease: id, TTL: ttl}}, translate.LeaseCost, mustBeKnown)
		if r.ID == 0 && errors.Is(err, rpctypes.ErrGRPCLeaseExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return &pb.LeaseGrantResponse{Header: s.header(found.Revision), ID: id, TTL: ttl}, nil
	}
}

func mustBeKnown(p *policy, user string) error { return p.users.MustBeKnown(user) }

func newLeaseID() int64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return int64(binary.LittleEndian.Uint64(b[:])>>11) | 1
}

// LeaseRevoke ends a lease and removes its keys, all of which the caller must be allowed to write under Auth. Were keys
// attached or detached since they were checked, they are checked again.
func (s *Service) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	if r.ID == 0 {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	if s.AuthEnabled() {
		// Keys that others attached elsewhere are to be seen here.
		if err := s.opts.Agreement.ReadIndex(ctx); err != nil {
			return nil, failure(ctx, err)
		}
	}
	steps := []command.Step{{Kind: command.StepRevoke, Lease: r.ID}}
	found, err := s.write(ctx, steps, 0, func(p *policy, user string) error {
		steps[0].Value = nil // whoever may write everything is asked for no keys
		if err := p.users.MustBeKnown(user); err != nil {
			return err
		}
		return p.users.CanWriteLease(user, r.ID, func(id int64) ([][]byte, error) {
			keys, err := s.leaseKeys(id)
			steps[0].Value = command.DigestKeys(keys)
			return keys, err
		})
	})
	if err != nil {
		return nil, err
	}
	return &pb.LeaseRevokeResponse{Header: s.header(found.Revision)}, nil
}

// LeaseKeepAlive gives a lease its whole TTL again; the answer's TTL is 0 when it has ended.
func (s *Service) LeaseKeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	// The revision is one at which the lease was not yet removed, if the answer says that it lives.
	out := &pb.LeaseKeepAliveResponse{Header: s.Header(), ID: r.ID}
	if err := s.checked(ctx, func(p *policy, user string) error {
		if err := p.users.MustBeKnown(user); err != nil {
			return err
		}
		return p.users.CanWriteLease(user, r.ID, s.leaseKeys)
	}); err != nil {
		return nil, failure(ctx, err)
	}
	told, err := s.askLessor(ctx, leaseAsk{ID: r.ID, Renew: true})
	if err != nil {
		return nil, failure(ctx, err)
	}
	if told.Found {
		out.TTL = told.TTL
	}
	return out, nil
}

// LeaseTimeToLive says how long a lease lives; the answer's TTL is -1 when there is none. That is no secret among users, as
// in etcd; its keys are shown to those who may read them.
func (s *Service) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	if err := s.checked(ctx, mustBeKnown); err != nil {
		return nil, failure(ctx, err)
	}
	told, err := s.askLessor(ctx, leaseAsk{ID: r.ID})
	if err != nil {
		return nil, failure(ctx, err)
	}
	if !told.Found {
		return &pb.LeaseTimeToLiveResponse{Header: s.Header(), ID: r.ID, TTL: -1}, nil
	}
	snap, err := s.snapshot(ctx, false)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	out := &pb.LeaseTimeToLiveResponse{Header: s.header(snap.Revision()), ID: r.ID, TTL: told.TTL, GrantedTTL: told.Granted}
	if !r.Keys {
		return out, nil
	}
	if out.Keys, err = snap.LeaseKeys(r.ID); err != nil {
		return nil, failure(ctx, err)
	}
	shown := func(int64) ([][]byte, error) { return out.Keys, nil }
	if err := s.checked(ctx, func(p *policy, user string) error { return p.users.CanReadLease(user, r.ID, shown) }); err != nil {
		return nil, failure(ctx, err)
	}
	return out, nil
}

// LeaseLeases lists the leases by id.
func (s *Service) LeaseLeases(ctx context.Context, _ *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	snap, err := s.snapshot(ctx, false)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	all, err := snap.Leases()
	if err != nil {
		return nil, failure(ctx, err)
	}
	out := &pb.LeaseLeasesResponse{Header: s.header(snap.Revision())}
	// A lease is shown to those who may read its keys.
	if err := s.checked(ctx, func(p *policy, user string) error {
		if err := p.users.MustBeKnown(user); err != nil || p.users.CanAdmin(user) == nil {
			return err
		}
		for _, l := range all {
			if err := p.users.CanReadLease(user, l.ID, s.leaseKeys); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return nil, failure(ctx, err)
	}
	for _, l := range all {
		out.Leases = append(out.Leases, &pb.LeaseStatus{ID: l.ID})
	}
	slices.SortFunc(out.Leases, func(a, b *pb.LeaseStatus) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// leaseAsk is what members ask the leader of a lease.
type leaseAsk struct {
	ID    int64
	Renew bool
}

// leaseTold is its answer, in seconds.
type leaseTold struct {
	Found        bool
	TTL, Granted int64
}

// leaseCommand is the name of leaseAsk between members.
const leaseCommand = "kv.lease"

func (s *Service) handlePeers() {
	s.opts.Peers.HandleDirect(leaseCommand, func(ctx context.Context, _ uint64, body []byte) ([]byte, error) {
		var ask leaseAsk
		if err := cbor.Unmarshal(body, &ask); err != nil {
			return nil, fmt.Errorf("decode %s: %w", leaseCommand, err)
		}
		told, err := s.lessorSays(ctx, ask)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(told)
	})
}

// askLessor asks the leader, and the next one when there is another. Both questions may be asked twice.
func (s *Service) askLessor(ctx context.Context, ask leaseAsk) (leaseTold, error) {
	limit := s.requestTime()
	deadline := time.Now().Add(limit)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		changed := s.opts.Agreement.Changed()
		leaderID, _ := s.opts.Agreement.Leader()
		told, err := s.askLeader(ctx, leaderID, ask)
		if err == nil {
			return told, nil
		}
		if leaderID != 0 && !again(err, leaderID != s.opts.Self) && ctx.Err() == nil {
			return told, err
		}
		select {
		case <-changed:
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			switch {
			case time.Now().Before(deadline):
				return told, ctx.Err()
			case leaderID == 0:
				return told, rpctypes.ErrGRPCNoLeader
			}
			return told, rpctypes.ErrGRPCTimeout
		}
	}
}

// requestTime is how long a request may take, as in etcd.
func (s *Service) requestTime() time.Duration { return 5*time.Second + 2*s.opts.Election }

func (s *Service) askLeader(ctx context.Context, leaderID uint64, ask leaseAsk) (told leaseTold, err error) {
	switch {
	case leaderID == 0:
		return told, leader.ErrNotLeader
	case leaderID == s.opts.Self:
		return s.lessorSays(ctx, ask)
	case s.opts.Peers == nil:
		return told, leader.ErrNotSent
	}
	body, err := cbor.Marshal(ask)
	if err != nil {
		return told, fmt.Errorf("encode %s: %w", leaseCommand, err)
	}
	// A leader that was cut off would never answer.
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.Election)
	defer cancel()
	answer, err := s.opts.Peers.Direct(ctx, leaderID, leaseCommand, body)
	if err != nil {
		return told, err
	}
	return told, cbor.Unmarshal(answer, &told)
}

// again says whether an answer may be had by asking again. What a member could not do for itself is not for clients.
func again(err error, remote bool) bool {
	var failed *leader.RemoteError
	if errors.As(err, &failed) {
		return false
	}
	return remote || errors.Is(err, leader.ErrNotLeader) || errors.Is(err, leader.ErrNotSent)
}

// lessorSays answers for the leader.
func (s *Service) lessorSays(ctx context.Context, ask leaseAsk) (leaseTold, error) {
	// Whoever renews a lease promises that it lives on, so it must lead: the others' next leader counts from later on.
	if err := s.opts.Agreement.ReadIndex(ctx); err != nil {
		return leaseTold{}, fmt.Errorf("%w: %w", leader.ErrNotLeader, err)
	}
	leaderID, term := s.opts.Agreement.Leader()
	if leaderID != s.opts.Self {
		return leaseTold{}, leader.ErrNotLeader
	}
	if !ask.Renew {
		return s.lessor.remaining(ask.ID, term, s.opts.Clock())
	}
	return s.lessor.renew(ctx, ask.ID, term, s.opts.Clock())
}
