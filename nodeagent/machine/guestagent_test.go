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
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

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
// file system in the later snapshots is empty. Afterwards the guest can write again. In the same guest, the test then
// makes all calls of the guest agent.
func TestSnapshotWithGuestAgent(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	v := blankVolume(1)
	l.assignVolumes(v)
	file := filepath.Join(l.pool, v.VolumeId+".raw")
	require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, within, 10*time.Millisecond)
	testenv.GuestAgentDisk(l, file)
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
			run(testenv.StartGuestAgent)
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
	l.checkGuestCalls(want)
	l.checkGuestReports(want, run)
	l.checkGuestShutdown(want)
}

// inGuest runs a shell script in the guest by its guest agent.
func (l *lab) inGuest(want *agentv1.AssignedVm, script, stdin string) *agentv1.GuestResult {
	l.Helper()
	out, err := l.CallGuest(l.Context(), &agentv1.GuestRequest{VmId: want.VmId, Call: &agentv1.GuestRequest_Command{
		Command: &agentv1.GuestCommand{Command: []string{"/bin/sh", "-c", script}, Stdin: []byte(stdin), TimeoutSeconds: 60},
	}})
	require.NoError(l, err)
	return out
}

// checkGuestCalls runs programs in the guest, and sets a password and SSH keys.
func (l *lab) checkGuestCalls(want *agentv1.AssignedVm) {
	l.Helper()
	out := l.inGuest(want, "cat; echo err >&2; exit 3", "in")
	require.EqualValues(l, 3, out.GetExitCode())
	require.Equal(l, []string{"in", "err\n"}, []string{string(out.GetStdout()), string(out.GetStderr())})
	require.EqualValues(l, 9, l.inGuest(want, "kill -9 $$", "").GetSignal())
	out = l.inGuest(want, "head -c 2000000 /dev/zero", "")
	require.Equal(l, []any{768 << 10, true, false}, []any{len(out.GetStdout()), out.GetStdoutTruncated(), out.GetStderrTruncated()})

	call := func(r *agentv1.GuestRequest) error {
		r.VmId = want.VmId
		_, err := l.CallGuest(l.Context(), r)
		return err
	}
	err := call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_Command{Command: &agentv1.GuestCommand{Command: []string{"/none"}, TimeoutSeconds: 60}}})
	require.ErrorContains(l, err, "the guest agent refused the request")
	slow, err := l.CallGuest(l.Context(), &agentv1.GuestRequest{VmId: want.VmId, Call: &agentv1.GuestRequest_Command{
		Command: &agentv1.GuestCommand{Command: []string{"/bin/sh", "-c", "sleep 100"}, TimeoutSeconds: 1},
	}})
	require.NoError(l, err)
	require.True(l, slow.GetTimedOut())

	// The guest of the tests has no users and no chpasswd, so the test makes what the guest agent needs.
	out = l.inGuest(want, "mkdir -p /etc /root && echo root:x:0:0::/root:/bin/sh >/etc/passwd && printf '#!/bin/sh\\ncat >/root/new\\n' >/sbin/chpasswd && chmod +x /sbin/chpasswd", "")
	require.Zero(l, out.GetExitCode(), "%s", out.GetStderr())
	require.NoError(l, call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_Password{Password: &agentv1.GuestPassword{Username: "root", Password: "a b:c"}}}))
	require.Equal(l, "root:a b:c\n", string(l.inGuest(want, "cat /root/new", "").GetStdout()))
	keys := func(replace bool, keys ...string) error {
		return call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_SshKeys{SshKeys: &agentv1.GuestSshKeys{Username: "root", Keys: keys, Replace: replace}}})
	}
	const first, second = "ssh-ed25519 AAAA first", "ssh-ed25519 BBBB second"
	for _, c := range []struct {
		replace bool
		add     []string
		want    string
	}{
		{false, []string{first}, first}, {false, []string{first, second}, first + "\n" + second}, {true, []string{second}, second},
	} {
		require.NoError(l, keys(c.replace, c.add...))
		got := l.inGuest(want, "cat /root/.ssh/authorized_keys", "").GetStdout()
		require.Equal(l, c.want, strings.TrimSpace(string(got)))
	}
	err = call(&agentv1.GuestRequest{Call: &agentv1.GuestRequest_SshKeys{SshKeys: &agentv1.GuestSshKeys{Username: "nobody", Keys: []string{first}}}})
	require.ErrorContains(l, err, "the guest agent refused the request")
}

// checkGuestReports checks that the measurements have the addresses and the memory of the guest.
func (l *lab) checkGuestReports(want *agentv1.AssignedVm, run func(command string)) {
	l.Helper()
	run("ip addr add 10.9.8.7/32 dev lo && ip link set lo up")
	l.ReadGuestAddresses(l.Context())
	id := cloud.VMID(want.VmId)
	require.Equal(l, []string{"10.9.8.7"}, l.Measure(l.Context())[id].GuestAddresses)
	require.Eventually(l, func() bool {
		l.Measure(l.Context())
		for _, r := range l.LastReports() {
			if r.ID == id && r.Guest != nil {
				return r.Guest.Total > 16<<20 && r.Guest.Total <= want.MemoryMib<<20 && r.Guest.Available < r.Guest.Total
			}
		}
		return false
	}, within, 100*time.Millisecond, "the balloon driver reports the guest's memory")
}

// checkGuestShutdown stops a guest that ignores the power button. The guest agent shuts it down.
func (l *lab) checkGuestShutdown(want *agentv1.AssignedVm) {
	l.Helper()
	out := l.inGuest(want, "printf '#!/bin/sh\\necho \"AGENT SHUTDOWN $*\" >/dev/console\\npoweroff -f\\n' >/sbin/shutdown && chmod +x /sbin/shutdown", "")
	require.Zero(l, out.GetExitCode(), "%s", out.GetStderr())
	l.command(want.VmId, "deaf", func() { l.says(want.VmId, "DEAF", 1) })
	stopped := off(want, 5*time.Minute)
	l.assign(stopped)
	l.sees(stopped, cloud.ObservedBuilt)
	l.says(want.VmId, "AGENT SHUTDOWN", 1)
}
