package rpc

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// TestClosedMeterIsRemoved closes a meter while frames are buffered in it and then reads them, as gRPC does after a
// keepalive timeout. The meter must not be registered again, because gRPC does not close the connection a second time.
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
