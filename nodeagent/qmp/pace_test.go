package qmp

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// storm runs client, with virtual time, on a connection to a fake QEMU. The fake QEMU sends a greeting and then text
// without pause; times is the maximum number of texts. sent is the number of texts that it has sent.
func storm(t *testing.T, text string, times int, client func(t *testing.T, c *Conn, sent *int)) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		sent, done := 0, make(chan struct{})
		go func() {
			defer close(done)
			if play(far, "hello") != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, far) }() // reads commands and does not reply to them
			for range times {
				if _, err := io.WriteString(far, text); err != nil {
					return
				}
				sent++
			}
		}()
		c, err := New(t.Context(), near)
		require.NoError(t, err)
		client(t, c, &sent)
		require.NoError(t, c.Close())
		far.Close()
		<-done
	})
}

// TestEventStormIsReadSlowly checks that messages that a QEMU sends without pause are read at a limited rate, whatever
// they contain, and that Close does not wait for the end of a pause.
func TestEventStormIsReadSlowly(t *testing.T) {
	const seconds = 20
	for name, tc := range map[string]struct {
		text string
		most int // maximum number of texts in that time
	}{
		"events":             {`{"event": "STOP", "data": {}}` + "\n", messageBurst + seconds*messageRate},
		"unexpected replies": {`{"return": {}, "id": 0}` + "\n", messageBurst + seconds*messageRate},
		"late replies":       {`{"return": {}, "id": 1}` + "\n", messageBurst + seconds*messageRate},
		"large events":       {`{"event": "STOP", "data": "` + strings.Repeat("x", 1<<20) + `"}` + "\n", (byteBurst + seconds*byteRate) >> 20},
		"empty lines":        {strings.Repeat("\n", 4096), (byteBurst + seconds*byteRate) / 4096},
		"an endless line":    {strings.Repeat("[", 4096), MaxLine/4096 + 1},
	} {
		t.Run(name, func(t *testing.T) {
			storm(t, tc.text, 4*tc.most, func(t *testing.T, c *Conn, sent *int) {
				time.Sleep(seconds * time.Second)
				synctest.Wait()
				require.LessOrEqual(t, *sent, tc.most+messageRate/10, "more was read than the rate allows, plus the messages between two pauses")
				closing := time.Now()
				require.NoError(t, c.Close())
				require.Zero(t, time.Since(closing))
			})
		})
	}
}

// TestReplyDuringEventStorm checks that a reply is read after the events that QEMU sent before it, which are read at
// the limited rate.
func TestReplyDuringEventStorm(t *testing.T) {
	connected(t, "hello\nhear query-status\nflood 9000 1\nsay {\"return\": {}, \"id\": $1}", func(t *testing.T, c *Conn) {
		began := time.Now()
		require.NoError(t, c.Do(within(t, DefaultTimeout), "query-status", nil, nil))
		require.Equal(t, (9000-messageBurst)/messageRate*time.Second, time.Since(began).Truncate(time.Second))
	})
}

// TestCommandTimesOutDuringEventStorm checks that a command without reply returns when its context ends, although
// events arrive without pause.
func TestCommandTimesOutDuringEventStorm(t *testing.T) {
	storm(t, `{"event": "STOP", "data": {}}`+"\n", 100_000, func(t *testing.T, c *Conn, _ *int) {
		err := c.Do(within(t, 3*time.Second), "query-status", nil, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
