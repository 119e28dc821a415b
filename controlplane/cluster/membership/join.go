package membership

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Names of the commands that a process calls before it is a member. Every member serves them. A request to join is
// forwarded to the leader.
const (
	joinCall   = "member.enter"
	locateCall = "member.locate"
)

// JoinRequest is the request of a process to join as the member ID. The process must connect with the certificate of
// that member.
type JoinRequest struct {
	ID uint64
	// DirID is the ID of the process's data directory.
	DirID uint64 `cbor:"Birth"`
	// ClientURLs, if not empty, replace the client URLs in the member's record.
	ClientURLs []string
}

// JoinResponse contains the addresses of all members, so that the process that has joined can connect to them.
type JoinResponse struct {
	Members []Member
}

// Join is called when a process joins as a member whose state is Waiting. It sets the state to Joined, and binds the
// member's record to the data directory of the process. The caller of Join must have checked the certificate of the
// process. Join returns FailedPrecondition with ReasonNotFound if the member has no record, with ReasonWiped if the
// record is bound to another directory, or with ReasonRemoved if the member was removed.
func (s *Service) Join(ctx context.Context, q JoinRequest) (JoinResponse, error) {
	if err := checkClientURLs(&q.ClientURLs); err != nil {
		return JoinResponse{}, err
	}
	return joinCommand.Call(ctx, s.opts.Commands, q)
}

var joinCommand = leader.NewCommand("member.join", leader.Repeatable, (*Service).joinOnLeader)

// joinOnLeader implements Join on the leader. It changes only the record. Reconcile then adds the member to the raft
// groups.
func (s *Service) joinOnLeader(ctx context.Context, q JoinRequest) (out JoinResponse, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		m, err := Members.Get(tx, path(q.ID))
		if err != nil {
			return err
		}
		switch gone, err := removed.Has(tx, path(q.ID)); {
		case err != nil:
			return err
		case gone:
			return fault.New(fault.FailedPrecondition, "%s", (&consensus.RemovedError{Member: q.ID}).Error()).WithReason(ReasonRemoved)
		case m == nil || m.State == Leaving && !slices.Contains(m.FormerDirIDs, q.DirID) && m.DirID != q.DirID:
			return notFound(q.ID)
		case m.State == Leaving || slices.Contains(m.FormerDirIDs, q.DirID):
			return fault.New(fault.FailedPrecondition, "member %d was replaced: start it with an empty directory", q.ID).WithReason(ReasonWiped)
		case m.State != Waiting && m.DirID == q.DirID:
			return nil // a repeated request of the same process
		case m.State != Waiting || q.DirID == 0:
			return fault.New(fault.FailedPrecondition, "%s", (&consensus.WipedError{Member: q.ID}).Error()).WithReason(ReasonWiped)
		}
		m.State, m.DirID = Joined, q.DirID
		if len(q.ClientURLs) > 0 {
			m.ClientURLs = q.ClientURLs
		}
		Members.Put(tx, m, path(q.ID))
		return nil
	})
	if err != nil {
		return JoinResponse{}, err
	}
	s.wakeLoop()
	out.Members, err = s.List(ctx, false)
	return out, err
}

// serveJoin calls Join for a process that has connected with the certificate of the member from. It returns
// PermissionDenied if the process requests to join as another member.
func (s *Service) serveJoin(ctx context.Context, from uint64, body []byte) ([]byte, error) {
	var q JoinRequest
	if err := cbor.Unmarshal(body, &q); err != nil {
		return nil, fault.New(fault.InvalidArgument, "decode %s: %v", joinCall, err)
	}
	if from == 0 || from != q.ID {
		return nil, fault.New(fault.PermissionDenied, "member %d may not join as member %d", from, q.ID)
	}
	a, err := s.Join(ctx, q)
	if err != nil {
		return nil, err
	}
	return cbor.Marshal(a)
}

