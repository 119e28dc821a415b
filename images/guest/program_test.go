package guest

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// run runs a shell script in the guest and returns its output and exit status.
func (m *machine) run(script string) (out []string, status string) {
	m.t.Helper()
	before := len(m.seen)
	status = m.ask("run "+script, "RAN rc=")
	for _, line := range m.seen[before:] {
		if text, ok := strings.CutPrefix(line, Prefix+"OUT "); ok {
			out = append(out, text)
		}
	}
	return out, status
}

// TestDiskLoad runs diskload on a disk. Each of its modes makes all operations, and writes reach the disk.
func TestDiskLoad(t *testing.T) {
	t.Parallel()
	img := build(t)
	file := filepath.Join(t.TempDir(), "disk.raw")
	require.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	m := start(t, append(img.direct(), "-drive", "file="+file+",format=raw,if=none,id=disk",
		"-device", "virtio-blk-pci,drive=disk")...)
	m.ready()
	for _, mode := range []string{"randread", "read", "randwrite", "write"} {
		out, status := m.run("/init diskload vda " + mode + " 4096 300 1048576")
		require.Equal(t, "0", status, out)
		require.Regexp(t, `^ops=300 bytes=1228800 us=[1-9][0-9]*$`, out[0])
	}
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(content), string(make([]byte, 4096)), "a block was not written")
	_, status := m.run("/init diskload vda read 4096 1 2097152")
	require.Equal(t, "1", status, "the disk is smaller")
	_, status = m.run("/init diskload vda erase 4096 1 4096")
	require.Equal(t, "2", status)
}

// TestGuestPrograms runs the programs of guestd in a guest that has one interface on QEMU's user network, with an
// MTU of 1500, and two that are connected to each other.
func TestGuestPrograms(t *testing.T) {
	img := build(t)
	m := start(t, append(img.direct(),
		"-netdev", "user,id=n0,net=10.9.0.0/24", "-device", "virtio-net-pci,netdev=n0,romfile=",
		"-netdev", "hubport,hubid=1,id=n1", "-device", "virtio-net-pci,netdev=n1,romfile=",
		"-netdev", "hubport,hubid=1,id=n2", "-device", "virtio-net-pci,netdev=n2,romfile=")...)
	m.ready()
	m.hear("NIC name=eth0")

	frame := func(text string) string {
		return hex.EncodeToString([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x09\x88\xb5" + text))
	}
	begin := "/init capture eth2 20 last >/tmp/got & " +
		"until grep -q capturing /tmp/got && ip link show eth1 | grep -q ,UP; do sleep 0.1; done; "
	send := fmt.Sprintf(`printf '%s\n\n%s\n' | /init send eth1 2 && `, frame("first"), frame("the last one"))
	out, status := m.run(begin + send + "wait $! && cat /tmp/got")
	require.Equal(t, "0", status, out)
	require.Contains(t, out, "sent 2 frames 2 times")
	count := strings.Count(strings.Join(out, " "), hex.EncodeToString([]byte("first")))
	require.Equal(t, 2, count, "%q", out)
	require.Equal(t, frame("the last one"), out[len(out)-1], "the capture ends with this frame")

	out, status = m.run("/init capture eth2 1 nothing")
	require.Equal(t, "1", status)
	require.Contains(t, out[len(out)-1], `no frame with "nothing" has arrived within 1 s`)

	out, status = m.run("/init dfping 10.9.0.2 1400")
	require.Equal(t, "0", status, out)
	require.Regexp(t, `^reply from=10\.9\.0\.2 bytes=1400 ttl=[0-9]+$`, out[0])
	out, status = m.run("/init dfping 10.9.0.2 1473")
	require.Equal(t, "0", status, out)
	require.Equal(t, []string{"too-big from=local mtu=1500"}, out)
	out, status = m.run("ip route add blackhole 192.0.2.0/24; /init dfping 192.0.2.1 10 1")
	require.Equal(t, "1", status, out)

	for _, wrong := range []string{
		"send", "send eth1 0", "capture eth2 x y", "dfping fe80::1 10", "dfping 10.9.0.2 70000", "other", "",
	} {
		_, status = m.run("echo | /init " + wrong)
		require.Equal(t, "2", status, wrong)
	}
	for _, bad := range []string{"echo xyz | /init send eth1", "echo 0011 | /init send eth1", "echo | /init send eth9"} {
		_, status = m.run(bad)
		require.Equal(t, "1", status, bad)
	}
	require.Zero(t, m.count("ERROR"))
}
