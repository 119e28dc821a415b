package dhcp

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// allServers is the multicast group to which DHCPv6 clients send (RFC 8415 section 7.1).
var allServers = netip.MustParseAddr("ff02::1:2")

// location identifies the device on which sockets are open. A device or namespace that was made again under the same
// name has a different location.
type location struct {
	namespace uint64 // inode
	device    int    // index
}

// locate returns the location of a device.
func locate(namespace, device string) (location, error) {
	ns, err := netns.GetFromName(namespace)
	if err != nil {
		return location{}, fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(ns), &stat); err != nil {
		return location{}, fmt.Errorf("stat network namespace: %w", err)
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return location{}, fmt.Errorf("open netlink socket: %w", err)
	}
	defer h.Close()
	link, err := h.LinkByName(device)
	if err != nil {
		return location{}, fmt.Errorf("find device: %w", err)
	}
	return location{namespace: stat.Ino, device: link.Attrs().Index}, nil
}

// sockets are the open sockets of a responder.
type sockets struct {
	location   location
	ipv4, ipv6 *os.File      // packet sockets; reading and writing are whole Ethernet frames
	reserved   []*os.File    // sockets that receive nothing, see open
	changed    chan struct{} // wakes the advertiser
	done       chan struct{} // closed by close
}

// openSockets opens the sockets on a device in a network namespace.
func openSockets(namespace, device string) (*sockets, error) {
	s := &sockets{changed: make(chan struct{}, 1), done: make(chan struct{})}
	err := nsthread.InNamed(namespace, func() error { return s.open(device) })
	if err == nil {
		s.location, err = locate(namespace, device)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// open runs on a thread in the namespace.
func (s *sockets) open(device string) error {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return fmt.Errorf("find device: %w", err)
	}
	if s.ipv4, err = openPacketSocket(link.Index, unix.ETH_P_IP, filter4()); err != nil {
		return fmt.Errorf("open packet socket for DHCPv4: %w", err)
	}
	if s.ipv6, err = openPacketSocket(link.Index, unix.ETH_P_IPV6, filter6()); err != nil {
		return fmt.Errorf("open packet socket for DHCPv6: %w", err)
	}
	port, err := openSocket(unix.AF_INET, unix.SOCK_DGRAM, func(fd int) error {
		if err := unix.BindToDevice(fd, device); err != nil {
			return err
		}
		if err := attachFilter(fd, []bpf.Instruction{bpf.RetConstant{Val: 0}}); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet4{Port: serverPort4})
	})
	if err != nil {
		return fmt.Errorf("reserve the DHCP port: %w", err)
	}
	s.reserved = append(s.reserved, port)
	// A bridge that snoops on multicast passes messages to the group on to the host only if the host is a member.
	group, err := openSocket(unix.AF_INET6, unix.SOCK_DGRAM, func(fd int) error {
		member := unix.IPv6Mreq{Multiaddr: allServers.As16(), Interface: uint32(link.Index)}
		return unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &member)
	})
	if err != nil {
		return fmt.Errorf("join the multicast group of DHCPv6 servers: %w", err)
	}
	s.reserved = append(s.reserved, group)
	return nil
}

// close closes all sockets that are open and wakes all waiting goroutines.
func (s *sockets) close() {
	close(s.done)
	for _, f := range append(s.reserved, s.ipv4, s.ipv6) {
		if f != nil {
			f.Close()
		}
	}
}

// wakeAdvertiser makes the current or next call of waitAdvertiser return.
func (s *sockets) wakeAdvertiser() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// waitAdvertiser waits for d, or until wakeAdvertiser is called. It returns false if the sockets were closed.
func (s *sockets) waitAdvertiser(d time.Duration) bool {
	select {
	case <-s.done:
		return false
	case <-s.changed:
	case <-time.After(d):
	}
	return true
}

// wait waits for d. It returns false if the sockets were closed.
func (s *sockets) wait(d time.Duration) bool {
	select {
	case <-s.done:
		return false
	case <-time.After(d):
		return true
	}
}

// openPacketSocket opens a socket that receives, of the packets of a protocol that arrive on a device, those that
// match the filter. The protocol is set last, so that no packet arrives before the filter is attached.
func openPacketSocket(device, protocol int, filter []bpf.Instruction) (*os.File, error) {
	return openSocket(unix.AF_PACKET, unix.SOCK_RAW, func(fd int) error {
		if err := attachFilter(fd, filter); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: device, Protocol: networkOrder(uint16(protocol))})
	})
}

// openSocket opens a socket whose reads end when it is closed, and prepares it.
func openSocket(family, kind int, prepare func(fd int) error) (*os.File, error) {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	if err := prepare(fd); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("prepare socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "socket"), nil
}

// networkOrder returns v with the byte order that socket addresses have.
func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

func attachFilter(fd int, filter []bpf.Instruction) error {
	raw, err := bpf.Assemble(filter)
	if err != nil {
		return fmt.Errorf("assemble filter: %w", err)
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// filter4 accepts Ethernet frames with UDP datagrams to the DHCPv4 server. The kernel discards all others, so that
// routed traffic costs the agent nothing.
func filter4() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: ethernetHeader + 9, Size: 1}, // protocol
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: cloud.ProtocolUDP, SkipTrue: 6},
		bpf.LoadAbsolute{Off: ethernetHeader + 6, Size: 2}, // fragment
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x3fff, SkipTrue: 4},
		bpf.LoadMemShift{Off: ethernetHeader},              // X = length of the IP header
		bpf.LoadIndirect{Off: ethernetHeader + 2, Size: 2}, // destination port
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: serverPort4, SkipTrue: 1},
		bpf.RetConstant{Val: maxFrame},
		bpf.RetConstant{Val: 0},
	}
}

// filter6 accepts Ethernet frames with router solicitations and with UDP datagrams to the DHCPv6 server. Extension
// headers are not accepted; clients use none.
func filter6() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: ethernetHeader + 6, Size: 1}, // next header
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: cloud.ProtocolUDP, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: cloud.ProtocolICMPv6, SkipTrue: 5},
		bpf.LoadAbsolute{Off: ethernetHeader + ipv6Header, Size: 1}, // type
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: routerSolicitation, SkipTrue: 2, SkipFalse: 3},
		bpf.LoadAbsolute{Off: ethernetHeader + ipv6Header + 2, Size: 2}, // destination port
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: serverPort6, SkipTrue: 1},
		bpf.RetConstant{Val: maxFrame},
		bpf.RetConstant{Val: 0},
	}
}
