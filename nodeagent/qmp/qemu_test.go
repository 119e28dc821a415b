package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	goqemu "github.com/digitalocean/go-qemu/qmp"
	"github.com/digitalocean/go-qemu/qmp/raw"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// qemu starts a real QEMU without a machine, with monitors at two sockets, and ends it with the test.
func qemu(t *testing.T) (cmd *exec.Cmd, work, inspect string) {
	t.Helper()
	path, err := exec.LookPath("qemu-system-x86_64")
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "qmp") // t.TempDir can be too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	work, inspect = filepath.Join(dir, "work"), filepath.Join(dir, "inspect")
	cmd = exec.Command(path, "-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S",
		"-qmp", "unix:"+work+",server=on,wait=off", "-qmp", "unix:"+inspect+",server=on,wait=off")
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd, work, inspect
}

func TestRealQEMU(t *testing.T) {
	cmd, work, inspect := qemu(t)
	ctx := within(t, 30*time.Second)
	m := NewMonitor(work)
	defer m.Disconnect()
	c, err := m.Conn(ctx) // waits for the socket to appear
	require.NoError(t, err)
	require.NotEmpty(t, c.Version().String())

	// A reply longer than any buffer of go-qemu's.
	var schema []struct {
		Name string `json:"name"`
	}
	require.NoError(t, c.Do(ctx, "query-qmp-schema", nil, &schema))
	require.Greater(t, len(schema), 500)

	err = c.Do(ctx, "device_del", map[string]string{"id": "nope"}, nil)
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, DeviceNotFound, e.Class)
	err = c.Do(ctx, "no-such-command", nil, nil)
	e, ok = errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, CommandNotFound, e.Class)

	// Descriptors: each arrives under its own number, however many are on their way, also when a caller gives up.
	given, cancel := context.WithCancel(ctx)
	gaveUp := make(chan error, 1)
	go func() { _, err := c.AddFD(given, 99, "given up", os.Stdin); gaveUp <- err }()
	cancel()
	<-gaveUp // Either result is possible.
	var wg sync.WaitGroup
	for set := range 16 {
		f, err := os.Create(filepath.Join(t.TempDir(), strconv.Itoa(set)))
		require.NoError(t, err)
		defer f.Close()
		wg.Go(func() {
			fd, err := c.AddFD(ctx, set, f.Name(), f)
			assert.NoError(t, err)
			link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", cmd.Process.Pid, fd))
			assert.NoError(t, err)
			assert.Equal(t, f.Name(), link)
		})
	}
	wg.Wait()
	require.NoError(t, c.SendFD(ctx, "tap0", os.Stdin))
	require.NoError(t, c.Do(ctx, "closefd", map[string]string{"fdname": "tap0"}, nil))

	// The second client of one monitor is told so; the second monitor is free.
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = Dial(short, work)
	require.ErrorIs(t, err, ErrBusy)
	other, err := Dial(ctx, inspect)
	require.NoError(t, err)
	defer other.Close()

	// The owner comes back: another connection, the same QEMU.
	require.NoError(t, c.Close())
	again, err := m.Conn(ctx)
	require.NoError(t, err)
	require.NotSame(t, c, again)
	same, err := m.Conn(ctx)
	require.NoError(t, err)
	require.Same(t, again, same)

	from := other.Mark()
	require.NoError(t, again.Do(ctx, "quit", nil, nil))
	shutdown, err := other.Wait(ctx, from, named("SHUTDOWN"))
	require.NoError(t, err)
	var why struct {
		Guest  bool   `json:"guest"`
		Reason string `json:"reason"`
	}
	require.NoError(t, shutdown.Decode(&why))
	require.False(t, why.Guest)
	require.Equal(t, "host-qmp-quit", why.Reason)
	require.WithinDuration(t, time.Now(), shutdown.Time, time.Minute)
	require.NoError(t, cmd.Wait())
	<-other.Done()
	<-again.Done()
	require.ErrorIs(t, again.Do(ctx, "query-status", nil, nil), ErrClosed)

	gone, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = m.Conn(gone)
	require.ErrorIs(t, err, context.DeadlineExceeded, "nobody listens any more")
	require.NoError(t, m.Disconnect())
	_, err = m.Conn(ctx)
	require.ErrorIs(t, err, ErrClosed)
}

// Code written for go-qemu's Monitor works over ours.
func TestGoQEMUMonitor(t *testing.T) {
	cmd, path, _ := qemu(t)
	var m goqemu.Monitor = NewMonitor(path)
	require.NoError(t, m.Connect())
	events, err := m.Events(t.Context())
	require.NoError(t, err)
	unread, err := m.Events(t.Context())
	require.NoError(t, err)

	status, err := raw.NewMonitor(m).QueryStatus()
	require.NoError(t, err)
	require.False(t, status.Running)

	ask, err := json.Marshal(goqemu.Command{Execute: "human-monitor-command", Args: map[string]string{"command-line": "info name"}})
	require.NoError(t, err)
	out, err := m.Run(ask)
	require.NoError(t, err)
	require.JSONEq(t, `{"return": ""}`, string(out))
	out, err = m.Run([]byte(`{"execute": "query-yank", "id": "mine"}`))
	require.NoError(t, err)
	require.Contains(t, string(out), `"type":"chardev"`)
	require.Contains(t, string(out), `"id":"mine"`)
	for _, bad := range []string{``, `{}`, `[]`, `{"execute": "stop"} {"execute": "quit"}`, `{"exec-oob": "yank"}`, `{"execute": "stop", "arguements": {}}`} {
		_, err = m.Run([]byte(bad))
		require.ErrorContains(t, err, "read command", bad)
	}
	_, err = m.Run([]byte(`{"execute": "device_del", "arguments": {"id": "nope"}}`))
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, DeviceNotFound, e.Class)

	_, err = m.Run([]byte(`{"execute": "quit"}`))
	require.NoError(t, err)
	var names []string
	for e := range events { // ends with the connection
		names = append(names, e.Event)
		require.Positive(t, e.Timestamp.Seconds)
	}
	require.Equal(t, []string{"SHUTDOWN"}, names)
	require.NoError(t, cmd.Wait())

	require.NoError(t, m.Disconnect(), "although one channel was never read")
	_, open := <-unread
	require.False(t, open)
	_, err = m.Run(ask)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, m.Connect(), ErrClosed)
	require.NoError(t, m.Disconnect())
}
