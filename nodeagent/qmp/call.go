package qmp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

var errNotSent = errors.New("pass descriptor")

// Do sends command with args (a struct or map that encodes to a JSON object, or nil), waits for its reply, and decodes
// the result into out unless out is nil. The error wraps an *[Error] when QEMU refuses the command, [ErrClosed] when
// the connection ends, or the error of ctx. A ctx without a deadline gets [DefaultTimeout]. QEMU may execute the
// command after ctx has ended.
//
// Use the typed commands of [Conn.With] instead where go-qemu has them.
func (c *Conn) Do(ctx context.Context, command string, args, out any) error {
	return c.call(ctx, command, args, out, nil)
}

// SendFD passes a duplicate of f to QEMU under name (getfd), for a later netdev_add fd=name or migrate fd:name. The
// caller must still close f. QEMU closes the duplicate after its use, or when another descriptor gets the same name.
func (c *Conn) SendFD(ctx context.Context, name string, f *os.File) error {
	return c.call(ctx, "getfd", map[string]string{"fdname": name}, nil, f)
}

// AddFD adds a duplicate of f to the descriptor set with number set (add-fd), which QEMU opens as /dev/fdset/<set>. It
// returns QEMU's number of the descriptor, for remove-fd. opaque is a comment that query-fdsets shows. The caller must
// still close f.
func (c *Conn) AddFD(ctx context.Context, set int, opaque string, f *os.File) (int, error) {
	var out struct {
		FD int `json:"fd"`
	}
	args := map[string]any{"fdset-id": set, "opaque": opaque}
	err := c.call(ctx, "add-fd", args, &out, f)
	return out.FD, err
}

// call does the same as Do. If f is not nil, it also passes a duplicate of f to QEMU with the command.
func (c *Conn) call(ctx context.Context, command string, args, out any, f *os.File) error {
	result, err := c.exchange(ctx, command, args, f)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(result, out); err != nil {
		return fmt.Errorf("%s: decode result: %w", command, err)
	}
	return nil
}

// exchange sends one command and returns the result in QEMU's reply. If f is not nil, a duplicate of f is sent with the
// command.
func (c *Conn) exchange(ctx context.Context, command string, args any, f *os.File) (json.RawMessage, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	req := request{Execute: command}
	if err := req.setArgs(args); err != nil {
		return nil, err
	}
	id, slot, err := c.register()
	if err != nil {
		return nil, err
	}
	req.ID = id
	if err := c.send(ctx, req, f); err != nil {
		c.unregister(id)
		return nil, err
	}
	select {
	case r := <-slot:
		return r.result()
	case <-ctx.Done():
		if c.unregister(id) {
			return nil, ctx.Err()
		}
		return (<-slot).result()
	case <-c.done:
		select {
		case r := <-slot: // The reply to quit may arrive just before the connection ends.
			return r.result()
		default:
			return nil, c.closedErr()
		}
	}
}

// register returns the id of a new command and the channel that receives its reply.
func (c *Conn) register() (uint64, chan reply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return 0, nil, closedError(c.cause)
	}
	c.lastID++
	slot := make(chan reply, 1)
	c.pending[c.lastID] = slot
	return c.lastID, slot, nil
}

// unregister removes the channel of a command that was not sent, or whose caller no longer waits. It returns false if
// the reply is in the channel already.
func (c *Conn) unregister(id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, waiting := c.pending[id]
	delete(c.pending, id)
	return waiting
}

// send writes one command. If only a part of it can be written, send ends the connection: QEMU would read the next
// command as the rest of this one.
func (c *Conn) send(ctx context.Context, req request, f *os.File) error {
	line, err := req.encode()
	if err != nil {
		return err
	}
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.closedErr()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.isEnding() {
		return c.closedErr()
	}
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		_ = c.nc.SetWriteDeadline(time.Unix(1, 0))
	})
	n, err := write(c.nc, line, f)
	if !stop() {
		<-cut
		_ = c.nc.SetWriteDeadline(time.Time{})
	}
	if n == len(line) {
		return nil
	}
	if n == 0 && errors.Is(err, errNotSent) {
		return err
	}
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		return ctx.Err()
	}
	c.endSoon(fmt.Errorf("write %d of %d bytes: %w", n, len(line), err))
	return c.closedErr()
}

// request is one command in the form that is sent to QEMU.
type request struct {
	Execute   string          `json:"execute"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
	ID        uint64          `json:"id"`
}

func (r *request) setArgs(args any) error {
	if args == nil {
		return nil
	}
	b, err := json.Marshal(args)
	if err != nil {
		return fmt.Errorf("encode arguments: %w", err)
	}
	if !bytes.Equal(b, []byte("null")) {
		r.Arguments = b
	}
	return nil
}

func (r request) encode() ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if len(b) >= MaxLine {
		return nil, fmt.Errorf("encode: %w", errTooLong)
	}
	return append(b, '\n'), nil
}

// write sends b and returns how many bytes of b were sent. If f is not nil, a duplicate of f is attached to the first
// byte.
func write(nc net.Conn, b []byte, f *os.File) (int, error) {
	if f == nil {
		return nc.Write(b)
	}
	uc, ok := nc.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%w: a %T cannot", errNotSent, nc)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNotSent, err)
	}
	var n int
	var sendErr error
	// f.Fd is not used, because it would set the caller's descriptor to blocking mode.
	err = raw.Control(func(fd uintptr) {
		n, _, sendErr = uc.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil)
	})
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNotSent, err)
	}
	if sendErr != nil || n == len(b) {
		return n, sendErr
	}
	rest, err := uc.Write(b[n:])
	return n + rest, err
}

// withDefaultTimeout returns ctx if it has a deadline, and otherwise a context that also ends after DefaultTimeout.
func withDefaultTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, DefaultTimeout)
}
