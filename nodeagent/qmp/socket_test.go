package qmp

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSocketRepeatsHandshake checks that a Socket connects again to a QEMU that greets twice, or greets and then
// ignores commands, and that it gives up when the context ends.
func TestSocketRepeatsHandshake(t *testing.T) {
	const (
		greetsTwice = "say {\"QMP\": {}}\nsay {\"QMP\": {}}\nhear qmp_capabilities" // it does not hang up before the client
		isDeaf      = "say {\"QMP\": {}}\nhear qmp_capabilities\nhear nothing"
	)
	serve := func(t *testing.T, scripts ...string) *Socket {
		path := filepath.Join(t.TempDir(), "qmp")
		l, err := net.Listen("unix", path)
		require.NoError(t, err)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for _, script := range scripts {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				_ = play(nc, script) // the client may hang up before the end of the script
				nc.Close()
			}
		}()
		s := NewSocket(path)
		s.handshake = 200 * time.Millisecond
		t.Cleanup(func() {
			require.NoError(t, s.Close())
			l.Close()
			<-ended
		})
		return s
	}
	_, err := serve(t, greetsTwice, isDeaf, greetsTwice, "hello").Conn(within(t, time.Minute))
	require.NoError(t, err)

	_, err = serve(t, isDeaf, isDeaf, isDeaf).Conn(within(t, time.Second))
	require.ErrorContains(t, err, "qmp_capabilities")
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
