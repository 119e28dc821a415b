package qmp

import (
	"context"
	"testing"
	"time"

	goqemu "github.com/digitalocean/go-qemu/qmp"
	"github.com/digitalocean/go-qemu/qmp/raw"
	"github.com/stretchr/testify/require"
)

func TestTypedCommandEndsWithItsContext(t *testing.T) {
	connected(t, "hello\nhear stop\nhear cont\nsleep 1m", func(t *testing.T, c *Conn) {
		start := time.Now()
		err := raw.NewMonitor(c.With(within(t, time.Second))).Stop()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "stop: ")
		require.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, raw.NewMonitor(c.With(t.Context())).Cont(), context.DeadlineExceeded)
		require.Equal(t, time.Second+DefaultTimeout, time.Since(start))
		time.Sleep(time.Minute)
	})
}

// TestTypedCommandWithUnknownAnswer checks that a command whose result go-qemu cannot decode returns an error, and that
// the connection stays usable.
func TestTypedCommandWithUnknownAnswer(t *testing.T) {
	script := `hello
		hear query-status
		say {"return": {"status": "of-the-future", "running": false}, "id": $1}
		hear query-status
		say {"return": {"status": "running", "running": true, "mood": {"of": "the future"}}, "id": $2}`
	connected(t, script, func(t *testing.T, c *Conn) {
		m := raw.NewMonitor(c.With(t.Context()))
		_, err := m.QueryStatus()
		require.ErrorContains(t, err, "of-the-future")
		status, err := m.QueryStatus()
		require.NoError(t, err, "an unknown field must be ignored")
		require.Equal(t, raw.StatusInfo{Running: true, Status: raw.RunStateRunning}, status)
	})
}

// TestGoQEMURefusesFileImages checks that go-qemu still cannot decode what QEMU 8.0 and later return by query-block for
// a raw image. If this test fails, the agent can use go-qemu's QueryBlock, which it avoids for that reason.
func TestGoQEMURefusesFileImages(t *testing.T) {
	script := `hello
		hear query-block
		say {"return": [{"device": "", "locked": false, "removable": false, "type": "unknown", "inserted": {"file": "a", "ro": false, "drv": "raw", "backing_file_depth": 0, "encrypted": false, "detect_zeroes": "off", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0, "write_threshold": 0, "cache": {"writeback": true, "direct": false, "no-flush": false}, "image": {"filename": "a", "format": "raw", "virtual-size": 0, "format-specific": {"type": "file", "data": {}}}}}], "id": $1}`
	connected(t, script, func(t *testing.T, c *Conn) {
		_, err := raw.NewMonitor(c.With(t.Context())).QueryBlock()
		require.ErrorContains(t, err, `unknown subtype "file"`)
	})
}

func TestWithRefusesUnencodableArguments(t *testing.T) {
	connected(t, "hello", func(t *testing.T, c *Conn) {
		m := c.With(t.Context())
		for _, bad := range []string{``, `{}`, `[]`, `{"execute": "stop"} {"execute": "quit"}`, `{"exec-oob": "yank"}`, `{"execute": "stop", "id": 1}`} {
			_, err := m.Run([]byte(bad))
			require.ErrorContains(t, err, "read command", bad)
		}
		_, err := m.Events(t.Context())
		require.ErrorIs(t, err, goqemu.ErrEventsNotSupported)
		require.NoError(t, m.Connect())
		require.NoError(t, m.Disconnect())
		require.ErrorIs(t, m.Connect(), ErrClosed)
		_, err = m.Run([]byte(`{"execute": "stop"}`))
		require.ErrorIs(t, err, ErrClosed)
	})
}
