package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// guestAgentDisk writes an ext4 file system with QEMU's guest agent and the libraries that it needs to a file.
func (l *lab) guestAgentDisk(file string) {
	l.Helper()
	program, err := exec.LookPath("qemu-ga")
	if err != nil {
		testenv.Skip(l, "qemu-ga is not installed: apt-get install qemu-guest-agent")
	}
	tree := l.TempDir()
	libraries, err := exec.Command("ldd", program).Output()
	require.NoError(l, err)
	all := []string{program}
	for _, word := range strings.Fields(string(libraries)) {
		if filepath.IsAbs(word) {
			all = append(all, word)
		}
	}
	for _, path := range all {
		content, err := os.ReadFile(path)
		require.NoError(l, err)
		require.NoError(l, os.WriteFile(filepath.Join(tree, filepath.Base(path)), content, 0o755))
	}
	text, err := exec.Command("mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, file).CombinedOutput()
	require.NoError(l, err, "%s", text)
}

// needsRecovery reports whether the journal of the ext4 file system in a copy of a volume must be replayed.
func (l *lab) needsRecovery(copied string) bool {
	l.Helper()
	flat := filepath.Join(l.TempDir(), "flat")
	text, err := exec.Command("qemu-img", "convert", "-U", "-O", "raw", copied, flat).CombinedOutput()
	require.NoError(l, err, "%s", text)
	out, err := exec.Command("dumpe2fs", "-h", flat).Output()
	require.NoError(l, err)
	require.Contains(l, string(out), "has_journal")
	return strings.Contains(string(out), "needs_recovery")
}

// TestSnapshotWithGuestAgent makes snapshots of a file system that a guest has mounted and writes to: one before and
// two after QEMU's guest agent is started in the guest. The guest agent freezes the file system, so the journal of the
// file system in the later snapshots is empty. Afterwards the guest can write again.
func TestSnapshotWithGuestAgent(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	v := blankVolume(1)
	l.assignVolumes(v)
	file := filepath.Join(l.pool, v.VolumeId+".raw")
	require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, within, 10*time.Millisecond)
	l.guestAgentDisk(file)
	v = grant(v, want, "fs")
	want = on(give(want, v, virtio, noCache))
	l.assignVolumes(v)
	l.assign(want)
	l.seesDisks(want, "fs")
	l.boots(want, 1)
	ran := 0
	run := func(command string) {
		t.Helper()
		ran++
		l.command(want.VmId, "run "+command, func() { l.says(want.VmId, "RAN rc=0", ran) })
	}
	run("mkdir /fs && mount -t ext4 /dev/vdb /fs")
	run("(while true; do date >>/fs/log; done) </dev/null >/dev/null 2>&1 &")
	for n, agent := range []bool{false, true, true} {
		if n == 1 {
			run("/fs/ld-linux-x86-64.so.2 --library-path /fs /fs/qemu-ga -d -m virtio-serial -p $(ls /dev/vport*p1) -t /tmp -f /tmp/pid")
			run("until ls -l /proc/$(cat /tmp/pid)/fd | grep -q vport; do sleep 0.1; done")
		}
		var ref volume.SnapshotRef
		v, ref = withSnapshot(v, 100+n, time.Hour)
		l.assignVolumes(v)
		s := l.seesSnapshot(ref, volume.Complete)
		copied := filepath.Join(l.pool, ref.Volume+"."+ref.ID+".snapshot.qcow2")
		require.Equal(t, []any{map[bool]string{false: "crash", true: "file-system"}[agent], !agent}, []any{s.Consistency, l.needsRecovery(copied)})
		run("sync && echo thawed >/fs/thawed")
	}
}
