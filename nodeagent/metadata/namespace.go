package metadata

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// maxDumps is the number of attempts to list the addresses of an interface. The kernel interrupts a list when an
// address changes.
const maxDumps = 10

// setAddresses adds the wanted addresses to the interface lo in a namespace, removes those with the value false, and
// sets the interface up. Other addresses are left unchanged.
func setAddresses(namespace netns.NsHandle, wanted map[netip.Addr]bool) error {
	h, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink in namespace: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find interface lo: %w", err)
	}
	if lo.Attrs().Flags&net.FlagUp == 0 {
		if err := h.LinkSetUp(lo); err != nil {
			return fmt.Errorf("set interface lo up: %w", err)
		}
	}
	have, err := listAddresses(h, lo)
	if err != nil {
		return fmt.Errorf("list addresses of lo: %w", err)
	}
	for address, want := range wanted {
		existing, exists := have[address]
		switch {
		case want && !exists:
			// Without duplicate address detection, an IPv6 address can be used at once. The scope keeps the kernel from
			// choosing the IPv4 address as the source of packets that other programs send from the namespace.
			added := &netlink.Addr{
				IPNet: netlink.NewIPNet(address.AsSlice()), Flags: unix.IFA_F_NODAD, Scope: int(netlink.SCOPE_HOST),
			}
			if err := h.AddrAdd(lo, added); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("add address %s to lo: %w", address, err)
			}
		case !want && exists:
			if err := h.AddrDel(lo, &existing); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return fmt.Errorf("remove address %s from lo: %w", address, err)
			}
		}
	}
	return nil
}

func listAddresses(h *netlink.Handle, link netlink.Link) (map[netip.Addr]netlink.Addr, error) {
	var list []netlink.Addr
	var err error
	for range maxDumps {
		if list, err = h.AddrList(link, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]netlink.Addr{}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			out[ip.Unmap()] = a
		}
	}
	return out, nil
}

// listener is a listener in a namespace with its HTTP server.
type listener struct {
	namespace string // netns.NsHandle.UniqueId
	server    *http.Server
	handler   *handler
	done      chan struct{} // closed when the server does not accept connections any more
}

// open starts to serve an address of a VPC.
func (s *Server) open(
	ctx context.Context, vpc cloud.VPCID, namespace netns.NsHandle, address netip.Addr,
) (*listener, error) {
	socket, err := listenIn(ctx, namespace, netip.AddrPortFrom(address, httpPort))
	if err != nil {
		return nil, err
	}
	o := s.options
	h := &handler{options: o, gate: s.gate}
	l := &listener{namespace: namespace.UniqueId(), handler: h, done: make(chan struct{})}
	l.server = &http.Server{
		Handler:           l.handler,
		ConnContext:       withConnection,
		ReadHeaderTimeout: o.Limits.RequestTime,
		ReadTimeout:       o.Limits.RequestTime,
		WriteTimeout:      o.Limits.RequestTime,
		IdleTimeout:       o.Limits.RequestTime,
		MaxHeaderBytes:    o.Limits.HeaderBytes,
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn),
		// Otherwise the library answers OPTIONS * also for addresses without a port.
		DisableGeneralOptionsHandler: true,
	}
	go func() {
		defer close(l.done)
		err := l.server.Serve(&gatedListener{Listener: socket, gate: s.gate, vpc: vpc, lookup: o.Lookup})
		if !errors.Is(err, http.ErrServerClosed) {
			o.Log.Error("metadata listener ended", "vpc", vpc, "address", address, "error", err)
		}
	}()
	return l, nil
}

// ended reports whether the listener stopped without being closed.
func (l *listener) ended() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// close closes the listener and its connections, and waits until it has ended and no request is being answered.
// Requests do not block once their connections are closed.
func (l *listener) close() {
	_ = l.server.Close() // its errors are those of sockets that are closed in any case
	<-l.done
	l.handler.close()
}

// listenIn opens a listener in a namespace.
func listenIn(ctx context.Context, namespace netns.NsHandle, address netip.AddrPort) (net.Listener, error) {
	network, level, option := "tcp4", unix.IPPROTO_IP, unix.IP_TTL
	if address.Addr().Is6() {
		network, level, option = "tcp6", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
	}
	hops := 1
	if mutant.On(mutant.KeepHopLimit) {
		hops = 64
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		// Accepted sockets inherit the option.
		err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, option, hops) })
		return errors.Join(err, failed)
	}}
	var l net.Listener
	err := nsthread.In(namespace, func() (err error) {
		l, err = config.Listen(ctx, network, address.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return l, nil
}
