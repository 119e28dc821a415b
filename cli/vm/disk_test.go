package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func TestAmounts(t *testing.T) {
	for _, tc := range []struct {
		text string
		unit uint64
		want uint64
		ok   bool
	}{
		{"512", mib, 512, true}, {"512M", mib, 512, true}, {"2G", mib, 2048, true}, {"1TiB", mib, 1 << 20, true},
		{"10", gib, 10, true}, {"10GiB", gib, 10, true}, {"2T", gib, 2048, true}, {"2048MiB", gib, 2, true},
		{"0", mib, 0, true},
		{"1000M", gib, 0, false}, // no whole number of GiB
		{"", mib, 0, false}, {"G", gib, 0, false}, {"-1", gib, 0, false}, {"1.5G", gib, 0, false}, {"1 G", gib, 0, false}, {"1k", mib, 0, false},
		{"99999999999999999999T", mib, 0, false},
		{"1099511627775T", mib, 1099511627775 << 20, true},
	} {
		got, ok := amount(tc.text, tc.unit)
		require.Equal(t, tc.ok, ok, tc.text)
		require.Equal(t, tc.want, got, tc.text)
	}
}

func TestDisks(t *testing.T) {
	for text, want := range map[string]disk{
		"20": {id: "disk3", sizeGiB: 20},
		"1T,id=data,image=debian,bus=sata,cache=writethrough,boot-index=7": {
			id: "data", image: "debian", sizeGiB: 1024, bus: vmv1.DiskBus_DISK_BUS_SATA, cache: vmv1.DiskCache_DISK_CACHE_WRITETHROUGH, boot: 7,
		},
	} {
		got, err := parseDisk(3, text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"", ",", "20,", "20,bus", "20,bus=", "20,id=", "20,boot-index=-1", "20,boot-index=4294967296", "bus=ide", "20,,id=x"} {
		_, err := parseDisk(0, text)
		require.ErrorContains(t, err, "--disk", text)
	}
}
