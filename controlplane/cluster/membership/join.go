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

// Commands that a process calls before it is a member. They are not leader commands: the member that receives one
// forwards it as needed.
const (
	joinCall   = "member.enter"
	locateCall = "member.locate"
)

// JoinRequest asks to join as a member. The certificate of the connection is the proof.
type JoinRequest struct {
	ID uint64
	// DirID is the ID of the process's data directory.
	DirID uint64 `cbor:"Birth"`
	// ClientURLs replace those of the entry, unless empty.
	ClientURLs []string
}

// JoinResponse lists the members.
type JoinResponse struct {
	Members []Member
}

// Join binds a waiting entry to the data directory of the process that joins as the member. The caller of Join must
// have checked the process's certificate. It returns FailedPrecondition with ReasonNotFound if there is no entry, with
// ReasonWiped if another directory is bound, or with ReasonRemoved.
func (s *Service) Join(ctx context.Context, q JoinRequest) (JoinResponse, error) {
	if err := checkClientURLs(&q.ClientURLs); err != nil {
		return JoinResponse{}, err
	}
	return joinCommand.Call(ctx, s.opts.Commands, q)
}

var joinCommand = leader.NewCommand("member.join", leader.Repeatable, (*Service).joinOnLeader)

// joinOnLeader implements Join on the leader. It does not wait for the groups.
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
			return nil // a repeated call
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

// serveLocate returns the entry that has the process's address, from the local records. At the first start of a cluster
// there is no newer source, and the leader checks every join anyway.
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

type located struct {
	ID      uint64
	Waiting bool
}

// Asker runs a command on the member that serves an address. *transport.Transport implements it.
type Asker interface {
	Ask(ctx context.Context, address, command string, body []byte) ([]byte, error)
}

const (
	// askTime limits a call to one seed; askShort is used for optional calls. askPause is the pause after all seeds
	// failed.
	askTime  = 10 * time.Second
	askShort = time.Second
	askPause = time.Second
)

// Enter joins the cluster as the member q.ID through the seeds (host:port), and returns the members' addresses. It
// waits until there is an entry for the member. It returns an error if the cluster refuses this data directory for
// good.
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

// Locate returns the ID of the entry whose raft address is this process's own (host:port), as the seeds report it. It
// waits until there is one.
func Locate(ctx context.Context, asker Asker, seeds []string, hostPort string, log *slog.Logger) (uint64, error) {
	body, err := cbor.Marshal(hostPort)
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", locateCall, err)
	}
	var at located
	err = askUntilAnswered(ctx, asker, seeds, locateCall, body, &at, log.With("address", hostPort))
	return at.ID, err
}

// Expected reports whether one of the seeds, asked once, has an entry for this ID and address that waits for a process
// with an empty directory: this member was then replaced.
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

// askUntilAnswered calls the seeds in turn until one responds or returns a permanent error.
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
