package cloud

import (
	"fmt"
	"log/slog"
	"net/netip"
)

// ESPOverhead is the maximum number of bytes that ESP in transport mode with AES-GCM adds to a packet: the ESP header
// (8), the initialization vector (8), padding to a multiple of 4 (at most 3), the trailer (2), and the integrity check
// value (16). See RFC 4106.
const ESPOverhead = 8 + 8 + 3 + 2 + 16

// ESPKey is the key of one direction between two hosts: 32 bytes for AES-256 and 4 bytes of salt (RFC 4106). Its
// methods hide the key in logs, errors and JSON.
type ESPKey [36]byte

const hiddenKey = "[key]"

// Format implements fmt.Formatter for all verbs. It writes a text instead of the key.
func (ESPKey) Format(s fmt.State, _ rune) { fmt.Fprint(s, hiddenKey) }

// LogValue implements slog.LogValuer. It returns a text instead of the key.
func (ESPKey) LogValue() slog.Value { return slog.StringValue(hiddenKey) }

// MarshalText implements encoding.TextMarshaler. It returns a text instead of the key.
func (ESPKey) MarshalText() ([]byte, error) { return []byte(hiddenKey), nil }

// ESPState is a security association of ESP (RFC 4303): the state of one direction between two hosts.
type ESPState struct {
	// SPI is the security parameters index, by which the receiver of a packet finds the state for the packet. It is
	// unique among the states of one receiver, and at least 256.
	SPI uint32
	Key ESPKey
}

// EncryptedPeer is another host with which a host exchanges encrypted VXLAN packets.
type EncryptedPeer struct {
	VTEP netip.Addr
	// Send encrypts the packets to the peer.
	Send ESPState
	// Receive are the states of packets from the peer. While keys are rotated, the peer can use any of them.
	Receive []ESPState
}
