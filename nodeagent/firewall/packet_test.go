package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var broadcast = cloud.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// Builders of frames and packets. Their arguments are in the order of the fields on the wire.

func ethernet(destination, source cloud.MAC, typ uint16, payload []byte) []byte {
	return join(destination[:], source[:], be16(typ), payload)
}

func arp(operation uint16, senderMAC cloud.MAC, sender netip.Addr, target netip.Addr) []byte {
	return join(be16(1), be16(0x0800), []byte{6, 4}, be16(operation), senderMAC[:], sender.AsSlice(),
		make([]byte, 6), target.AsSlice())
}

// ip builds an IPv4 or IPv6 packet, with the checksum of the transport protocol at the given offset, if not negative.
func ip(source, destination netip.Addr, protocol uint8, checksumAt int, payload []byte) []byte {
	if checksumAt >= 0 {
		pseudo := join(source.AsSlice(), destination.AsSlice(), []byte{0, protocol}, be16(uint16(len(payload))))
		if protocol == cloud.ProtocolICMP {
			pseudo = nil
		}
		binary.BigEndian.PutUint16(payload[checksumAt:], checksum(join(pseudo, payload)))
	}
	if source.Is6() {
		return join([]byte{0x60, 0, 0, 0}, be16(uint16(len(payload))), []byte{protocol, 255},
			source.AsSlice(), destination.AsSlice(), payload)
	}
	header := join([]byte{0x45, 0}, be16(uint16(20+len(payload))), []byte{0, 1, 0, 0, 64, protocol, 0, 0},
		source.AsSlice(), destination.AsSlice())
	binary.BigEndian.PutUint16(header[10:], checksum(header))
	return join(header, payload)
}

func udp(source, destination netip.AddrPort, payload string) []byte {
	segment := join(be16(source.Port()), be16(destination.Port()), be16(uint16(8+len(payload))), be16(0), []byte(payload))
	return ip(source.Addr(), destination.Addr(), cloud.ProtocolUDP, 6, segment)
}

const (
	flagSYN = 2
	flagACK = 16
)

func tcp(source, destination netip.AddrPort, flags byte, sequence, acknowledged uint32, payload string) []byte {
	segment := join(be16(source.Port()), be16(destination.Port()), be32(sequence), be32(acknowledged),
		[]byte{5 << 4, flags}, be16(65535), be32(0), []byte(payload))
	return ip(source.Addr(), destination.Addr(), cloud.ProtocolTCP, 16, segment)
}

func sctp(source, destination netip.AddrPort, payload string) []byte {
	// An INIT chunk with a parameter of an unknown type that contains the payload.
	padded := join([]byte(payload), make([]byte, (4-len(payload)%4)%4))
	init := join([]byte{1, 0}, be16(uint16(24+len(padded))), be32(7), be32(65535), be16(1), be16(1), be32(1),
		be16(0xc000), be16(uint16(4+len(padded))), padded)
	segment := join(be16(source.Port()), be16(destination.Port()), be32(0), be32(0), init)
	sum := crc32.Checksum(segment, crc32.MakeTable(crc32.Castagnoli))
	binary.LittleEndian.PutUint32(segment[8:], sum)
	return ip(source.Addr(), destination.Addr(), cloud.ProtocolSCTP, -1, segment)
}

// icmp builds an ICMP or ICMPv6 message. The body begins after the checksum.
func icmp(source, destination netip.Addr, typ, code uint8, body []byte) []byte {
	protocol := uint8(cloud.ProtocolICMP)
	if source.Is6() {
		protocol = cloud.ProtocolICMPv6
	}
	return ip(source, destination, protocol, 2, join([]byte{typ, code, 0, 0}, body))
}

