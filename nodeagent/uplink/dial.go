package uplink

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
)

const (
	// deadAfter is how long a connection stays open without any packet from the other host.
	deadAfter = 3 * time.Second
	// maxMessage is the maximum size of a member's message, in bytes.
	maxMessage = 8 << 20
)

// dial returns a gRPC client for the member at addr. It connects at its first call. The caller must close it.
func (l *Link) dial(addr string, config *tls.Config) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithContextDialer(l.dialTCP),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: deadAfter}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return conn, nil
}

// dialTCP connects with kernel timeouts that detect a dead host: by probes when nothing is sent (SO_KEEPALIVE), by
// missing acknowledgements otherwise (TCP_USER_TIMEOUT, tcp(7)).
func (l *Link) dialTCP(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{
		Timeout:         deadAfter,
		LocalAddr:       l.localAddr(),
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 2},
		Control: func(_, _ string, raw syscall.RawConn) error {
			var failed error
			err := raw.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(deadAfter.Milliseconds()))
			})
			if err != nil {
				return err
			}
			return failed
		},
	}
	return d.DialContext(ctx, "tcp", addr)
}

// localAddr returns the local address of connections, or nil if the kernel chooses it.
func (l *Link) localAddr() net.Addr {
	if !l.o.LocalIP.IsValid() {
		return nil
	}
	return &net.TCPAddr{IP: l.o.LocalIP.AsSlice()}
}
