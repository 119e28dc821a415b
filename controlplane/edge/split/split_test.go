package split

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSplitterClosesSilentConnections checks that a connection that sends too little to detect its protocol is closed
// after detectTimeout.
func TestSplitterClosesSilentConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listener := newSubListener(&net.TCPAddr{})
		s := New(listener, nil)
		served := make(chan error)
		go func() { served <- s.Serve() }()
		for _, text := range []string{"", "PRI"} {
			client, server := net.Pipe()
			require.True(t, listener.deliver(server))
			_, err := client.Write([]byte(text))
			require.NoError(t, err)
			start := time.Now()
			_, err = client.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, detectTimeout, time.Since(start))
		}
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	})
}
