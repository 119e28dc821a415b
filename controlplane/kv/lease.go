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

// LeaseGrant creates a lease. If the request has no ID, the lease gets an ID from 1 to 2^53-1, a number that every JSON
// parser represents exactly.
func (s *Service) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if r.TTL > lessor.MaxTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	ttl := max(r.TTL, s.minTTL)
	for {
		id := cmp.Or(r.ID, newLeaseID())
		found, err := s.write(ctx, []command.Step{{Kind: command.StepGrant, Lease: id, TTL: ttl}}, translate.LeaseCost, mustBeAuthenticated)
		if r.ID == 0 && errors.Is(err, rpctypes.ErrGRPCLeaseExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return &pb.LeaseGrantResponse{Header: s.header(found.Revision), ID: id, TTL: ttl}, nil
	}
}

func mustBeAuthenticated(p *policy, user string) error { return p.users.MustBeAuthenticated(user) }

func newLeaseID() int64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return int64(binary.LittleEndian.Uint64(b[:])>>11) | 1
}

// LeaseRevoke revokes a lease and deletes its keys. Under Auth the caller needs write permission on all of them. If the
// lease's keys change between the check and the revocation, they are checked again.
func (s *Service) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	if r.ID == 0 {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	if s.AuthEnabled() {
		// The ReadIndex makes sure that the check also covers keys that other members attached to the lease.
		if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
			return nil, clientError(ctx, err)
		}
	}
	steps := []command.Step{{Kind: command.StepRevoke, Lease: r.ID}}
	found, err := s.write(ctx, steps, 0, func(p *policy, user string) error {
		steps[0].Value = nil // CanWriteLease does not call its function for root and without Auth
		if err := p.users.MustBeAuthenticated(user); err != nil {
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
	// The header's revision is read before the renewal, so that a lease which the response reports as alive existed at
	// that revision.
	out := &pb.LeaseKeepAliveResponse{Header: s.Header(), ID: r.ID}
	if err := s.authorize(ctx, func(p *policy, user string) error {
		if err := p.users.MustBeAuthenticated(user); err != nil {
			return err
		}
		return p.users.CanWriteLease(user, r.ID, s.leaseKeys)
	}); err != nil {
		return nil, clientError(ctx, err)
	}
	response, err := s.callLessor(ctx, leaseRequest{ID: r.ID, Renew: true})
	if err != nil {
		return nil, clientError(ctx, err)
	}
	if response.Found {
		out.TTL = response.TTL
	}
	return out, nil
}

// LeaseTimeToLive returns the remaining TTL of a lease, or -1 if the lease does not exist. As in etcd, every user may
// read the TTL; the keys of the lease are returned only to users who may read them.
func (s *Service) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	if err := s.authorize(ctx, mustBeAuthenticated); err != nil {
		return nil, clientError(ctx, err)
	}
	response, err := s.callLessor(ctx, leaseRequest{ID: r.ID})
	if err != nil {
		return nil, clientError(ctx, err)
	}
	if !response.Found {
		return &pb.LeaseTimeToLiveResponse{Header: s.Header(), ID: r.ID, TTL: -1}, nil
	}
	snap, err := s.snapshot(ctx, false)
	if err != nil {
		return nil, err
	}
	defer snap.Close()
	out := &pb.LeaseTimeToLiveResponse{Header: s.header(snap.Revision()), ID: r.ID, TTL: response.TTL, GrantedTTL: response.Granted}
	if !r.Keys {
		return out, nil
	}
	if out.Keys, err = snap.LeaseKeys(r.ID); err != nil {
		return nil, clientError(ctx, err)
	}
	shown := func(int64) ([][]byte, error) { return out.Keys, nil }
	if err := s.authorize(ctx, func(p *policy, user string) error { return p.users.CanReadLease(user, r.ID, shown) }); err != nil {
		return nil, clientError(ctx, err)
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
		return nil, clientError(ctx, err)
	}
	out := &pb.LeaseLeasesResponse{Header: s.header(snap.Revision())}
	// A caller other than an administrator needs the permission to read all keys of every lease.
	if err := s.authorize(ctx, func(p *policy, user string) error {
		if err := p.users.MustBeAuthenticated(user); err != nil || p.users.CanAdmin(user) == nil {
			return err
		}
		for _, l := range all {
			if err := p.users.CanReadLease(user, l.ID, s.leaseKeys); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return nil, clientError(ctx, err)
	}
	for _, l := range all {
		out.Leases = append(out.Leases, &pb.LeaseStatus{ID: l.ID})
	}
	slices.SortFunc(out.Leases, func(a, b *pb.LeaseStatus) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// leaseRequest is a member's request to the leader to renew a lease or, without Renew, to return its TTL.
type leaseRequest struct {
	ID    int64
	Renew bool
}

// leaseResponse is the leader's response to a leaseRequest. Found is false if the lease has ended. TTL is the remaining
// and Granted the full TTL, in seconds.
type leaseResponse struct {
	Found        bool
	TTL, Granted int64
}

// leaseCommand is the name under which members send a leaseRequest to the leader.
const leaseCommand = "kv.lease"

func (s *Service) handleLeases() {
	s.opts.Transport.HandleDirect(leaseCommand, func(ctx context.Context, _ uint64, body []byte) ([]byte, error) {
		var request leaseRequest
		if err := cbor.Unmarshal(body, &request); err != nil {
			return nil, fmt.Errorf("decode %s: %w", leaseCommand, err)
		}
		response, err := s.serveLease(ctx, request)
		if err != nil {
			return nil, err
		}
		return cbor.Marshal(response)
	})
}

// callLessor sends a request to the leader and returns the response. It repeats the request after a retryable error,
// also after a change of leader, for at most the time of requestTimeout. Repeating is safe, because renewing and
// reading a lease are idempotent.
func (s *Service) callLessor(ctx context.Context, request leaseRequest) (leaseResponse, error) {
	limit := s.requestTimeout()
	deadline := time.Now().Add(limit)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for {
		changed := s.opts.Consensus.Changed()
		leaderID, _ := s.opts.Consensus.Leader()
		response, err := s.callLeader(ctx, leaderID, request)
		if err == nil {
			return response, nil
		}
		if leaderID != 0 && !retryable(err, leaderID != s.opts.Self) && ctx.Err() == nil {
			return response, err
		}
		select {
		case <-changed:
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			switch {
			case time.Now().Before(deadline):
				return response, ctx.Err()
			case leaderID == 0:
				return response, rpctypes.ErrGRPCNoLeader
			}
			return response, rpctypes.ErrGRPCTimeout
		}
	}
}

// requestTimeout returns the maximum duration of a request, the same as in etcd.
func (s *Service) requestTimeout() time.Duration { return 5*time.Second + 2*s.opts.Election }

func (s *Service) callLeader(ctx context.Context, leaderID uint64, request leaseRequest) (response leaseResponse, err error) {
	switch {
	case leaderID == 0:
		return response, leader.ErrNotLeader
	case leaderID == s.opts.Self:
		return s.serveLease(ctx, request)
	case s.opts.Transport == nil:
		return response, leader.ErrNotSent
	}
	body, err := cbor.Marshal(request)
	if err != nil {
		return response, fmt.Errorf("encode %s: %w", leaseCommand, err)
	}
	// A leader that is partitioned away would never respond, so each attempt has a timeout.
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.Election)
	defer cancel()
	responseBody, err := s.opts.Transport.Direct(ctx, leaderID, leaseCommand, body)
	if err != nil {
		return response, err
	}
	return response, cbor.Unmarshal(responseBody, &response)
}

// retryable reports whether a failed request may succeed if it is sent again. A RemoteError, which the remote member's
// handler returned, is final. All other errors of a request to another member are retryable. For a request that this
// member served itself, only ErrNotLeader and ErrNotSent are retryable.
func retryable(err error, remote bool) bool {
	var remoteErr *leader.RemoteError
	if errors.As(err, &remoteErr) {
		return false
	}
	return remote || errors.Is(err, leader.ErrNotLeader) || errors.Is(err, leader.ErrNotSent)
}

// serveLease serves a leaseRequest on the leader. On other members it returns ErrNotLeader.
func (s *Service) serveLease(ctx context.Context, request leaseRequest) (leaseResponse, error) {
	// The response promises that the lease stays alive. The promise holds only if this member still leads: every later
	// leader then restarts all TTLs after this renewal.
	if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
		return leaseResponse{}, fmt.Errorf("%w: %w", leader.ErrNotLeader, err)
	}
	leaderID, term := s.opts.Consensus.Leader()
	if leaderID != s.opts.Self {
		return leaseResponse{}, leader.ErrNotLeader
	}
	if !request.Renew {
		return s.lessor.remaining(request.ID, term, s.opts.Clock())
	}
	return s.lessor.renew(ctx, request.ID, term, s.opts.Clock())
}