func echo(source, destination netip.Addr, payload string) []byte {
	typ := uint8(8)
	if source.Is6() {
		typ = 128
	}
	return icmp(source, destination, typ, 0, join(be32(1), []byte(payload)))
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func be16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

func be32(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// etherType returns the EtherType of an IP packet.
func etherType(packet []byte) uint16 {
	if packet[0]>>4 == 6 {
		return unix.ETH_P_IPV6
	}
	return unix.ETH_P_IP
}

// wire sends and receives raw frames on a device.
type wire struct {
	fd    int
	index int
	mu    sync.Mutex
	seen  [][]byte
}

// openWire opens a device of a namespace and records all frames that it receives.
func openWire(t *testing.T, ns netns.NsHandle, device string) *wire {
	t.Helper()
	w := &wire{}
	require.NoError(t, nsthread.In(ns, func() (err error) {
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL))); err != nil {
			return err
		}
		request, err := unix.NewIfreq(device)
		if err != nil {
			return err
		}
		if err := unix.IoctlIfreq(w.fd, unix.SIOCGIFINDEX, request); err != nil {
			return err
		}
		w.index = int(request.Uint32())
		if err := unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		tick := unix.NsecToTimeval(int64(50 * time.Millisecond))
		if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: w.index})
	}))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		w.receive(stop)
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
		unix.Close(w.fd)
	})
	return w
}

func (w *wire) receive(stop chan struct{}) {
	buffer := make([]byte, 65536)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, from, err := unix.Recvfrom(w.fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		if link, ok := from.(*unix.SockaddrLinklayer); !ok || link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		w.mu.Lock()
		w.seen = append(w.seen, bytes.Clone(buffer[:n]))
		w.mu.Unlock()
	}
}

// saw reports whether a frame that contains the text has arrived.
func (w *wire) saw(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, frame := range w.seen {
		if bytes.Contains(frame, []byte(text)) {
			return true
		}
	}
	return false
}

// count returns the number of frames that have arrived and for which f returns true.
func (w *wire) count(f func(frame []byte) bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, frame := range w.seen {
		if f(frame) {
			n++
		}
	}
	return n
}

func (w *wire) send(t *testing.T, frame []byte) {
	t.Helper()
	require.NoError(t, unix.Sendto(w.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.index, Halen: 6}))
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }

// stage sends frames into the VPC and reports what happens to each.
type stage struct {
	lab       *lab
	receivers []*wire
	sent      int
}

// tag returns a text that identifies the next frame. Frames carry the text in their payload or after it.
func (s *stage) tag() string {
	s.sent++
	return fmt.Sprintf("<frame %06d>", s.sent)
}

// arrives sends a frame that contains tag and waits until a receiver gets it.
func (s *stage) arrives(t *testing.T, from *wire, frame []byte, tag string) {
	t.Helper()
	from.send(t, frame)
	require.Eventually(t, func() bool {
		for _, w := range s.receivers {
			if w.saw(tag) {
				return true
			}
		}
		return false
	}, patience, time.Millisecond, "the frame did not arrive")
}

// verdict sends a frame that contains tag. It returns "arrives" if a receiver gets the frame, or else the reason for
// which a frame was dropped. It returns as soon as one of the two has happened. The test sends no other frames meanwhile,
// but the bridge sends multicasts, which are dropped as unassigned at devices of unknown ports. Therefore "unassigned" is
// returned only if no other reason is counted soon after.
func (s *stage) verdict(t *testing.T, from *wire, frame []byte, tag string) string {
	t.Helper()
	before := s.lab.drops(t)
	from.send(t, frame)
	verdict := ""
	var unassigned time.Time // when the first frame was dropped as unassigned
	require.Eventually(t, func() bool {
		for _, w := range s.receivers {
			if w.saw(tag) {
				verdict = "arrives"
				return true
			}
		}
		after := s.lab.drops(t)
		verdict = map[bool]string{after.Spoof > before.Spoof: "spoof", after.Group > before.Group: "group",
			after.Invalid > before.Invalid: "invalid", after.Closed > before.Closed: "closed",
			after.Denied > before.Denied: "denied"}[true]
		if verdict == "" && after.Unassigned > before.Unassigned {
			if unassigned.IsZero() {
				unassigned = time.Now()
			}
			if time.Since(unassigned) > 300*time.Millisecond {
				verdict = "unassigned"
			}
		}
		return verdict != ""
	}, patience, time.Millisecond, "the frame neither arrived nor was counted as dropped")
	return verdict
}
