package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseDiskLoad(t *testing.T) {
	l, err := parseDiskLoad(strings.Fields("vdb randread 4096 10 1048576"))
	require.NoError(t, err)
	require.Equal(t, diskLoad{dev: "vdb", mode: "randread", block: 4096, count: 10, span: 1 << 20}, l)
	for _, wrong := range []string{
		"", "vdb read 4096 10", "vdb erase 4096 10 1048576", "vdb read 512 10 1048576", "vdb read 4096 0 1048576",
		"vdb read 4096 10 4095", "vdb read 2097152 10 4194304", "vdb read x 10 1048576",
	} {
		_, err := parseDiskLoad(strings.Fields(wrong))
		require.ErrorIs(t, err, errUsage, wrong)
	}
}

// TestDiskLoadOffsets checks that sequential modes begin again at the end of the span, and that random modes make the
// same operations in every run, all of them within the span.
func TestDiskLoadOffsets(t *testing.T) {
	next := diskLoad{mode: "write", block: 4096, span: 3*4096 + 100}.offsets()
	for _, want := range []int64{0, 4096, 8192, 0, 4096} {
		require.Equal(t, want, next())
	}
	random := diskLoad{mode: "randwrite", block: 4096, span: 100 * 4096}
	one, two := random.offsets(), random.offsets()
	seen := map[int64]bool{}
	for range 1000 {
		at := one()
		require.Equal(t, at, two())
		require.Zero(t, at%4096)
		require.Less(t, at, random.span)
		seen[at] = true
	}
	require.Greater(t, len(seen), 90)
}
