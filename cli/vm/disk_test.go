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
			id: "data", image: "debian", sizeGiB: 1024, bus: vmv1.DiskBus_DISK_BUS_SATA, cache: vmv1.DiskCache_DISK_CACHE_WRITETHROUGH, boot: 7, named: true,
		},
		"size=5,class=fast": {id: "disk3", class: "fast", sizeGiB: 5},
	} {
		got, err := parseDisk(3, text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"", ",", "20,", "20,bus", "20,bus=", "20,id=", "20,boot-index=-1", "20,boot-index=4294967296", "bus=ide", "20,,id=x", "20,class=", "20,boot", "size="} {
		_, err := parseDisk(0, text)
		require.ErrorContains(t, err, "--disk", text)
	}
	for text, want := range map[string]disk{
		"data":                         {id: "disk2", volume: "data"},
		"root,boot,bus=scsi,id=root":   {id: "root", volume: "root", bus: vmv1.DiskBus_DISK_BUS_SCSI, first: true, named: true},
		"root,boot-index=3,cache=none": {id: "disk2", volume: "root", boot: 3, cache: vmv1.DiskCache_DISK_CACHE_NONE},
	} {
		got, err := parseVolume(2, text)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"", ",boot", "data,", "data,boot=1", "data,image=x", "data,class=x", "data,boot,boot"} {
		_, err := parseVolume(0, text)
		require.ErrorContains(t, err, "--volume", text)
	}
}
