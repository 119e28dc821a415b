package guest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseReady(t *testing.T) {
	for _, ready := range []Ready{
		{BootID: "67aea566-39ea-4b3b-8d76-4181ef64e63a", Up: 1.38, CPUs: 1, MemKiB: 158084},
		{BootID: "x", Up: 86400, CPUs: 64, MemKiB: 1 << 30, Disks: []Disk{{"sda", 2097152}, {"vda", 131072}}},
	} {
		got, err := ParseReady(ready.String() + "\r")
		require.NoError(t, err)
		require.Equal(t, ready, got)
	}
	require.Equal(t, "TRIVET GUEST READY boot_id=b up=2.00 cpus=1 mem_kib=9 disks=vda:8",
		Ready{BootID: "b", Up: 2, CPUs: 1, MemKiB: 9, Disks: []Disk{{"vda", 8}}}.String())
}

func TestParseReadyRefusesOtherLines(t *testing.T) {
	for name, line := range map[string]string{
		"empty":                                 "",
		"kernel":                                "[    1.41] reboot: Power down",
		"another word":                          "TRIVET GUEST UP up=10.00 boot_id=b",
		"cut off":                               "TRIVET GUEST READY boot_id=b up=1.38 cpus=1 mem_k",
		"value that is not a number":            "TRIVET GUEST READY boot_id=b up=soon cpus=1 mem_kib=9 disks=",
		"disk without a size":                   "TRIVET GUEST READY boot_id=b up=1.38 cpus=1 mem_kib=9 disks=vda",
		"disk with a size that is not a number": "TRIVET GUEST READY boot_id=b up=1.38 cpus=1 mem_kib=9 disks=vda:big",
		"middle of line":                        "x TRIVET GUEST READY boot_id=b up=1.38 cpus=1 mem_kib=9 disks=",
	} {
		_, err := ParseReady(line)
		require.ErrorIs(t, err, ErrNotReady, name)
	}
	ready, err := ParseReady("TRIVET GUEST READY boot_id=b up=1.38 cpus=1 mem_kib=9 disks= later=1")
	require.NoError(t, err, "unknown fields must be ignored")
	require.Equal(t, "b", ready.BootID)
}

func TestPatternContainsSeedAndOffset(t *testing.T) {
	buf := make([]byte, 2*SectorSize)
	Pattern(buf, "red", 3*SectorSize)
	require.Equal(t, "red 3\n"+strings.Repeat(".", SectorSize-6), string(buf[:SectorSize]))
	require.Equal(t, "red 4\n", string(buf[SectorSize:SectorSize+6]))

	// Pattern fills two halves of a range with the same data as the whole range, so that a range can be written in
	// parts.
	again := make([]byte, 2*SectorSize)
	Pattern(again[:SectorSize], "red", 3*SectorSize)
	Pattern(again[SectorSize:], "red", 4*SectorSize)
	require.Equal(t, buf, again)
}
