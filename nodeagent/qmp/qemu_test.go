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

	"github.com/digitalocean/go-qemu/qmp/raw"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// qemu starts a real QEMU whose guest is paused, and ends it at the end of the test. work and inspect are the paths of
// its two monitor sockets.
func qemu(t *testing.T, machine string, args ...string) (cmd *exec.Cmd, work, inspect string) {
	t.Helper()
	path, err := exec.LookPath("qemu-system-x86_64")
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "qmp") // the path of t.TempDir can be too long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	work, inspect = filepath.Join(dir, "work"), filepath.Join(dir, "inspect")
	args = append(args, "-machine", machine, "-nodefaults", "-no-user-config", "-display", "none", "-S",
		"-qmp", "unix:"+work+",server=on,wait=off", "-qmp", "unix:"+inspect+",server=on,wait=off")
	cmd = exec.Command(path, args...)
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
	cmd, work, inspect := qemu(t, "none")
	ctx := within(t, 30*time.Second)
	m := NewSocket(work)
	defer m.Close()
	c, err := m.Conn(ctx) // waits until QEMU has created the socket
	require.NoError(t, err)

	// This reply is longer than any buffer of go-qemu's socket monitor.
	var schema []struct {
		Name string `json:"name"`
	}
	require.NoError(t, c.Do(ctx, "query-qmp-schema", nil, &schema))
	require.Greater(t, len(schema), 500)

	err = c.Do(ctx, "device_del", map[string]string{"id": "nope"}, nil)
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "DeviceNotFound", e.Class)
	err = c.Do(ctx, "no-such-command", nil, nil)
	e, ok = errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "CommandNotFound", e.Class)

	// Descriptors that are sent concurrently must each be stored under their own number, also after a caller no longer
	// waits.
	given, cancel := context.WithCancel(ctx)
	gaveUp := make(chan error, 1)
	go func() { _, err := c.AddFD(given, 99, "given up", os.Stdin); gaveUp <- err }()
	cancel()
	<-gaveUp // The command may succeed or return the error of its context.
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

	// A second client of one monitor gets ErrBusy, while a client of the other monitor can connect.
	short, cancel := context.WithTimeout(ctx, time.Second) // the connection must be made in this time
	defer cancel()
	_, err = Dial(short, work)
	require.ErrorIs(t, err, ErrBusy)
	other, err := Dial(ctx, inspect)
	require.NoError(t, err)
	defer other.Close()

	// After Close, the socket opens a new connection to the same QEMU.
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

	gone, cancel := context.WithTimeout(ctx, time.Second) // the connection must be made in this time
	defer cancel()
	_, err = m.Conn(gone)
	require.ErrorIs(t, err, context.DeadlineExceeded, "the socket is closed")
	require.NoError(t, m.Close())
	_, err = m.Conn(ctx)
	require.ErrorIs(t, err, ErrClosed)
}

// TestTypedCommands checks the commands that the package documentation lists as sent by go-qemu, on a real QEMU with a
// machine and a disk.
func TestTypedCommands(t *testing.T) {
	dir := t.TempDir()
	base, overlay := filepath.Join(dir, "base"), filepath.Join(dir, "overlay")
	require.NoError(t, os.WriteFile(base, make([]byte, 1<<20), 0o600))
	out, err := exec.Command("qemu-img", "create", "-f", "qcow2", "-b", base, "-F", "raw", overlay).CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd, work, _ := qemu(t, "q35", "-m", "64", "-uuid", "00000000-0000-4000-8000-00000000000a", "-action", "shutdown=pause",
		"-blockdev", fmt.Sprintf(`{"driver": "qcow2", "node-name": "virtio0", "file": {"driver": "file", "filename": %q}}`, overlay),
		"-device", "virtio-blk-pci,drive=virtio0,werror=stop,rerror=stop")
	socket := NewSocket(work)
	defer socket.Close()
	c, err := socket.Conn(within(t, 30*time.Second))
	require.NoError(t, err)
	m := raw.NewMonitor(c.With(within(t, 30*time.Second)))

	status, err := m.QueryStatus()
	require.NoError(t, err)
	require.Equal(t, raw.StatusInfo{Status: raw.RunStatePrelaunch}, status)
	uuid, err := m.QueryUUID()
	require.NoError(t, err)
	require.Equal(t, "00000000-0000-4000-8000-00000000000a", uuid.UUID)
	machines, err := m.QueryMachines()
	require.NoError(t, err)
	require.Greater(t, len(machines), 10)
	models, err := m.QueryCPUDefinitions()
	require.NoError(t, err)
	require.Greater(t, len(models), 10)
	stats, err := m.QueryBlockstats(nil)
	require.NoError(t, err)
	require.Len(t, stats, 1)
	require.Equal(t, "virtio0", *stats[0].NodeName)
	require.NoError(t, m.QomSet("/machine", "append", "quiet"))
	require.NoError(t, m.Cont())
	require.NoError(t, m.SystemReset())
	require.NoError(t, m.SystemPowerdown())
	require.NoError(t, m.Stop())
	status, err = m.QueryStatus()
	require.NoError(t, err)
	require.Equal(t, raw.RunStatePaused, status.Status)

	err = m.DeviceDel("nope")
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "DeviceNotFound", e.Class)
	require.NoError(t, m.Quit())
	require.NoError(t, cmd.Wait())
	<-c.Done()
	require.ErrorIs(t, m.Cont(), ErrClosed)
}

// TestRunStatesAreKnown checks that go-qemu can decode every run state of the installed QEMU. An unknown one would make
// query-status fail.
func TestRunStatesAreKnown(t *testing.T) {
	_, work, _ := qemu(t, "none")
	socket := NewSocket(work)
	defer socket.Close()
	c, err := socket.Conn(within(t, 30*time.Second))
	require.NoError(t, err)
	var schema []struct {
		Name    string `json:"name"`
		RetType string `json:"ret-type"`
		Members []struct {
			Name string `json:"name"`
			Type string `json:"type"`
		} `json:"members"`
		Values []string `json:"values"`
	}
	require.NoError(t, c.Do(t.Context(), "query-qmp-schema", nil, &schema))
	at := map[string]int{}
	for i, entity := range schema {
		at[entity.Name] = i
	}
	answer := schema[at[schema[at["query-status"]].RetType]]
	var states []string
	for _, m := range answer.Members {
		if m.Name == "status" {
			states = schema[at[m.Type]].Values
		}
	}
	require.Contains(t, states, "guest-panicked")
	for _, state := range states {
		var known raw.RunState
		require.NoError(t, json.Unmarshal([]byte(strconv.Quote(state)), &known))
		require.Equal(t, state, known.String())
	}
	var unknown raw.RunState
	require.Error(t, json.Unmarshal([]byte(`"of-the-future"`), &unknown))
}
