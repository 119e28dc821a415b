package firewall

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/firewall/frametest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Short names of the functions and variables of package frametest.
var (
	ethernet  = frametest.Ethernet
	arp       = frametest.ARP
	ip        = frametest.IP
	udp       = frametest.UDP
	icmp      = frametest.ICMP
	neighbor  = frametest.Neighbor
	join      = frametest.Join
	be16      = frametest.Uint16
	be32      = frametest.Uint32
	etherType = frametest.EtherType
	openWire  = frametest.OpenWire
	at        = frametest.At

	any4, allNodes, limited4 = frametest.Any4, frametest.AllNodes, frametest.Broadcast4
	broadcast                = frametest.Broadcast
)

type wire = frametest.Wire

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

func echo(source, destination netip.Addr, payload string) []byte {
	typ := uint8(8)
	if source.Is6() {
		typ = 128
	}
	return icmp(source, destination, typ, 0, join(be32(1), []byte(payload)))
}

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
	from.Send(t, frame)
	require.Eventually(t, func() bool {
		for _, w := range s.receivers {
			if w.Saw(tag) {
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
	from.Send(t, frame)
	verdict := ""
	var unassigned time.Time // when the first frame was dropped as unassigned
	require.Eventually(t, func() bool {
		for _, w := range s.receivers {
			if w.Saw(tag) {
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
