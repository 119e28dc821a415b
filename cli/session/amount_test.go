package session

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAmounts(t *testing.T) {
	for _, tc := range []struct {
		text string
		unit uint64
		want uint64
		ok   bool
	}{
		{"512", MiB, 512, true}, {"512M", MiB, 512, true}, {"2G", MiB, 2048, true}, {"1TiB", MiB, 1 << 20, true},
		{"10", GiB, 10, true}, {"10GiB", GiB, 10, true}, {"2T", GiB, 2048, true}, {"2048MiB", GiB, 2, true},
		{"0", MiB, 0, true},
		{"1000M", GiB, 0, false}, // is not a whole number of GiB
		{"", MiB, 0, false}, {"G", GiB, 0, false}, {"-1", GiB, 0, false}, {"1.5G", GiB, 0, false}, {"1 G", GiB, 0, false}, {"1k", MiB, 0, false},
		{"99999999999999999999T", MiB, 0, false},
		{"1099511627775T", MiB, 1099511627775 << 20, true},
	} {
		got, ok := Amount(tc.text, tc.unit)
		require.Equal(t, tc.ok, ok, tc.text)
		require.Equal(t, tc.want, got, tc.text)
	}
}
