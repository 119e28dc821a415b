package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/lease"
)

// TestGuardedVMs checks that the guard process kills VMs after the lease has ended, and tries again after an error.
func TestGuardedVMs(t *testing.T) {
	const leased, other = "01a2193d-fef9-79dc-b9a0-e7c739343073", "01a2193d-accc-7e55-9e15-215e7102cf31"
	dir := t.TempDir()
	records := filepath.Join(dir, "records")
	require.NoError(t, os.Mkdir(records, 0o700))
	write := func(id, fields string) {
		require.NoError(t, os.WriteFile(filepath.Join(records, id+".json"), []byte(`{"version":1,`+fields+`}`), 0o600))
	}
	write(leased, `"built":true,"live":true,"stops_with_lease":true`)
	write(other, `"built":true,"live":true`)

	var killed []string
	var refusal error
	var petted bool
	g := guardedVMs{
		dir: dir, pet: func() error { petted = true; return nil },
		kill: func(_ context.Context, vm string) error {
			killed = append(killed, vm)
			return refusal
		},
	}
	check := func(at time.Duration, wantDone bool, wantKilled ...string) {
		t.Helper()
		killed, petted = nil, false
		done, err := g.check(t.Context(), at)
		require.Equal(t, refusal != nil && len(killed) > 0, err != nil, err)
		require.Equal(t, wantDone, done)
		require.Equal(t, wantKilled, killed)
	}
	l, err := lease.Open(filepath.Join(dir, "lease"))
	require.NoError(t, err)
	require.NoError(t, l.Renew(lease.Now(), time.Hour))
	check(time.Minute, false)
	require.True(t, petted, "the watchdog resets a host with a lease")
	require.NoError(t, os.Remove(filepath.Join(dir, "lease"))) // A lease that was never granted has ended.
	check(2*time.Minute, false)
	check(2*time.Minute+guardDelay-1, false)
	require.False(t, petted, "the watchdog does not reset a host without a lease")
	refusal = errors.New("the process does not end")
	check(2*time.Minute+guardDelay, false, leased)
	check(2*time.Minute+guardDelay+time.Second, false, leased)
	require.False(t, petted, "the watchdog does not reset a host whose VM cannot be killed")
	refusal = nil
	check(2*time.Minute+guardDelay+2*time.Second, true, leased)
	write(leased, `"built":true,"stops_with_lease":true`)
	check(3*time.Minute, true)

	// A record that cannot be read counts as a VM that needs a lease. It does not stop the watchdog while there is a lease.
	require.NoError(t, os.WriteFile(filepath.Join(records, leased+".json"), []byte("{"), 0o600))
	killed, petted = nil, false
	done, err := g.check(t.Context(), 4*time.Minute)
	require.Error(t, err)
	require.False(t, done)
	require.Equal(t, []string{leased}, killed)
	l, err = lease.Open(filepath.Join(dir, "lease"))
	require.NoError(t, err)
	require.NoError(t, l.Renew(lease.Now(), time.Hour))
	_, err = g.check(t.Context(), 4*time.Minute)
	require.Error(t, err)
	require.True(t, petted)

	require.NoError(t, os.RemoveAll(dir))
	check(5*time.Minute, true)
}

// TestGuardLog checks that the guard process does not write the same error every second.
func TestGuardLog(t *testing.T) {
	var out bytes.Buffer
	g := guardLog{log: slog.New(slog.NewTextHandler(&out, nil))}
	g.write(nil)
	require.Empty(t, out.String())
	for range 100 {
		g.write(errors.New("a record cannot be read"))
	}
	require.Equal(t, 1, bytes.Count(out.Bytes(), []byte("\n")), "%s", out.String())
	g.write(errors.New("a process does not end"))
	g.write(nil)
	g.write(nil)
	g.write(errors.New("a record cannot be read"))
	require.Equal(t, 4, bytes.Count(out.Bytes(), []byte("\n")), "%s", out.String())
}
