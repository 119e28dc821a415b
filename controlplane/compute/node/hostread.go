package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// hostReads holds the API callers that currently read data of one kind from hosts, such as console logs or snapshots. They
// are on the leader, because agents connect to the leader. A caller is identified by a request ID, which the agent repeats
// in the stream with the data.
type hostReads struct {
	// plural and object are for error texts: "open consoles" and "the VM".
	plural, object string
	// reason is the reason of errors about the limits of projects and orgs.
	reason string
	// perHost, perProject and perOrg are the maximum numbers of concurrent reads from one host: in total, of one
	// project and of one org. The last two prevent one org from using up perHost. perVM is the maximum number of open
	// consoles of a VM, or 0 for other kinds.
	perHost, perProject, perOrg, perVM int

	mu   sync.Mutex
	open map[string]*hostRead
}

// hostRead is one read of data from a host. Comments in this file call the API caller that receives the data the
// reader.
type hostRead struct {
	node   cloud.NodeID
	tenant cloud.Tenant
	vm     cloud.VMID // only for open consoles
	// input carries data for the host. It is used only for open consoles.
	input chan []byte
	// inputEnded is closed when the user of an open console has closed it, after the last send to input.
	inputEnded chan struct{}
	// chunks carries the data to the reader. Its buffer is small, so a slow reader slows down only the agent's stream
	// of this data.
	chunks chan chunk
	// accepted is closed when the agent has opened the stream for this request. closed is closed when the reader has
	// ended.
	accepted chan struct{}
	closed   chan struct{}
	opened   sync.Once
}

// chunk is a part of the data, or the end of the data. For a part, err is nil. At the end, err is io.EOF if the agent
// has sent all data, and otherwise the error that ended the stream.
type chunk struct {
	data   []byte
	offset int64 // of the first byte after data; only for open consoles
	err    error
}

const (
	// acceptTimeout is the maximum wait for the agent to open its stream.
	acceptTimeout = 10 * time.Second
	// maxChunk is the maximum size, in bytes, of one message with data of a host. Agents send smaller ones.
	maxChunk = 256 << 10
	// maxError is the maximum length, in bytes, of an agent's error text that is returned to a reader. Longer texts are
	// cut.
	maxError = 1 << 10
)

// add registers a reader under a request ID. It returns an error if the host, the org or the project has reached its
// limit of readers.
func (h *hostReads) add(id string, node cloud.NodeID, t cloud.Tenant, vm cloud.VMID) (*hostRead, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	host, org, project, same := 0, 0, 0, 0
	for _, other := range h.open {
		if other.node != node {
			continue
		}
		host++
		if other.tenant.Org == t.Org {
			org++
		}
		if other.tenant == t {
			project++
		}
		if other.vm == vm {
			same++
		}
	}
	switch {
	case h.perVM > 0 && same >= h.perVM:
		return nil, h.errTooMany("VM", string(vm), h.perVM)
	case project >= h.perProject:
		return nil, h.errTooMany("project", t.String(), h.perProject)
	case org >= h.perOrg:
		return nil, h.errTooMany("org", string(t.Org), h.perOrg)
	case host >= h.perHost:
		return nil, fault.New(fault.Unavailable, "the host of %s has %d %s, which is the maximum: try again later", h.object, h.perHost, h.plural).
			MayRetry()
	}
	one := &hostRead{
		node: node, tenant: t, vm: vm, chunks: make(chan chunk, 4), input: make(chan []byte), inputEnded: make(chan struct{}),
		accepted: make(chan struct{}), closed: make(chan struct{}),
	}
	h.open[id] = one
	return one, nil
}

func (h *hostReads) remove(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.open[id].closed)
	delete(h.open, id)
}

// errTooMany returns the ResourceExhausted error for a project or org that has reached its limit.
func (h *hostReads) errTooMany(what, id string, most int) error {
	if h.perVM > 0 {
		return fault.New(fault.ResourceExhausted, "%s %s has %d open console sessions on the host, the maximum: close one and try again", what, id, most).
			WithReason(h.reason).With("limit", most).MayRetry()
	}
	return fault.New(fault.ResourceExhausted, "%s %s has %d %s on the host of %s, which is the maximum: wait until one has ended",
		what, id, most, h.plural, h.object).
		WithReason(h.reason).With("limit", most).MayRetry()
}

// hostRequest is a request for data that is sent to an agent.
type hostRequest interface {
	GetRequestId() string
	GetCancel() bool
}

// errInterrupted is in the error chain of a fault if the agent may have received the request, and has not answered it.
var errInterrupted = errors.New("the agent may have received the request")

// agentBusy is the reason of an agent that has as many requests of one kind in progress as it may have.
const agentBusy = "AGENT_BUSY"

