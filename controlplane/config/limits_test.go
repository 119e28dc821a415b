package config

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/budget"
)

// TestLimitsConfiguration checks that the file sets a limit, that a flag overrides the file, and that a limit that
// neither sets has its default.
func TestLimitsConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte("limits: {calls_per_second: 7, bytes_per_second: 0, disk_reserve: 1073741824}\n"), 0o600))
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	bound := Default()
	bound.BindFlags(flags)
	require.NoError(t, flags.Parse([]string{"--limits-calls-per-second=9", "--limits-disk-reserve=-1"}))
	c, err := Load(file, nil, flags)
	require.NoError(t, err)
	require.NoError(t, c.Validate())
	require.Equal(t, Limits{
		Limits:      budget.Limits{CallsPerSecond: 9, CallsBurst: budget.Default.CallsBurst, BytesPerSecond: 0, BytesBurst: budget.Default.BytesBurst},
		DiskReserve: -1,
	}, c.Limits)
	c.Limits.CallsBurst = 0
	require.ErrorContains(t, c.Validate(), "limits.calls_burst")
}
