package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// guestSyncWithin is the maximum time in which the guest agent (qemu-ga) must answer the first message. A guest
	// without qemu-ga never answers.
	guestSyncWithin = 2 * time.Second
	// freezeWithin is the maximum time in which the guest must freeze its file systems. To freeze them, the guest first
	// writes its caches to the disks.
	freezeWithin = 10 * time.Second
	// thawTimeout is how long CopyDisks tries to thaw a guest. endEarlierCopies continues afterwards.
	thawTimeout = time.Minute
	thawAttempt = 5 * time.Second
	// maxAgentReply is the maximum number of bytes read on one connection to the guest agent. The limit protects the
	// host's agent from a malicious guest.
	maxAgentReply = 64 << 10
)

// agentChardev is the id of QEMU's character device for the port of the guest agent.
const agentChardev = "agent"

// frozenName is the name of the file in the VM's home that exists while the guest may be frozen.
const frozenName = "frozen.json"

// freeze makes the guest agent (qemu-ga) freeze the file systems of the guest, and returns true if they are frozen. It
// returns false and no error if no program in the guest has the port of qemu-ga open, or if qemu-ga does not answer or
// cannot freeze the file systems; the guest is then not frozen. Before the request to qemu-ga, freeze writes a file to
// the VM's home, so that the host's agent thaws the guest after a restart. An error means that this file cannot be
// written, or that the guest may be frozen and cannot be thawed.
func (p *Process) freeze(ctx context.Context) (bool, error) {
	if open, err := p.agentPortOpen(ctx); err == nil && !open {
		return false, nil // Many guests have no qemu-ga. Without this query, freeze would wait guestSyncWithin for them.
	}
	g, err := p.dialGuest(ctx)
	if err != nil {
		return false, nil
	}
	defer func() { _ = g.Close() }() // g is another connection later
	if err := p.home.write(frozenName, struct{}{}); err != nil {
		return false, fmt.Errorf("write that the guest may be frozen: %w", err)
	}
	var count int
	if err := g.call(ctx, freezeWithin, "guest-fsfreeze-freeze", nil, &count); err == nil && count > 0 {
		return true, nil
	}
	_ = g.Close() // thaw opens a new connection, and the port serves one client at a time.
	return false, p.thaw(ctx, p.thawWithin)
}

// guestHasAgent queries QEMU for whether a program in the guest has opened the virtio-serial port of the guest agent
// (qemu-ga). While no program has, no request to the guest agent can be answered. qemu-ga keeps the port open, also
// while no client is connected on the host.
func (p *Process) guestHasAgent(ctx context.Context) (bool, error) {
	all, err := query(ctx, p, (*raw.Monitor).QueryChardev)
	if err != nil {
		return false, err
	}
	at := slices.IndexFunc(all, func(c raw.ChardevInfo) bool { return c.Label == agentChardev })
	return at >= 0 && all[at].FrontendOpen, nil
}

// thaw makes the guest agent (qemu-ga) thaw the file systems of the guest, if they may be frozen. It tries for the
// time within, even if ctx ends earlier. The error means that the guest may still be frozen; a later thaw tries again.
func (p *Process) thaw(ctx context.Context, within time.Duration) error {
	if _, err := os.Lstat(p.home.path(frozenName)); errors.Is(err, fs.ErrNotExist) || mutant.On(mutant.KeepFrozen) {
		return nil
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	for {
		err := p.thawOnce(late)
		if err == nil {
			return os.Remove(p.home.path(frozenName))
		}
		if pause(late, retryPause); late.Err() != nil {
			return fmt.Errorf("thaw the guest's file systems: %w", err)
		}
	}
}

func (p *Process) thawOnce(ctx context.Context) error {
	g, err := p.dialGuest(ctx)
	if err != nil {
		return err
	}
	defer g.Close()
	return g.call(ctx, thawAttempt, "guest-fsfreeze-thaw", nil, nil)
}

// guestConn is a connection to the agent in the guest (qemu-ga), over the virtio-serial port org.qemu.guest_agent.0.
type guestConn struct {
	net.Conn
	limit   *io.LimitedReader // what may still be read
	replies *bufio.Reader     // of limit
	leave   func()            // lets the next client connect
}

// dialGuest connects to the guest agent (qemu-ga). It first waits until other connections of this process to the guest
// agent are closed, because the port serves one client at a time. It skips replies to earlier clients (see synchronize).
func (p *Process) dialGuest(ctx context.Context) (*guestConn, error) {
	select {
	case p.guestPort <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	leave := sync.OnceFunc(func() { <-p.guestPort })
	var d net.Dialer
	bounded, cancel := context.WithTimeout(ctx, guestSyncWithin)
	defer cancel()
	c, err := d.DialContext(bounded, "unix", socketPath(p.dir, agentSocket))
	if err != nil {
		leave()
		return nil, err
	}
	g := &guestConn{Conn: c, limit: &io.LimitedReader{R: c, N: maxAgentReply}, leave: leave}
	g.replies = bufio.NewReader(g.limit)
	if err := g.synchronize(bounded); err != nil {
		_ = g.Close()
		return nil, err
	}
	return g, nil
}

// Close closes the connection. It may be called more than once.
func (g *guestConn) Close() error {
	defer g.leave()
	return g.Conn.Close()
}

// synchronize sends guest-sync-delimited (QEMU's qga/qapi-schema.json). The byte 0xFF makes the agent drop a partial
// command of an earlier client, and marks the beginning of the reply.
func (g *guestConn) synchronize(ctx context.Context) error {
	id := rand.Int64N(1 << 50)
	deadline, _ := ctx.Deadline()
	if err := g.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(g, "\xff{\"execute\":\"guest-sync-delimited\",\"arguments\":{\"id\":%d}}\n", id); err != nil {
		return err
	}
	for {
		if _, err := g.replies.ReadBytes(0xff); err != nil {
			return err
		}
		var got int64
		if err := g.readReply(&got); err == nil && got == id {
			return nil
		}
	}
}

// call runs a command of the guest agent. Arguments are sent as args unless args is nil, and the result is decoded into
// out unless out is nil. Its errors do not contain the arguments, which may be secret.
func (g *guestConn) call(ctx context.Context, within time.Duration, command string, args, out any) error {
	if err := g.send(ctx, within, command, args); err != nil {
		return err
	}
	if err := g.readReply(out); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return nil
}

// send sends a command to the guest agent, and sets the deadline of the connection for the command and its reply.
func (g *guestConn) send(ctx context.Context, within time.Duration, command string, args any) error {
	deadline := time.Now().Add(within)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := g.SetDeadline(deadline); err != nil {
		return err
	}
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, args})
	if err != nil {
		return err
	}
	if _, err := g.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return nil
}

func (g *guestConn) readReply(out any) error {
	line, err := g.replies.ReadBytes('\n')
	if err != nil {
		return err
	}
	return decodeReply(line, out)
}

// agentError is an error that a guest agent has returned. Its text comes from the guest.
type agentError struct{ text string }

func (e *agentError) Error() string { return e.text }

// decodeReply decodes the result in a reply of a guest agent into out unless out is nil.
func decodeReply(line []byte, out any) error {
	var reply struct {
		Return json.RawMessage `json:"return"`
		Error  *struct {
			Desc string `json:"desc"`
		} `json:"error"`
	}
	if err := json.Unmarshal(line, &reply); err != nil {
		return err
	}
	if reply.Error != nil {
		return &agentError{reply.Error.Desc}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(reply.Return, out)
}
