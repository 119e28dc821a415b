package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestAdminTokenIsRenewed checks that the administrator's token in the data directory is replaced a day before it
// expires or when it is no longer valid, and not otherwise.
func TestAdminTokenIsRenewed(t *testing.T) {
	key, path := clusterkey.Generate(), filepath.Join(t.TempDir(), layout.AdminTokenFile)
	now := time.Now()
	read := func() string {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		return string(text)
	}
	valid := func(context.Context, string) error { return nil }
	renew := func(at time.Time) { require.NoError(t, renewAdminToken(t.Context(), key, path, valid, at)) }
	renew(now)
	first := read()
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(&adminTokenCollector{filepath.Dir(path)})
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Equal(t, "trivet_admin_token_expiry_timestamp_seconds", families[0].GetName())
	require.InDelta(t, now.Add(30*24*time.Hour).Unix(), families[0].GetMetric()[0].GetGauge().GetValue(), 60)
	renew(now.Add(28 * 24 * time.Hour))
	require.Equal(t, first, read())
	renew(now.Add(29*24*time.Hour + time.Hour))
	require.NotEqual(t, first, read())
	second := read()
	valid = func(context.Context, string) error { return fault.New(fault.Unavailable, "no leader") }
	renew(now)
	require.Equal(t, second, read(), "the token must stay if valid cannot check it for lack of a leader")
	valid = func(context.Context, string) error { return fault.New(fault.Unauthenticated, "no longer valid") }
	renew(now.Add(time.Second))
	require.NotEqual(t, second, read(), "a token that is no longer valid must be replaced")
	require.NoError(t, os.WriteFile(path, nil, 0o600)) // as after a crash while the file was written
	families, err = registry.Gather()
	require.NoError(t, err)
	require.Empty(t, families)
	renew(now)
	require.NotEmpty(t, read())
}
