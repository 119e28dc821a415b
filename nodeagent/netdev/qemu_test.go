package netdev

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestQEMU gives the descriptor of OpenTap to a QEMU process with a virtio network device. The tap has a carrier while
// QEMU has the descriptor, and ends with QEMU.
func TestQEMU(t *testing.T) {
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Skip("qemu-system-x86_64 is not installed")
	}
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	_, err = h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	tap, err := h.OpenTap(t.Context(), vpc, "p1-10")
	require.NoError(t, err)

	qemu := exec.CommandContext(t.Context(), program, "-machine", "q35,accel=tcg", "-m", "64", "-nodefaults", "-no-user-config",
		"-display", "none", "-S", "-netdev", "tap,id=net0,fd=3,vhost=off",
		"-device", "virtio-net-pci,netdev=net0,mac=02:00:00:00:01:0a", "-qmp", "stdio")
	qemu.ExtraFiles = []*os.File{tap}
	var errors strings.Builder
	qemu.Stderr = &errors
	input, err := qemu.StdinPipe()
	require.NoError(t, err)
	output, err := qemu.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, qemu.Start())
	ended := false
	t.Cleanup(func() {
		if !ended {
			_ = qemu.Process.Kill()
			_ = qemu.Wait()
		}
	})
	require.NoError(t, tap.Close())

	// QEMU sends the greeting of QMP when it has made all devices.
	lines := bufio.NewScanner(output)
	require.True(t, lines.Scan(), "QEMU ended: %s", &errors)
	require.Contains(t, lines.Text(), "QMP")
	require.NotContains(t, l.ip(h.vpcName("a"), "link show port1-10"), ",UP", "the device is down before Activate")
	activated, err := h.Activate(t.Context(), vpc)
	require.NoError(t, err)
	require.Empty(t, activated.Missing)
	require.Eventually(t, func() bool {
		return strings.Contains(l.ip(h.vpcName("a"), "link show port1-10"), "LOWER_UP")
	}, 10*time.Second, 10*time.Millisecond, "no carrier")
	require.Empty(t, h.apply(vpc))

	_, err = input.Write([]byte(`{"execute": "qmp_capabilities"}{"execute": "quit"}` + "\n"))
	require.NoError(t, err)
	for lines.Scan() { // until QEMU closes its output
	}
	require.NoError(t, qemu.Wait(), &errors)
	ended = true
	require.NotContains(t, l.ip(h.vpcName("a"), "link"), "port1-10", "the tap ends with QEMU")
}
