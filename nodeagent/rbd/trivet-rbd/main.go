//go:build ceph

// Command trivet-rbd is the helper process of the agent that calls librbd. It serves rbd.v1 RbdService for one Ceph
// cluster on the socket that the agent passes as file descriptor 3, and exits when the agent closes that socket.
//
// Decisions:
//
//   - This is the only program of Trivet that is built with cgo. Its build tags are ceph and pacific. The agent remains
//     a static binary.
//   - The socket carries gRPC. It has one connection, whose other end only the agent has.
//   - Calls of librbd cannot be cancelled. The agent kills the process if a call passes its deadline, and starts
//     another one. Every change is therefore one call of librbd that is repeatable, or ends with a rename.
//   - The program reads no file. It receives the address, the user and the key of the cluster in Connect, and keeps
//     them in memory only.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// maxCalls is the number of calls that run at once. Each call can block a thread of the process until librbd returns.
const maxCalls = 16

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "trivet-rbd:", err)
		os.Exit(1)
	}
}

func run() error {
	file := os.NewFile(3, "socket")
	conn, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("file descriptor 3 is not a socket of the agent: %w", err)
	}
	_ = file.Close() // conn has a copy
	g := grpc.NewServer(grpc.MaxConcurrentStreams(maxCalls), grpc.MaxRecvMsgSize(8<<20))
	s := &server{importing: map[string]chan struct{}{}}
	rbdv1.RegisterRbdServiceServer(g, s)
	listener := &oneConn{conns: make(chan net.Conn, 1), closed: make(chan struct{})}
	listener.conns <- &closingConn{Conn: conn, onClose: listener.close}
	if err := g.Serve(listener); err != nil && err != io.EOF {
		return err
	}
	return nil
}

// oneConn is a listener that accepts one connection, and ends when that connection is closed.
type oneConn struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, io.EOF
	}
}

func (l *oneConn) close() { l.once.Do(func() { close(l.closed) }) }

func (l *oneConn) Close() error {
	l.close()
	return nil
}

func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{Name: "trivet-rbd", Net: "unix"} }

// closingConn calls onClose when it is closed.
type closingConn struct {
	net.Conn
	onClose func()
}

func (c *closingConn) Close() error {
	defer c.onClose()
	return c.Conn.Close()
}
