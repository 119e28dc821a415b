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

// LeaseGrant creates a lease. If the request has no ID, the lease gets one of 1 to 2^53-1, so that every JSON parser
// keeps the number exact.
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

// LeaseRevoke revokes a lease and deletes its keys. Under Auth the caller needs write permission on all of them. If
// keys were attached or detached after the check, they are checked again.
func (s *Service) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	if r.ID == 0 {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	if s.AuthEnabled() {
		// Without ReadIndex the check would miss keys that were attached through other members.
		if err := s.opts.Agreement.ReadIndex(ctx); err != nil {
			return nil, failure(ctx, err)
		}
	}
	steps := []command.Step{{Kind: command.StepRevoke, Lease: r.ID}}
	found, err := s.write(ctx, steps, 0, func(p *policy, user string) error {
		steps[0].Value = nil // CanWriteLease calls its function neither for root nor while Auth is disabled
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

// LeaseKeepAlive renews a lease to its full TTL; the response's TTL is 0 if the lease has ended.
func (s *Service) LeaseKeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	// The header is taken before the renewal: if the response reports the lease as alive, the lease existed at its
	// revision.
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

// LeaseTimeToLive returns the remaining TTL of a lease, or -1 if the lease does not exist. As in etcd, every user may
// read the TTL; the keys of the lease are returned only to users who may read them.
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

// LeaseLeases lists the leases, sorted by ID.
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
	// A user must be allowed to read the keys of every lease.
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

// leaseAsk is a member's request about a lease to the leader.
type leaseAsk struct {
	ID    int64
	Renew bool
}

// leaseTold is the leader's response; times are in seconds.
type leaseTold struct {
	Found        bool
	TTL, Granted int64
}

// leaseCommand is the name of the leaseAsk request between members.
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

// askLessor sends a request to the leader, and to the next leader after a change. Both kinds of request are idempotent.
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

// requestTime returns the timeout of a request, as in etcd.
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
	// A leader that is partitioned away would never respond.
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.Election)
	defer cancel()
	answer, err := s.opts.Peers.Direct(ctx, leaderID, leaseCommand, body)
	if err != nil {
		return told, err
	}
	return told, cbor.Unmarshal(answer, &told)
}

// again reports whether a failed request may succeed if it is sent again. A remote member's own failure (RemoteError)
// is final. Other errors of remote requests are retried; of local ones, only ErrNotLeader and ErrNotSent.
func again(err error, remote bool) bool {
	var failed *leader.RemoteError
	if errors.As(err, &failed) {
		return false
	}
	return remote || errors.Is(err, leader.ErrNotLeader) || errors.Is(err, leader.ErrNotSent)
}

// lessorSays serves a leaseAsk request on the leader.
func (s *Service) lessorSays(ctx context.Context, ask leaseAsk) (leaseTold, error) {
	// A renewal promises that the lease stays alive, so this member must still lead: every later leader then restarts all
	// TTLs after this renewal.
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