// serveLocate receives a raft address. It returns the ID of the member with that address, and whether a process is
// still to join as the member. It reads the local records, because a cluster that starts for the first time has no
// leader yet. Outdated records do no harm, because the leader checks every join.
func (s *Service) serveLocate(ctx context.Context, _ uint64, body []byte) ([]byte, error) {
	var hostPort string
	if err := cbor.Unmarshal(body, &hostPort); err != nil {
		return nil, fault.New(fault.InvalidArgument, "decode %s: %v", locateCall, err)
	}
	all, err := s.List(ctx, true)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(m Member) bool { return HostPort(m.RaftAddr) == hostPort })
	if i < 0 {
		return nil, fault.New(fault.FailedPrecondition, "no member has the address %s", hostPort).WithReason(ReasonNotFound)
	}
	return cbor.Marshal(located{all[i].ID, all[i].State == Waiting})
}

// located is the response to locateCall: the ID of the member, and whether a process is still to join as the member.
type located struct {
	ID      uint64
	Waiting bool
}

// Asker runs a command on the member at an address (host:port). *transport.Transport implements it.
type Asker interface {
	Ask(ctx context.Context, address, command string, body []byte) ([]byte, error)
}

const (
	// askTime is the timeout of a call to one member or seed; a seed is the address of a member, from the
	// configuration. askShort is the timeout of the calls of Expected. askPause is the pause when the calls to all
	// seeds have failed.
	askTime  = 10 * time.Second
	askShort = time.Second
	askPause = time.Second
)

// Enter joins the cluster as the member q.ID, and returns the addresses of the members. It calls the seeds (host:port)
// in turn, and retries until one accepts the process. A seed refuses, for example, while the member's record has not
// been added. Enter returns an error if the member was removed, or another data directory is bound to it.
func Enter(ctx context.Context, asker Asker, seeds []string, q JoinRequest, log *slog.Logger) (map[uint64]string, error) {
	body, err := cbor.Marshal(q)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", joinCall, err)
	}
	var answer JoinResponse
	err = askUntilAnswered(ctx, asker, seeds, joinCall, body, &answer, log.With("as", q.ID))
	if err != nil {
		return nil, err
	}
	out := map[uint64]string{}
	for _, m := range answer.Members {
		out[m.ID] = HostPort(m.RaftAddr)
	}
	return out, nil
}

// Locate returns the ID of the member whose raft address is hostPort, the address of this process. It gets the ID from
// a seed, and retries until a seed knows such a member.
func Locate(ctx context.Context, asker Asker, seeds []string, hostPort string, log *slog.Logger) (uint64, error) {
	body, err := cbor.Marshal(hostPort)
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", locateCall, err)
	}
	var at located
	err = askUntilAnswered(ctx, asker, seeds, locateCall, body, &at, log.With("address", hostPort))
	return at.ID, err
}

// Expected reports whether a process may start as the member id, at the address hostPort, with an empty directory. This
// is so if the member was replaced: a seed then reports that a process is still to join with this ID and address. Each
// seed is called once.
func Expected(ctx context.Context, asker Asker, seeds []string, id uint64, hostPort string) bool {
	body, err := cbor.Marshal(hostPort)
	if err != nil {
		return false
	}
	for _, seed := range seeds {
		limited, cancel := context.WithTimeout(ctx, askShort)
		answer, err := asker.Ask(limited, seed, locateCall, body)
		cancel()
		var at located
		if err == nil && cbor.Unmarshal(answer, &at) == nil && at.ID == id && at.Waiting {
			return true
		}
	}
	return false
}

// askUntilAnswered calls the seeds in turn until one responds, and decodes the response into answer. It returns an
// error if ctx ends, or if a seed returns a permanent error: ReasonWiped, ReasonRemoved or PermissionDenied.
func askUntilAnswered(ctx context.Context, asker Asker, seeds []string, command string, body []byte, answer any, log *slog.Logger) error {
	logged := ""
	for {
		var problems []string
		for _, seed := range seeds {
			limited, cancel := context.WithTimeout(ctx, askTime)
			got, err := asker.Ask(limited, seed, command, body)
			cancel()
			if err == nil {
				return cbor.Unmarshal(got, answer)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if f, ok := fault.From(err); ok && (f.Reason == ReasonWiped || f.Reason == ReasonRemoved || f.Kind == fault.PermissionDenied) {
				return f
			}
			problems = append(problems, err.Error())
		}
		if text := strings.Join(problems, "; "); text != logged {
			logged = text
			log.Info("waiting to join the cluster", "why", text)
		}
		select {
		case <-time.After(askPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
