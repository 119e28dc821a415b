package node

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// consoles holds the readers of console logs by request ID. They exist on the leader, where the agents' sessions are.
type consoles struct {
	mu   sync.Mutex
	open map[string]*console
}

type console struct {
	node   cloud.NodeID
	tenant cloud.Tenant
	// pieces has a small buffer: a slow reader slows down only the agent's stream.
	pieces chan piece
	// taken is closed when the agent has opened its stream.
	taken  chan struct{}
	gone   chan struct{}
	opened sync.Once
}

// piece is a part of a console log, or its end: io.EOF, or the error that ended it.
type piece struct {
	data []byte
	err  error
}

const (
	// answerTime limits the wait for an agent's response, and for each further piece of a log that is not followed.
	answerTime = 10 * time.Second
	// maxConsoles limits the open consoles of a host. An agent has the same limit.
	maxConsoles = 64
	// maxProjectConsoles and maxOrgConsoles limit the open consoles on a host per project and per org, so that one org
	// cannot use all consoles of a host.
	maxProjectConsoles = 4
	maxOrgConsoles     = 8
	// maxPiece limits one message of an agent in bytes; agents send smaller ones.
	maxPiece = 256 << 10
)

// add adds a reader, or returns an error if the host, the org or the project has reached its limit.
func (c *consoles) add(id string, q consoleAsk) (*console, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	host, org, project := 0, 0, 0
	for _, other := range c.open {
		if other.node != q.Node {
			continue
		}
		host++
		if other.tenant.Org == q.Tenant.Org {
			org++
		}
		if other.tenant == q.Tenant {
			project++
		}
	}
	switch {
	case project >= maxProjectConsoles:
		return nil, tooMany("project", q.Tenant.String(), maxProjectConsoles)
	case org >= maxOrgConsoles:
		return nil, tooMany("org", string(q.Tenant.Org), maxOrgConsoles)
	case host >= maxConsoles:
		return nil, fault.New(fault.Unavailable, "too many consoles are being read on the host of the VM: try again later").MayRetry()
	}
	one := &console{node: q.Node, tenant: q.Tenant, pieces: make(chan piece, 4), taken: make(chan struct{}), gone: make(chan struct{})}
	c.open[id] = one
	return one, nil
}

func (c *consoles) remove(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.open[id].gone)
	delete(c.open, id)
}

// tooMany returns the ResourceExhausted error for a project or org that has reached its limit of open consoles.
func tooMany(what, id string, most int) error {
	return fault.New(fault.ResourceExhausted, "%s %s reads %d consoles on the host of the VM, which is the limit: end one of them", what, id, most).
		WithReason("TOO_MANY_CONSOLES").With("limit", most).MayRetry()
}

type consoleAsk struct {
	Tenant cloud.Tenant
	Node   cloud.NodeID
	VM     cloud.VMID
	Follow bool
	Tail   uint64
}

// ReadConsole passes the console log of a tenant's VM to send. It runs on the leader, to which the host is connected.
func (s *Service) ReadConsole(ctx context.Context, t cloud.Tenant, node cloud.NodeID, vm cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	return readConsoleCommand.Call(ctx, s.opts.Commands, consoleAsk{t, node, vm, follow, tail}, send)
}

var readConsoleCommand = leader.NewStream("node.console", (*Service).readConsoleOnLeader)

// readConsoleOnLeader requests a console log over the host's session and passes it to send. It returns Unavailable if
// the host has no session with this member, or does not respond within answerTime.
func (s *Service) readConsoleOnLeader(ctx context.Context, q consoleAsk, send func([]byte) error) error {
	s.mu.Lock()
	agent := s.sessions[q.Node]
	s.mu.Unlock()
	if agent == nil {
		return fault.New(fault.Unavailable, "the host of the VM is not connected").MayRetry()
	}
	id := rand.Text()
	c, err := s.consoles.add(id, q)
	if err != nil {
		return err
	}
	defer s.consoles.remove(id)
	agent.request(&agentv1.ConsoleRequest{RequestId: id, VmId: string(q.VM), Follow: q.Follow, TailBytes: q.Tail})
	defer agent.withdraw(id)
	late := time.NewTimer(answerTime)
	defer late.Stop()
	taken := c.taken
	for {
		select {
		case <-taken:
			taken = nil
			late.Stop() // a followed console may be silent for any time
			if !q.Follow {
				late.Reset(answerTime)
			}
		case <-late.C:
			return fault.New(fault.Unavailable, "the host of the VM does not answer").MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		case p := <-c.pieces:
			if errors.Is(p.err, io.EOF) {
				return nil
			}
			if p.err != nil {
				return p.err
			}
			if err := send(p.data); err != nil {
				return err
			}
			if !q.Follow {
				late.Reset(answerTime)
			}
		}
	}
}

// sendConsole passes an agent's stream to the reader with the request ID of its first message.
func (s *Service) sendConsole(ctx context.Context, node cloud.NodeID, recv func() (*agentv1.SendConsoleRequest, error)) error {
	first, err := recv()
	if err != nil {
		return err
	}
	s.consoles.mu.Lock()
	c := s.consoles.open[first.GetRequestId()]
	s.consoles.mu.Unlock()
	if c == nil || c.node != node {
		return fault.New(fault.NotFound, "nobody waits for this console")
	}
	mine := false
	c.opened.Do(func() { mine = true; close(c.taken) })
	if !mine {
		return fault.New(fault.AlreadyExists, "this console is being sent already")
	}
	for said := first; ; {
		p := consolePiece(said, err)
		select {
		case c.pieces <- p:
		case <-c.gone:
			return nil
		case <-ctx.Done():
			// Send an error, so that the reader does not take this for the end of the log.
			select {
			case c.pieces <- consolePiece(nil, ctx.Err()):
			case <-c.gone:
			}
			return ctx.Err()
		}
		if p.err != nil {
			return nil
		}
		said, err = recv()
	}
}

// consolePiece converts an agent's message, or the error that ended its stream, for the reader.
func consolePiece(said *agentv1.SendConsoleRequest, err error) piece {
	switch {
	case errors.Is(err, io.EOF):
		return piece{err: io.EOF}
	case err != nil:
		return piece{err: fault.New(fault.Unavailable, "the connection to the host of the VM broke").Because(err).MayRetry()}
	case len(said.GetData()) > maxPiece:
		return piece{err: fault.New(fault.Unavailable, "the host of the VM sent a piece of %d bytes", len(said.GetData()))}
	case said.GetError() != "":
		return piece{err: fault.New(fault.FailedPrecondition, "%s", strings.ToValidUTF8(said.GetError()[:min(len(said.GetError()), maxError)], ""))}
	}
	return piece{data: said.GetData()}
}

// maxError is how many bytes of an agent's error text a reader gets.
const maxError = 1 << 10
