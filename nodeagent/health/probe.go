package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// maxHeader limits the size of the header of an HTTP response in bytes.
const maxHeader = 64 << 10

// probe checks a target once from inside of a namespace. It returns nil if the target is healthy.
func probe(ctx context.Context, namespace string, t *Target) error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialIn(ctx, namespace, t.Source, t.Address)
	}
	if t.Check.HTTPPath == "" {
		conn, err := dial(ctx, "", "")
		if err != nil {
			return err
		}
		return conn.Close()
	}
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true, MaxResponseHeaderBytes: maxHeader}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+t.Address.String()+t.Check.HTTPPath, nil)
	if err != nil {
		return err
	}
	request.Header.Set("User-Agent", "trivet-health-check")
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode < 200 || response.StatusCode > 399 {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	return nil
}

// dialIn opens a TCP connection from inside of a namespace. Both addresses are IPv4 addresses.
func dialIn(ctx context.Context, namespace string, source netip.Addr, to netip.AddrPort) (net.Conn, error) {
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", namespace, err)
	}
	defer ns.Close()
	var file *os.File
	if err := nsthread.In(ns, func() (err error) {
		file, err = connect(source, to)
		return err
	}); err != nil {
		return nil, err
	}
	defer file.Close() // net.FileConn has a copy
	if err := await(ctx, file); err != nil {
		return nil, err
	}
	return net.FileConn(file)
}

// connect makes a TCP socket in the namespace of the thread and begins to connect it.
func connect(source netip.Addr, to netip.AddrPort) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	// Without this option, bind would reserve a local port that no other connection from the address can have, and many
	// checks would use up the ports. With it, connect chooses a port that is free for the target.
	err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: source.As4()})
	}
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return os.NewFile(uintptr(fd), to.String()), nil
}

// await waits until a socket is connected, has failed to connect, or ctx ends.
func await(ctx context.Context, file *os.File) error {
	if deadline, ok := ctx.Deadline(); ok {
		if err := file.SetWriteDeadline(deadline); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, func() { file.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := raw.Write(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = err
		case code != 0:
			result = unix.Errno(code)
		default:
			// Without an error the socket is connected, or its connection is still in progress.
			_, err = unix.Getpeername(int(fd))
			return err == nil
		}
		return true
	}); err != nil {
		return fmt.Errorf("connect to %s: %w", file.Name(), err)
	}
	if result != nil {
		return fmt.Errorf("connect to %s: %w", file.Name(), result)
	}
	return nil
}
