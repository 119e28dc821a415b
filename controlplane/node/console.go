package node

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// consoles are the readers that wait for what agents send, by request id. They live on the leader, where the agents are.
type consoles struct {
	mu   sync.Mutex
	open map[string]*console
}

type console struct {
	node cloud.NodeID
	// pieces has room for little: a slow reader slows the agent's stream down and nothing else.
	pieces chan *agentv1.SendConsoleRequest
	// taken is closed when the agent has answered.
	taken  chan struct{}
	gone   chan struct{}
	opened sync.Once
}

// answerTime is how long an agent has to begin to answer.
const answerTime = 10 * time.Second

type consoleAsk struct {
	Node   cloud.NodeID
	VM     cloud.VMID
	Follow bool
	Tail   uint64
}

// ReadConsole sends a VM's console log from its host, wherever the leader is.
func (s *Service) ReadConsole(ctx context.Context, node cloud.NodeID, vm cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	return s.readTail(ctx, consoleAsk{node, vm, follow, tail}, send)
}

func (s *Service) doReadConsole(ctx context.Context, q consoleAsk, send func([]byte) error) error {
	s.mu.Lock()
	agent := s.sessions[q.Node]
	s.mu.Unlock()
	if agent == nil {
		return fault.New(fault.Unavailable, "the host of the VM is not connected").MayRetry()
	}
	id := rand.Text()
	c := &console{node: q.Node, pieces: make(chan *agentv1.SendConsoleRequest, 4), taken: make(chan struct{}), gone: make(chan struct{})}
	s.consoles.mu.Lock()
	s.consoles.open[id] = c
	s.consoles.mu.Unlock()
	defer func() {
		s.consoles.mu.Lock()
		delete(s.consoles.open, id)
		s.consoles.mu.Unlock()
		close(c.gone)
		agent.request(&agentv1.ConsoleRequest{RequestId: id, VmId: string(q.VM), Cancel: true})
	}()
	if err := agent.request(&agentv1.ConsoleRequest{RequestId: id, VmId: string(q.VM), Follow: q.Follow, TailBytes: q.Tail}); err != nil {
		return err
	}
	late := time.NewTimer(answerTime)
	defer late.Stop()
	taken := c.taken
	for {
		select {
		case <-taken:
			late.Stop()
			taken = nil
		case <-late.C:
			return fault.New(fault.Unavailable, "the host of the VM does not answer").MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		case piece := <-c.pieces:
			if piece == nil {
				return nil
			}
			if piece.GetError() != "" {
				return fault.New(fault.FailedPrecondition, "%s", piece.GetError())
			}
			if err := send(piece.GetData()); err != nil {
				return err
			}
		}
	}
}

// sendConsole takes an agent's stream and hands it to the reader that asked.
func (s *Service) sendConsole(ctx context.Context, node cloud.NodeID, recv func() (*agentv1.SendConsoleRequest, error)) error {
	piece, err := recv()
	if err != nil {
		return err
	}
	s.consoles.mu.Lock()
	c := s.consoles.open[piece.GetRequestId()]
	s.consoles.mu.Unlock()
	if c == nil || c.node != node {
		return fault.New(fault.NotFound, "nobody waits for this console")
	}
	first := false
	c.opened.Do(func() { first = true; close(c.taken) })
	if !first {
		return fault.New(fault.AlreadyExists, "this console is being sent already")
	}
	for {
		select {
		case c.pieces <- piece:
		case <-c.gone:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
		if piece, err = recv(); err != nil {
			select {
			case c.pieces <- nil:
			case <-c.gone:
			case <-ctx.Done():
			}
			return nil
		}
	}
}
