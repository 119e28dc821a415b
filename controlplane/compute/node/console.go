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

// consoles holds the API callers that currently read a VM's console log, by request ID. They are on the leader, because
// agents connect to the leader.
type consoles struct {
	mu   sync.Mutex
	open map[string]*console
}

type console struct {
	node   cloud.NodeID
	tenant cloud.Tenant
	// chunks carries the log to the reader. Its buffer is small, so a slow reader slows down only the agent's stream of
	// this log.
	chunks chan chunk
	// accepted is closed when the agent has opened the SendConsole stream for this request. closed is closed when the
	// reader has ended.
	accepted chan struct{}
	closed   chan struct{}
	opened   sync.Once
}

// chunk is a part of a console log, in data, or the end of the log, in err. At the end, err is io.EOF if the log is
// complete, and otherwise the error that ended the stream.
type chunk struct {
	data []byte
	err  error
}

const (
	// consoleTimeout is the maximum wait for the agent to open its stream. It is also the maximum wait for each further
	// chunk of the log, unless the caller follows the log.
	consoleTimeout = 10 * time.Second
	// maxConsoles is the maximum number of console logs that are read from one host concurrently. An agent has the same
	// limit.
	maxConsoles = 64
	// maxProjectConsoles and maxOrgConsoles are the maximum numbers of console logs that one project and one org may
	// read from a host concurrently. They prevent one org from using up maxConsoles.
	maxProjectConsoles = 4
	maxOrgConsoles     = 8
	// maxChunk is the maximum size, in bytes, of one message with console data. Agents send smaller ones.
	maxChunk = 256 << 10
)

// add registers a console reader under a request ID. It returns an error if the host, the org or the project has
// reached its limit of readers.
func (c *consoles) add(id string, q consoleRequest) (*console, error) {
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
		return nil, errTooManyConsoles("project", q.Tenant.String(), maxProjectConsoles)
	case org >= maxOrgConsoles:
		return nil, errTooManyConsoles("org", string(q.Tenant.Org), maxOrgConsoles)
	case host >= maxConsoles:
		return nil, fault.New(fault.Unavailable, "too many consoles are being read on the host of the VM: try again later").MayRetry()
	}
	one := &console{node: q.Node, tenant: q.Tenant, chunks: make(chan chunk, 4), accepted: make(chan struct{}), closed: make(chan struct{})}
	c.open[id] = one
	return one, nil
}

func (c *consoles) remove(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.open[id].closed)
	delete(c.open, id)
}

// errTooManyConsoles returns the ResourceExhausted error for a project or org that has reached its limit of open
// consoles.
func errTooManyConsoles(what, id string, most int) error {
	return fault.New(fault.ResourceExhausted, "%s %s reads %d consoles on the host of the VM, which is the limit: end one of them", what, id, most).
		WithReason("TOO_MANY_CONSOLES").With("limit", most).MayRetry()
}

type consoleRequest struct {
	Tenant cloud.Tenant
	Node   cloud.NodeID
	VM     cloud.VMID
	Follow bool
	Tail   uint64
}

// ReadConsole reads the console log of a tenant's VM from its host, and calls send with each part. It forwards the
// request to the leader, to which the host is connected. tail is the maximum size, in bytes, of the existing output
// that is sent. If follow is true, ReadConsole continues with new output until ctx ends.
func (s *Service) ReadConsole(ctx context.Context, t cloud.Tenant, node cloud.NodeID, vm cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	return readConsoleCommand.Call(ctx, s.opts.Commands, consoleRequest{t, node, vm, follow, tail}, send)
}

var readConsoleCommand = leader.NewStream("node.console", (*Service).readConsoleOnLeader)

// readConsoleOnLeader sends the agent a console request over the host's session, and calls send with each part of the
// log. It returns Unavailable if the host has no session with this member, or does not respond within consoleTimeout.
func (s *Service) readConsoleOnLeader(ctx context.Context, q consoleRequest, send func([]byte) error) error {
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
	agent.enqueue(&agentv1.ConsoleRequest{RequestId: id, VmId: string(q.VM), Follow: q.Follow, TailBytes: q.Tail})
	defer agent.cancelRequest(id)
	late := time.NewTimer(consoleTimeout)
	defer late.Stop()
	accepted := c.accepted
	for {
		select {
		case <-accepted:
			accepted = nil
			late.Stop() // a followed console may print nothing for any time
			if !q.Follow {
				late.Reset(consoleTimeout)
			}
		case <-late.C:
			return fault.New(fault.Unavailable, "the host of the VM does not answer").MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		case p := <-c.chunks:
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
				late.Reset(consoleTimeout)
			}
		}
	}
}

// sendConsole forwards the messages of an agent's SendConsole stream to the reader whose request ID is in the first
// message. It returns NotFound if the host has no such reader, and AlreadyExists if another stream already serves it.
func (s *Service) sendConsole(ctx context.Context, node cloud.NodeID, recv func() (*agentv1.SendConsoleRequest, error)) error {
	first, err := recv()
	if err != nil {
		return err
	}
	s.consoles.mu.Lock()
	c := s.consoles.open[first.GetRequestId()]
	s.consoles.mu.Unlock()
	if c == nil || c.node != node {
		return fault.New(fault.NotFound, "no reader waits for this console")
	}
	mine := false
	c.opened.Do(func() { mine = true; close(c.accepted) })
	if !mine {
		return fault.New(fault.AlreadyExists, "this console is being sent already")
	}
	for message := first; ; {
		p := toChunk(message, err)
		select {
		case c.chunks <- p:
		case <-c.closed:
			return nil
		case <-ctx.Done():
			// Send the reader an error, so that it does not mistake the cancellation for the end of the log.
			select {
			case c.chunks <- toChunk(nil, ctx.Err()):
			case <-c.closed:
			}
			return ctx.Err()
		}
		if p.err != nil {
			return nil
		}
		message, err = recv()
	}
}

// toChunk converts the result of receiving from an agent's stream to a chunk. A message with an error text or more than
// maxChunk bytes becomes an error.
func toChunk(message *agentv1.SendConsoleRequest, err error) chunk {
	switch {
	case errors.Is(err, io.EOF):
		return chunk{err: io.EOF}
	case err != nil:
		return chunk{err: fault.New(fault.Unavailable, "the connection to the host of the VM broke").Because(err).MayRetry()}
	case len(message.GetData()) > maxChunk:
		return chunk{err: fault.New(fault.Unavailable, "the host of the VM sent a message of %d bytes, which is too large", len(message.GetData()))}
	case message.GetError() != "":
		return chunk{err: fault.New(fault.FailedPrecondition, "%s", strings.ToValidUTF8(message.GetError()[:min(len(message.GetError()), maxError)], ""))}
	}
	return chunk{data: message.GetData()}
}

// maxError is the maximum length, in bytes, of an agent's error text that is returned to a reader. Longer texts are
// cut.
const maxError = 1 << 10
