package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

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
