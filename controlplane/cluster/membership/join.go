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

// What a process asks of members before it is one. They are not commands of the leader: whoever is asked sees to it.
const (
	joinCall   = "member.enter"
	locateCall = "member.locate"
)

// JoinRequest is a process that says that it is a member, with its certificate as the proof.
type JoinRequest struct {
	ID uint64
	// Birth is that of its directory.
	Birth uint64
	// ClientURLs replace those of the entry, if there are any.
	ClientURLs []string
}

// JoinAnswer says who the members are.
type JoinAnswer struct {
	Members []Member
}

// Join binds a waiting entry to the directory of the process that proved to be it. Whoever calls it has checked the
// certificate. FailedPrecondition: ReasonNotFound while there is no entry; ReasonWiped when another directory is bound;
// ReasonRemoved.
func (s *Service) Join(ctx context.Context, q JoinRequest) (JoinAnswer, error) {
	if err := checkClientURLs(&q.ClientURLs); err != nil {
		return JoinAnswer{}, err
	}
	return joinCommand.Call(ctx, s.opts.Commands, q)
}

var joinCommand = leader.NewCommand("member.join", leader.Repeatable, (*Service).joinOnLeader)

// joinOnLeader is Join on the leader. It does not wait for the groups.
func (s *Service) joinOnLeader(ctx context.Context, q JoinRequest) (out JoinAnswer, err error) {
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
		case m == nil || m.State == Leaving && !slices.Contains(m.Lost, q.Birth) && m.Birth != q.Birth:
			return notFound(q.ID)
		case m.State == Leaving || slices.Contains(m.Lost, q.Birth):
			return fault.New(fault.FailedPrecondition, "member %d was replaced: start it with an empty directory", q.ID).WithReason(ReasonWiped)
		case m.State != Waiting && m.Birth == q.Birth:
			return nil // asked again
		case m.State != Waiting || q.Birth == 0:
			return fault.New(fault.FailedPrecondition, "%s", (&consensus.WipedError{Member: q.ID}).Error()).WithReason(ReasonWiped)
		}
		m.State, m.Birth = Joined, q.Birth
		if len(q.ClientURLs) > 0 {
			m.ClientURLs = q.ClientURLs
		}
		Members.Put(tx, m, path(q.ID))
		return nil
	})
	if err != nil {
		return JoinAnswer{}, err
	}
	s.hurry()
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

// serveLocate tells a process which entry has its address, as this member has it: at the first start of a cluster nobody
// could say more, and who joins is judged by the leader.
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

// Asker calls a command of whichever member serves an address; *transport.Mesh.
type Asker interface {
	Ask(ctx context.Context, address, command string, body []byte) ([]byte, error)
}

const (
	// askTime is how long one seed has to answer, askShort when nothing depends on it, and askPause how long nobody is
	// asked when none did.
	askTime  = 10 * time.Second
	askShort = time.Second
	askPause = time.Second
)

// Enter makes this process the member that it says to be, at the seeds (host:port), and returns the members' addresses.
// It waits until there is an entry for it, and ends with an error when there will be none for this directory.
func Enter(ctx context.Context, asker Asker, seeds []string, q JoinRequest, log *slog.Logger) (map[uint64]string, error) {
	body, err := cbor.Marshal(q)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", joinCall, err)
	}
	var answer JoinAnswer
	err = insist(ctx, asker, seeds, joinCall, body, &answer, log.With("as", q.ID))
	if err != nil {
		return nil, err
	}
	out := map[uint64]string{}
	for _, m := range answer.Members {
		out[m.ID] = HostPort(m.RaftAddr)
	}
	return out, nil
}

// Locate is the id of the entry whose raft address is this process's own (host:port), as the seeds have it. It waits
// until there is one.
func Locate(ctx context.Context, asker Asker, seeds []string, hostPort string, log *slog.Logger) (uint64, error) {
	body, err := cbor.Marshal(hostPort)
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", locateCall, err)
	}
	var at located
	err = insist(ctx, asker, seeds, locateCall, body, &at, log.With("address", hostPort))
	return at.ID, err
}

// Expected says whether one of the seeds, asked once, has an entry for this address that waits for an empty
// directory: this member was replaced.
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

// insist asks the seeds until one answers, or says for good that it will not.
func insist(ctx context.Context, asker Asker, seeds []string, command string, body []byte, answer any, log *slog.Logger) error {
	said := ""
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
		if text := strings.Join(problems, "; "); text != said {
			said = text
			log.Info("waiting to be let in", "why", text)
		}
		select {
		case <-time.After(askPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
