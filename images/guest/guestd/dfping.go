package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	icmpHeader   = 8  // bytes
	ipHeader     = 20 // bytes, without options
	maxEcho      = 65507
	echoRequest  = 8
	echoReply    = 0
	defaultLimit = 5 // seconds that dfping waits
)

// dfpingCommand sends one ICMP echo request with BYTES bytes of data and the flag "don't fragment" to an IPv4
// address, and waits for the reply or an error. It prints one line:
//
//	reply from=10.0.0.2 bytes=1400 ttl=63
//	too-big from=10.0.0.1 mtu=1300
//	too-big from=local mtu=1450
//
// The second line reports an error from a router on the path, the third one an error from the guest's own kernel.
// dfping fails if neither a reply nor such an error arrives within SECONDS. It ignores the path MTU that the kernel has
// learned from earlier errors.
func dfpingCommand(args []string, _ io.Reader, out io.Writer) error {
	if len(args) < 2 || len(args) > 3 {
		return errUsage
	}
	to, err := netip.ParseAddr(args[0])
	if err != nil || !to.Is4() {
		return fmt.Errorf("%w: %q is no IPv4 address", errUsage, args[0])
	}
	size, err := strconv.Atoi(args[1])
	if err != nil || size < 0 || size > maxEcho {
		return fmt.Errorf("%w: %q is not from 0 to %d bytes", errUsage, args[1], maxEcho)
	}
	seconds := defaultLimit
	if len(args) == 3 {
		if seconds, err = strconv.Atoi(args[2]); err != nil || seconds < 1 {
			return fmt.Errorf("%w: %q is no number of seconds", errUsage, args[2])
		}
	}
	p, err := openPing(to)
	if err != nil {
		return err
	}
	defer unix.Close(p.fd)
	line, err := p.ping(size, time.Duration(seconds)*time.Second)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, line)
	return err
}

// pinger is a raw ICMP socket that is connected to one address.
type pinger struct {
	fd int
	to netip.Addr
	id uint16 // identifies the requests of this process
}

// openPing opens a socket whose packets must not be fragmented, and which has a queue of errors (IP_RECVERR of ip(7)).
func openPing(to netip.Addr) (*pinger, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMP)
	if err != nil {
		return nil, fmt.Errorf("open ICMP socket: %w", err)
	}
	// PROBE sets the flag and, unlike DO, ignores the path MTU that the kernel has learned.
	err = os.NewSyscallError("setsockopt", errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE),
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1)))
	if err == nil {
		err = os.NewSyscallError("connect", unix.Connect(fd, &unix.SockaddrInet4{Addr: to.As4()}))
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &pinger{fd: fd, to: to, id: uint16(os.Getpid())}, nil
}

// ping sends a request with size bytes of data and returns the line that describes its result. It waits up to limit.
func (p *pinger) ping(size int, limit time.Duration) (string, error) {
	if _, err := unix.Write(p.fd, echo(p.id, size)); err != nil && !errors.Is(err, unix.EMSGSIZE) {
		return "", fmt.Errorf("send: %w", err)
	}
	buffer := make([]byte, maxFrame)
	for end := time.Now().Add(limit); ; {
		left := time.Until(end)
		if left <= 0 {
			return "", fmt.Errorf("neither a reply nor an error has arrived from %v within %v", p.to, limit)
		}
		// Poll returns also when there is an error in the socket's queue of errors.
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return "", fmt.Errorf("poll: %w", err)
		}
		line, err := p.readError(buffer)
		if line != "" || err != nil {
			return line, err
		}
		n, err := unix.Read(p.fd, buffer)
		if err != nil {
			continue // nothing has arrived, or the error is in the queue too
		}
		if line := p.reply(buffer[:n]); line != "" {
			return line, nil
		}
	}
}

// echo builds an ICMP echo request with size bytes of data.
func echo(id uint16, size int) []byte {
	message := make([]byte, icmpHeader+size)
	message[0] = echoRequest
	binary.BigEndian.PutUint16(message[4:], id)
	binary.BigEndian.PutUint16(message[6:], 1)
	var sum uint32
	for i := 0; i < icmpHeader; i += 2 { // the data is zero
		sum += uint32(binary.BigEndian.Uint16(message[i:]))
	}
	binary.BigEndian.PutUint16(message[2:], ^uint16(sum+sum>>16))
	return message
}

// reply returns the line about a packet, or "" if the packet is no reply to a request of p.
func (p *pinger) reply(packet []byte) string {
	if len(packet) < ipHeader {
		return ""
	}
	header := int(packet[0]&0xf) * 4
	if len(packet) < header+icmpHeader || packet[header] != echoReply ||
		binary.BigEndian.Uint16(packet[header+4:]) != p.id {
		return ""
	}
	from := netip.AddrFrom4([4]byte(packet[12:]))
	return fmt.Sprintf("reply from=%v bytes=%d ttl=%d", from, len(packet)-header-icmpHeader, packet[8])
}

// readError reads an error from the socket's queue of errors and returns the line about it. It returns "" if the queue
// is empty, and fails if the error is not that a packet was too big.
func (p *pinger) readError(buffer []byte) (string, error) {
	control := make([]byte, 512)
	_, n, _, _, err := unix.Recvmsg(p.fd, buffer, control, unix.MSG_ERRQUEUE)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read queue of errors: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil {
		return "", fmt.Errorf("parse queue of errors: %w", err)
	}
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR {
			return describeError(m.Data)
		}
	}
	return "", errors.New("the queue of errors has a message without an error")
}

// describeError returns the line about an error. data is a struct sock_extended_err, followed by the address of the
// error's sender (ip(7)).
func describeError(data []byte) (string, error) {
	const size = 16 // of the struct
	if len(data) < size {
		return "", errors.New("the error is incomplete")
	}
	number, origin := unix.Errno(binary.NativeEndian.Uint32(data)), data[4]
	from := "local"
	if origin == unix.SO_EE_ORIGIN_ICMP && len(data) >= size+8 {
		from = netip.AddrFrom4([4]byte(data[size+4:])).String()
	}
	if number != unix.EMSGSIZE {
		return "", fmt.Errorf("error from %s: %w", from, number)
	}
	return fmt.Sprintf("too-big from=%s mtu=%d", from, binary.NativeEndian.Uint32(data[8:])), nil
}
