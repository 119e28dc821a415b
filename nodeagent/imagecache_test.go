package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCacheLimit checks the limit of the image cache with and without a configured limit, and on a file system that is
// almost full.
func TestCacheLimit(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		name                    string
		configured              uint64
		size, total, free, want int64
	}{
		{name: "by default a fifth of the file system", size: gib, total: 100 * gib, free: 50 * gib, want: 20 * gib},
		{name: "configured", configured: 3 * gib, size: gib, total: 100 * gib, free: 50 * gib, want: 3 * gib},
		{name: "a full file system", size: 8 * gib, total: 100 * gib, free: 10 * gib, want: 3 * gib},
		{name: "a file system that others fill", size: 2 * gib, total: 100 * gib, free: 0, want: 0},
		{name: "more than can exist", configured: 1 << 63, size: gib, total: 100 * gib, free: 50 * gib, want: maxImageCache},
	} {
		require.InDelta(t, c.want, cacheLimit(c.configured, c.size, c.total, c.free), 1<<20, c.name)
	}
}
