package main

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestParseFrames(t *testing.T) {
	header := strings.Repeat("00", 14)
	frames, err := parseFrames(strings.NewReader("\n" + header + "aB\r\n\n" + header))
	require.NoError(t, err)
	require.Equal(t, [][]byte{append(make([]byte, 14), 0xab), make([]byte, 14)}, frames)
	for text, want := range map[string]string{
		header + "\n00":      "frame 2 has 1 bytes, fewer than an Ethernet header",
		header + "0":         "frame 1: encoding/hex: odd length hex string",
		header[1:] + "x\n00": "frame 1: encoding/hex: invalid byte",
	} {
		_, err := parseFrames(strings.NewReader(text))
		require.ErrorContains(t, err, want)
	}
}

// TestPathMTUErrors checks the lines about the errors of a socket: from a router, and from the guest's own kernel.
func TestPathMTUErrors(t *testing.T) {
	report := func(number unix.Errno, origin byte, mtu uint32) []byte {
		b := binary.NativeEndian.AppendUint32(nil, uint32(number))
		b = append(b, origin, 3, 4, 0)
		b = binary.NativeEndian.AppendUint32(b, mtu)
		b = append(b, 0, 0, 0, 0) // data
		return append(b, unix.AF_INET, 0, 0, 0, 10, 0, 0, 1)
	}
	line, err := describeError(report(unix.EMSGSIZE, unix.SO_EE_ORIGIN_ICMP, 1300))
	require.NoError(t, err)
	require.Equal(t, "too-big from=10.0.0.1 mtu=1300", line)
	line, err = describeError(report(unix.EMSGSIZE, unix.SO_EE_ORIGIN_LOCAL, 1450))
	require.NoError(t, err)
	require.Equal(t, "too-big from=local mtu=1450", line)
	_, err = describeError(report(unix.EHOSTUNREACH, unix.SO_EE_ORIGIN_ICMP, 0))
	require.ErrorContains(t, err, "error from 10.0.0.1: no route to host")
	_, err = describeError(make([]byte, 8))
	require.Error(t, err)
}

func TestEchoReplies(t *testing.T) {
	p := &pinger{to: netip.MustParseAddr("10.0.0.2"), id: 7}
	packet := append([]byte{0x45, 0, 0, 38, 0, 0, 0, 0, 61, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1}, echo(7, 10)...)
	require.Empty(t, p.reply(packet), "a request is no reply")
	packet[20] = echoReply
	require.Equal(t, "reply from=10.0.0.2 bytes=10 ttl=61", p.reply(packet))
	packet[25]++ // the identifier
	require.Empty(t, p.reply(packet), "the reply to another program")
	require.Empty(t, p.reply(packet[:24]), "an incomplete packet")
}
