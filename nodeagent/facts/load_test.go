package facts

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestParseLoad checks how the texts of /proc/meminfo and /proc/stat are read, and that texts of another form are errors.
func TestParseLoad(t *testing.T) {
	const (
		meminfo = "MemTotal:       16318592 kB\nMemFree:          111111 kB\nMemAvailable:    8159296 kB\n"
		stat    = "cpu  1000 200 300 40000 500 60 70 80 900 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
	)
	l, err := parseLoad(meminfo, stat)
	require.NoError(t, err)
	require.Equal(t, Load{
		MemoryBytes: 16318592 << 10, AvailableBytes: 8159296 << 10,
		CPUSeconds: map[string]float64{"user": 12, "system": 4.3, "idle": 400, "iowait": 5, "steal": 0.8},
	}, l)
	for _, mode := range CPUModes {
		require.Contains(t, l.CPUSeconds, mode)
	}
	for name, texts := range map[string][2]string{
		"no MemAvailable": {"MemTotal: 1 kB\n", stat}, "no sum of CPUs": {meminfo, "cpu0 1 2 3 4 5 6 7 8\n"},
		"few fields": {meminfo, "cpu 1 2 3\n"}, "not a number": {meminfo, "cpu 1 2 3 4 x 6 7 8\n"},
	} {
		_, err := parseLoad(texts[0], texts[1])
		require.Error(t, err, name)
	}
	here, err := ReadLoad()
	require.NoError(t, err)
	require.NotZero(t, here.AvailableBytes)
	require.NotZero(t, here.CPUSeconds["idle"])
}
