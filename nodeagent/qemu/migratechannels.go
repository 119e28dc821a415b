package qemu

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// MemoryChannels is the number of connections over which QEMU sends most of the memory, besides the main one (QEMU's
// multifd). One TLS connection of a tunnel needs one CPU on each host. Four connections need four CPUs, which most
// hosts can spare. More connections would take CPU time from the guests.
const MemoryChannels = 4

// ChannelRate is the smallest rate limit, in bytes per second, at which the memory is sent over several connections.
// QEMU 7.2 then exceeds its limit by up to 512 KiB in each interval of 100 ms, which is too much for a smaller limit.
const ChannelRate = 64 << 20

// socketsDir is the path at which QEMU sees the directory Home.Sockets.
const socketsDir = "/sockets"

// listeningURI makes QEMU accept connections at the listening socket that it was passed with the name migration. QEMU
// 7.2 to 8.1 parse the text after tcp: like any other socket address, which may name a file descriptor. QEMU could also
// listen at a path (unix:), but it would need a directory in which it can create files.
const listeningURI = "tcp:fd:migration"

// Route is the way by which the QEMU of a source sends the memory.
type Route struct {
	// Stream is a socket that is connected to the target's QEMU.
	Stream *os.File
	// If Channels is not 0, QEMU does not use Stream. It opens the main connection, and then that many others, to the
	// listening socket with the name Socket in Home.Sockets. The first connection is the main one.
	Channels int
	Socket   string
}

// ReceivesChannels reports whether a QEMU of this version can receive the memory over several connections. See
// listeningURI.
func ReceivesChannels(version string) bool {
	major, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	return err1 == nil && err2 == nil && (a == 7 && b >= 2 || a == 8 && b < 2)
}

// SendsChannels reports whether this QEMU can send the memory over several connections (see Route).
func (p *Process) SendsChannels() bool { return p.Record().Sockets }

// ErrNotEnded means that a cancelled or failed migration has left its thread in QEMU (see StopSending). The guest can run,
// but QEMU refuses another migration.
var ErrNotEnded = errors.New("QEMU has not ended an earlier migration: stop and start the VM")

// stopWithin is the maximum time of StopSending.
const stopWithin = 5 * time.Second

// endedWithin is the maximum time until QEMU has removed a migration whose status says that it has ended.
const endedWithin = 2 * time.Second

// CheckEnded returns ErrNotEnded if QEMU has not removed an earlier migration although it has ended. QEMU would refuse
// the next migration after the guest was stopped. The caller must call it only while no migration is active.
func (p *Process) CheckEnded(ctx context.Context) error {
	for end := time.Now().Add(endedWithin); ; {
		// QEMU lists a migration until its thread has ended.
		var all []struct{ Type string }
		err := p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
			return conn.Do(ctx, "query-yank", nil, &all)
		})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(all, func(i struct{ Type string }) bool { return i.Type == "migration" }) {
			return nil
		}
		if time.Now().After(end) {
			return ErrNotEnded
		}
		if pause(ctx, migrationPoll); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// StopSending makes QEMU stop sending memory over several connections. The caller must call it before it closes the
// connections: if a write to one of them fails, the migration thread of QEMU 7.2 may wait for ever for it. StopSending
// waits at most stopWithin.
func (p *Process) StopSending(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	return p.cancelSending(ctx)
}

// cancelSending cancels the migration, and returns when QEMU has stopped sending. If QEMU has accepted the command, but
// has not stopped sending when the deadline of ctx passes, it returns ErrNotEnded.
func (p *Process) cancelSending(ctx context.Context) error {
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate_cancel", nil, nil)
	})
	for cancelling := false; err == nil; {
		var m Migration
		if m, err = p.Migration(ctx); err == nil {
			if !m.Active() {
				return nil
			}
			cancelling = m.Status == "cancelling"
		}
		if pause(ctx, migrationPoll); ctx.Err() != nil {
			err = ctx.Err()
			if cancelling && errors.Is(err, context.DeadlineExceeded) {
				err = ErrNotEnded
			}
		}
	}
	return err
}
