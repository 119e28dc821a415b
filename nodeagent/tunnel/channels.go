package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// MemorySocket is the name of the socket of the memory if [Config].Channels is not 0. At the target, QEMU listens at it,
// and it is in [Config].Dir. At the source, the tunnel process listens at it, and it is in [Config].Sockets.
const MemorySocket = "memory.sock"

// failSignal makes the process of a source fail its memory streams (see FailMemory).
const failSignal = unix.SIGTERM

// FailMemory makes the tunnel process of a source close QEMU's main connection and all memory streams to the target, as
// if the link to the target had failed. The process keeps reading QEMU's other connections. If the link does not accept
// data, QEMU cannot cancel a migration without this. FailMemory returns nil if no process runs.
func FailMemory(dir string) error {
	s, running, err := find(dir)
	if err == nil && running {
		err = sendSignal(dir, s, failSignal)
	}
	if err != nil {
		return fmt.Errorf("fail the memory streams: %w", err)
	}
	return nil
}

const (
	// mainEnd is the time that the other memory streams of a source have to end after QEMU has closed the stream Memory.
	mainEnd = time.Second
	// receiveEnd is the time that the target's QEMU has to close the stream Memory after the source has ended it.
	receiveEnd = 10 * time.Second
)

// memoryStreams returns the names of the memory streams: Memory, and one for each further channel.
func memoryStreams(channels int) []string {
	all := []string{Memory}
	for i := range channels {
		all = append(all, fmt.Sprintf("%s/%d", Memory, i+1))
	}
	return all
}

// sender has the memory streams of a source whose QEMU opens several connections.
//
// QEMU 7.2 does not end a migration reliably if one of the connections other than the main one breaks: its migration
// thread can then wait for ever for this connection (multifd_send_sync_main in migration/multifd.c), and QEMU refuses
// all later migrations. The sender therefore hides such an error: it closes the main connection, and reads the others
// to their end without sending the data. QEMU always notices that the main connection is closed, and closes the others
// itself.
type sender struct {
	mu     sync.Mutex
	failed bool
	main   net.Conn
	remote map[net.Conn]bool // connections to the target
}

// listenMemory opens the socket at which QEMU connects for each of its channels.
func (p *process) listenMemory() (net.Listener, error) {
	l, err := listenUnix(p.Sockets, MemorySocket)
	if err != nil {
		return nil, err
	}
	if err := os.Lchown(filepath.Join(p.Sockets, MemorySocket), p.UID, p.UID); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// acceptMemory accepts the connections of the source's QEMU, and opens a stream to the target for each. The first
// connection is the main one: QEMU opens the others only after that, and the kernel keeps the order of connections to a
// unix socket. Which of the others is which does not matter, because QEMU sends its number on each.
func (p *process) acceptMemory(ctx context.Context, l net.Listener) {
	s := &sender{remote: map[net.Conn]bool{}}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, failSignal)
	go func() {
		<-stop
		s.fail()
	}()
	names := memoryStreams(p.Channels)
	for len(names) > 0 {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(50 * time.Millisecond)
			continue
		}
		name := names[0]
		names = names[1:]
		if name == Memory {
			s.setMain(conn)
		}
		go p.sendMemory(ctx, s, conn.(*net.UnixConn), name)
	}
	_ = l.Close() // QEMU has opened all of its connections.
}

// sendMemory opens a memory stream to the target, and copies the data of a connection of QEMU to it.
func (p *process) sendMemory(ctx context.Context, s *sender, local *net.UnixConn, name string) {
	defer local.Close()
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	remote, err := p.dialTarget(opening, name)
	cancel()
	if err != nil {
		s.fail()
		drain(local)
		return
	}
	defer remote.NetConn().Close()
	defer s.forget(remote.NetConn())
	s.add(remote.NetConn())
	var both sync.WaitGroup
	both.Go(func() { s.receive(local, remote, name) })
	if err = copyAll(remote, local); err == nil {
		err = remote.CloseWrite()
	}
	switch {
	case err != nil:
		s.fail()
		drain(local)
	case name == Memory:
		time.AfterFunc(mainEnd, s.fail)
	}
	both.Wait()
}

// receive reads what the target sends on a stream. Only the stream Memory carries data from the target, which receive
// copies to QEMU.
func (s *sender) receive(local *net.UnixConn, remote duplex, name string) {
	if name != Memory {
		if copyAll(io.Discard, remote) != nil {
			s.fail()
		}
		return
	}
	err := copyAll(local, remote)
	if err == nil {
		err = local.CloseWrite()
	}
	if err != nil {
		s.fail()
	}
}

// setMain sets QEMU's main connection. It closes the connection if the streams have failed already.
func (s *sender) setMain(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.main = conn
	if s.failed {
		_ = conn.Close()
	}
}

// add adds a connection to the target. It closes the connection if the streams have failed already.
func (s *sender) add(remote net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remote[remote] = true
	if s.failed {
		_ = remote.Close()
	}
}

// forget removes a connection to the target that has ended.
func (s *sender) forget(remote net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.remote, remote)
}

// fail closes QEMU's main connection and all connections to the target.
func (s *sender) fail() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = true
	if s.main != nil {
		_ = s.main.Close()
	}
	for remote := range s.remote {
		_ = remote.Close()
	}
}

// drain reads a connection to its end.
func drain(conn net.Conn) { _ = copyAll(io.Discard, conn) }

// connectMemory connects a memory stream of a target to QEMU. With several channels, QEMU 7.2 takes the first connection
// for the main one. connectMemory therefore waits until the stream Memory is connected before it connects another one.
func (p *process) connectMemory(ctx context.Context, stream string) (duplex, error) {
	if p.Channels == 0 {
		return p.memory.(*net.UnixConn), nil
	}
	if stream != Memory {
		select {
		case <-p.mainConnected:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	local, err := dialUnix(ctx, p.Dir, MemorySocket)
	if err == nil && stream == Memory {
		close(p.mainConnected)
	}
	return local, err
}

// receiveMemory copies the data of a memory stream at a target. If there are several channels and one of them fails,
// receiveMemory ends the process: the target's QEMU does not always notice that one of its connections has ended, but
// the agent notices the end of the process.
func (p *process) receiveMemory(ctx context.Context, stream string, one duplex) {
	local, err := p.connectMemory(ctx, stream)
	if err == nil {
		if p.Channels > 0 && stream == Memory {
			ended := make(chan struct{})
			defer close(ended)
			one = notifyEnd{duplex: one, notify: func() {
				select {
				case <-ended:
				case <-time.After(receiveEnd):
					p.end()
				}
			}}
		}
		err = relay(one, local)
	}
	if err != nil && p.Channels > 0 {
		p.end()
	}
}

// notifyEnd is a connection that calls notify in a goroutine when the end of its data has been read.
type notifyEnd struct {
	duplex
	notify func()
}

func (n notifyEnd) Read(b []byte) (int, error) {
	count, err := n.duplex.Read(b)
	if errors.Is(err, io.EOF) {
		go n.notify()
	}
	return count, err
}
