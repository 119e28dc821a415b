package rpc

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// A client that fills the meter's buffer with calls and does not read makes gRPC close the connection (keepalive) while
// frames are buffered. gRPC's reader takes those afterwards, and closes the connection only once.
func TestClosedMeterIsRemoved(t *testing.T) {
	i := NewIntake(1, nil)
	server, client := net.Pipe()
	var sent bytes.Buffer
	sent.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&sent, nil)
	for n := range uint32(3) {
		require.NoError(t, f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1 + 2*n, BlockFragment: []byte{0x82}, EndHeaders: true}))
	}
	go func() {
		client.Write(sent.Bytes())
		client.Close()
	}()
	m := newMeter(server, i, func() {})
	size := func() (n int) {
		i.meters.Range(func(any, any) bool { n++; return true })
		return n
	}
	_, err := io.ReadFull(m, make([]byte, len(http2.ClientPreface)+frameHeader+1))
	require.NoError(t, err)
	require.Equal(t, 1, size())
	require.NoError(t, m.Close())
	n, err := io.ReadFull(m, make([]byte, frameHeader+1))
	require.NoError(t, err, n)
	require.Zero(t, size())
}
