package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// StartGuestAgent is the command with which a guest starts QEMU's guest agent from the disk of GuestAgentDisk, which is
// mounted at /fs. The guest agent finds programs in /sbin and /bin.
const StartGuestAgent = "PATH=/sbin:/bin:$PATH /fs/ld-linux-x86-64.so.2 --library-path /fs /fs/qemu-ga -d -m virtio-serial -p $(ls /dev/vport*p1) -t /tmp -f /tmp/pid"

// GuestAgentDisk writes an ext4 file system to a file. It contains QEMU's guest agent (qemu-ga), which must be installed
// on this machine, and the libraries that it needs. If file does not exist, it gets 32 MiB.
func GuestAgentDisk(t testing.TB, file string) {
	t.Helper()
	program, err := exec.LookPath("qemu-ga")
	if err != nil {
		Skip(t, "qemu-ga is not installed: apt-get install qemu-guest-agent")
	}
	tree := t.TempDir()
	libraries, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	all := []string{program}
	for _, word := range strings.Fields(string(libraries)) {
		if filepath.IsAbs(word) {
			all = append(all, word)
		}
	}
	for _, path := range all {
		content, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(tree, filepath.Base(path)), content, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"-q", "-F", "-t", "ext4", "-d", tree, file}
	if _, err := os.Stat(file); err != nil {
		args = append(args, "32M")
	}
	if text, err := exec.Command("mke2fs", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}