// read sends a request to the agent over the host's session, and calls send with each part of the data. request and
// cancel return the request with an ID, and its cancellation. silence is the maximum wait for each further part of the
// data, or 0 for no limit. read returns Unavailable if the host has no session with this member, does not respond in
// time, or the connection breaks. In the last two cases, errInterrupted is in the error chain.
func (s *Service) read(
	ctx context.Context, h *hostReads, node cloud.NodeID, t cloud.Tenant, request, cancel func(id string) hostRequest,
	silence time.Duration, send func([]byte) error,
) error {
	s.mu.Lock()
	agent := s.sessions[node]
	s.mu.Unlock()
	if agent == nil {
		return fault.New(fault.Unavailable, "the host of %s is not connected", h.object).MayRetry()
	}
	id := rand.Text()
	one, err := h.add(id, node, t, "")
	if err != nil {
		return err
	}
	defer h.remove(id)
	agent.enqueue(request(id))
	defer agent.cancelRequest(cancel(id))
	late := time.NewTimer(acceptTimeout)
	defer late.Stop()
	accepted := one.accepted
	for {
		select {
		case <-accepted:
			accepted = nil
			late.Stop()
			if silence > 0 {
				late.Reset(silence)
			}
		case <-late.C:
			return fault.New(fault.Unavailable, "the host of %s does not answer", h.object).Because(errInterrupted).MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		case p := <-one.chunks:
			if errors.Is(p.err, io.EOF) {
				return nil
			}
			if p.err != nil {
				return p.err
			}
			if len(p.data) > 0 {
				if err := send(p.data); err != nil {
					return err
				}
			}
			if silence > 0 {
				late.Reset(silence)
			}
		}
	}
}

// hostData is a message of an agent's stream with data for a reader.
type hostData interface {
	GetRequestId() string
	GetData() []byte
	GetError() string
}

// forward forwards the messages of an agent's stream to the reader whose request ID is in the first message. It returns
// NotFound if the host has no such reader, and AlreadyExists if another stream already serves it.
func forward[M hostData](ctx context.Context, h *hostReads, node cloud.NodeID, recv func() (M, error)) error {
	first, err := recv()
	if err != nil {
		return err
	}
	one, err := h.accept(node, first.GetRequestId())
	if err != nil {
		return err
	}
	return forwardTo(ctx, h, one, first, nil, recv)
}

// accept returns the reader with a request ID, for the one stream that may serve it. It returns the errors of forward.
func (h *hostReads) accept(node cloud.NodeID, id string) (*hostRead, error) {
	h.mu.Lock()
	one := h.open[id]
	h.mu.Unlock()
	if one == nil || one.node != node {
		return nil, fault.New(fault.NotFound, "no reader waits for this request")
	}
	mine := false
	one.opened.Do(func() { mine = true; close(one.accepted) })
	if !mine {
		return nil, fault.New(fault.AlreadyExists, "another stream already answers this request")
	}
	return one, nil
}

// forwardTo forwards the messages of an agent's stream to a reader. The parameters message and err are the result of the
// first call of recv.
func forwardTo[M hostData](ctx context.Context, h *hostReads, one *hostRead, message M, err error, recv func() (M, error)) error {
	for {
		p := h.chunk(message, err)
		select {
		case one.chunks <- p:
		case <-one.closed:
			return nil
		case <-ctx.Done():
			// Send the reader an error, so that it does not mistake the cancellation for the end of the data.
			select {
			case one.chunks <- h.chunk(nil, ctx.Err()):
			case <-one.closed:
			}
			return ctx.Err()
		}
		if p.err != nil {
			return nil
		}
		message, err = recv()
	}
}

// chunk converts the result of receiving from an agent's stream to a chunk. A message with an error text or more than
// maxChunk bytes becomes an error.
func (h *hostReads) chunk(message hostData, err error) chunk {
	switch {
	case errors.Is(err, io.EOF):
		return chunk{err: io.EOF}
	case err != nil:
		return chunk{err: fault.New(fault.Unavailable, "the connection to the host of %s broke", h.object).
			Because(fmt.Errorf("%w: %w", errInterrupted, err)).MayRetry()}
	case len(message.GetData()) > maxChunk:
		return chunk{err: fault.New(fault.Unavailable, "the host of %s sent a message of %d bytes, which is too large", h.object, len(message.GetData()))}
	case message.GetError() != "":
		f := fault.New(fault.FailedPrecondition, "%s", strings.ToValidUTF8(message.GetError()[:min(len(message.GetError()), maxError)], ""))
		if m, ok := message.(interface{ GetReason() string }); ok {
			switch reason := m.GetReason(); {
			case reason == agentStarting, reason == agentBusy, reason == consoleLost:
				f = fault.New(fault.Unavailable, "%s", f.Message).MayRetry()
			case slices.Contains(consoleReasons, reason):
				f = f.WithReason(reason)
			}
		}
		return chunk{err: f}
	}
	c := chunk{data: message.GetData()}
	if m, ok := message.(interface{ GetOffset() int64 }); ok {
		c.offset = m.GetOffset()
	}
	return c
}
