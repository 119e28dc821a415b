package onehost

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseDescriptors(t *testing.T) {
	d, err := parseDescriptors(strings.Fields("qemu -chardev socket,id=qmp-work,fd=3,server=on -chardev socket,id=console,fd=4,server=on " +
		"-add-fd fd=7,set=7,opaque=virtio0-base -add-fd fd=5,set=5,opaque=console -add-fd fd=6,set=6,opaque=virtio0"))
	require.NoError(t, err)
	require.Equal(t, descriptors{sockets: map[int]string{3: "qmp-work", 4: "console"}, log: 5, disks: []int{6, 7}}, d)
	_, err = parseDescriptors([]string{"qemu"})
	require.Error(t, err)
}

// TestStartChecksDescriptors checks that QEMU is not started if its arguments refer to other descriptors than it would
// get.
func TestStartChecksDescriptors(t *testing.T) {
	h := &ByHand{Dir: t.TempDir(), Argv: []string{"/bin/true", "socket,id=console,fd=3,server=on", "fd=9,set=9,opaque=console"}}
	_, err := h.Start(t.Context())
	require.EqualError(t, err, "the descriptors in QEMU's arguments are not 3 to 4")
	h.Argv = append(h.Argv, "fd=5,set=5,opaque=virtio0")
	_, err = h.Start(t.Context())
	require.EqualError(t, err, "QEMU expects 1 files of disks, and there are 0")
}

func TestArguments(t *testing.T) {
	got := Arguments([]string{"qemu", "-S", "-kernel", "/boot/kernel", "-initrd", "/boot/initrd", "-preconfig"}, "/guest", "quiet")
	require.Equal(t, strings.Fields("qemu -kernel /guest/vmlinuz -initrd /guest/initrd.lz4 -append quiet"), got)
}
