package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

const (
	port         = 53
	writeTimeout = 2 * time.Second        // for one answer over TCP
	acceptPause  = 100 * time.Millisecond // after a failed accept, for example without free descriptors
)

// listener serves one address by UDP and TCP.
type listener struct {
	servers []*dns.Server
	stopped chan struct{} // closed when one of the servers ended
	once    sync.Once
}

// listen opens the sockets of an address in the namespace and serves them.
func (s *Server) listen(ctx context.Context, address netip.Addr) (*listener, error) {
	var udp *net.UDPConn
	var tcp net.Listener
	at := netip.AddrPortFrom(address, port).String()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return bindFreely(c, address) }}
	config.SetMultipathTCP(false)
	err := nsthread.InNamed(s.namespace, func() error {
		p, err := config.ListenPacket(ctx, "udp", at)
		if err != nil {
			return err
		}
		udp = p.(*net.UDPConn)
		tcp, err = config.Listen(ctx, "tcp", at)
		return err
	})
	if err != nil {
		if udp != nil {
			udp.Close()
		}
		return nil, err
	}
	l := &listener{stopped: make(chan struct{})}
	for _, server := range []*dns.Server{
		{PacketConn: &udpSocket{UDPConn: udp, server: s}, UDPSize: maxUDPReply},
		{Listener: &tcpListener{Listener: tcp, server: s}},
	} {
		server.Handler = s
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		l.servers = append(l.servers, server)
		go func() {
			if err := server.ActivateAndServe(); err != nil {
				s.log.Error("serve DNS", "address", address, "error", err)
			}
			l.once.Do(func() { close(l.stopped) })
		}()
		select {
		case <-started:
		case <-l.stopped:
			l.close(ctx)
			return nil, errors.New("the server ended at once")
		}
	}
	return l, nil
}

// ended reports whether one of the servers ended by itself.
func (l *listener) ended() bool {
	select {
	case <-l.stopped:
		return true
	default:
		return false
	}
}

// close closes the sockets and waits for unanswered queries, until ctx ends.
func (l *listener) close(ctx context.Context) {
	for _, server := range l.servers {
		server.ShutdownContext(ctx) // fails if the server ended by itself: then its socket is closed
	}
}

// closeAll closes listeners at the same time.
func closeAll(ctx context.Context, all []*listener) {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	var wait sync.WaitGroup
	for _, l := range all {
		wait.Go(func() { l.close(ctx) })
	}
	wait.Wait()
}

// bindFreely permits a socket to bind to an address that no device has yet.
func bindFreely(c syscall.RawConn, address netip.Addr) error {
	level, option := unix.IPPROTO_IP, unix.IP_FREEBIND
	if address.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
	}
	var result error
	if err := c.Control(func(fd uintptr) { result = unix.SetsockoptInt(int(fd), level, option, 1) }); err != nil {
		return err
	}
	return result
}

// udpSocket passes on only queries that are to be answered.
type udpSocket struct {
	*net.UDPConn
	server *Server
}

func (u *udpSocket) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		n, from, err := u.ReadFromUDPAddrPort(b)
		if err != nil {
			return n, nil, err
		}
		client := from.Addr().Unmap()
		if u.server.zone.Load().hasClient(client) && u.server.limits.admit(client) {
			return n, net.UDPAddrFromAddrPort(from), nil
		}
	}
}

// SetReadDeadline ignores deadlines in the future. The library sets one of two seconds for each read, which would wake
// all sockets of idle VPCs every two seconds. It ends a read by a deadline in the past.
func (u *udpSocket) SetReadDeadline(t time.Time) error {
	if t.After(time.Now()) {
		return nil
	}
	return u.UDPConn.SetReadDeadline(t)
}

// tcpListener accepts only connections that are to be served.
type tcpListener struct {
	net.Listener
	server *Server
}

func (l *tcpListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				time.Sleep(acceptPause) // the library calls Accept again at once
			}
			return nil, err
		}
		client := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if l.server.zone.Load().hasClient(client) {
			if end, ok := l.server.limits.connect(client); ok {
				return &tcpConn{Conn: conn, end: sync.OnceFunc(end)}, nil
			}
		}
		conn.Close()
	}
}

// tcpConn limits the time that an answer takes.
type tcpConn struct {
	net.Conn
	end func()
}

func (c *tcpConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *tcpConn) Close() error {
	c.end()
	return c.Conn.Close()
}

// inodeOf returns a number that identifies the namespace which has a name now.
func inodeOf(namespace string) (uint64, error) {
	ns, err := netns.GetFromName(namespace)
	if err != nil {
		return 0, fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(ns), &stat); err != nil {
		return 0, fmt.Errorf("stat network namespace: %w", err)
	}
	return stat.Ino, nil
}
