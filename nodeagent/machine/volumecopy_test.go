package machine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// countScript makes the guest increment a number again and again, and write each value first to vdb and then to vdc,
// with a flush after each write.
const countScript = `run (i=100000; while true; do i=$((i+1)); for d in vdb vdc; do echo $i | ` +
	`dd of=/dev/$d bs=512 conv=sync,fsync,notrunc; done; done) </dev/null >/dev/null 2>&1 &`

// agentScript makes the guest answer at its virtio-serial port like QEMU's agent, and write the commands to /agent.log.
// Like QEMU's agent, it keeps the port open while no client is connected on the host. It has opened the port when the
// command returns.
const agentScript = `run exec 3<>$(ls /dev/vport*p1); (while true; do while read -r l <&3; do case "$l" in ` +
	`*sync-delimited*) id=${l##*\"id\":}; printf '\377{"return": %s}\n' ${id%%\}*} >&3;; ` +
	`*fsfreeze*) echo "$l" >>/agent.log; echo '{"return": 1}' >&3;; esac; done; sleep 0.1; done) ` +
	`</dev/null >/dev/null 2>&1 &`

// counterOf returns the number that countScript has written to a disk, from the file of the disk's volume or of a copy.
func counterOf(t *testing.T, file string) int {
	t.Helper()
	out := filepath.Join(t.TempDir(), "flat")
	text, err := exec.Command("qemu-img", "convert", "-U", "-O", "raw", file, out).CombinedOutput()
	require.NoError(t, err, "%s", text)
	data, err := os.ReadFile(out)
	require.NoError(t, err)
	line, _, _ := bytes.Cut(data[:512], []byte("\n"))
	n, err := strconv.Atoi(string(line))
	require.NoError(t, err, "%q", line)
	return n
}

// TestSnapshotWhileGuestWrites makes snapshots of two volumes of a guest that writes a counter to them in turn. The
// copies have counters that differ by at most one, and the guest continues. Then a script in the guest answers as
// QEMU's guest agent, and must be asked to freeze and to thaw the file systems. A volume that is made from a snapshot
// must have the content of the snapshot.
func TestSnapshotWhileGuestWrites(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	a, b := grant(blankVolume(1), want, "a"), grant(blankVolume(2), want, "b")
	b.MaxIops = 2000
	want = on(give(give(want, a, virtio, noCache), b, virtio, writeback))
	l.assignVolumes(a, b)
	l.assign(want)
	l.seesDisks(want, "a", "b")
	l.boots(want, 1)
	l.command(want.VmId, countScript, func() { l.says(want.VmId, "RAN rc=0", 1) })
	file := func(v *agentv1.AssignedVolume) string { return filepath.Join(l.pool, v.GetVolumeId()+".raw") }
	waitCounter := func(above int) int {
		n := 0
		require.Eventually(t, func() bool {
			head, err := os.ReadFile(file(b))
			line, _, _ := bytes.Cut(head, []byte("\n"))
			n, _ = strconv.Atoi(string(line))
			return err == nil && n > above
		}, within, 50*time.Millisecond, "the guest counts beyond %d", above)
		return n
	}
	waitCounter(100005)
	for round := range 3 {
		a, b = l.snapshotGroup(a, b, 10+round)
		refs := []volume.SnapshotRef{{Volume: a.VolumeId, ID: volumeID(100 + round)}, {Volume: b.VolumeId, ID: volumeID(200 + round)}}
		var counters []int
		for _, ref := range refs {
			s := l.seesSnapshot(ref, volume.Complete)
			require.Equal(t, "crash", s.Consistency)
			counters = append(counters, counterOf(t, filepath.Join(l.pool, ref.Volume+"."+ref.ID+".snapshot.qcow2")))
		}
		require.LessOrEqual(t, counters[0]-counters[1], 1, "%v", counters)
		require.GreaterOrEqual(t, counters[0]-counters[1], 0, "%v", counters)
		waitCounter(counters[1] + 3)
	}
	l.command(want.VmId, agentScript, func() { l.says(want.VmId, "RAN rc=0", 2) })
	a, b = l.snapshotGroup(a, b, 20)
	require.Equal(t, "file-system", l.seesSnapshot(volume.SnapshotRef{Volume: b.VolumeId, ID: volumeID(210)}, volume.Complete).Consistency)
	l.command(want.VmId, "run cat /agent.log", func() {
		l.says(want.VmId, `OUT {"execute":"guest-fsfreeze-freeze"}`, 1)
		l.says(want.VmId, `OUT {"execute":"guest-fsfreeze-thaw"}`, 1)
	})
	restored := &agentv1.AssignedVolume{
		VolumeId: volumeID(3), Generation: 1, Pool: "local", SizeBytes: 96 * mib, Format: 2,
		Source: &agentv1.SnapshotSource{VolumeId: a.VolumeId, SnapshotId: volumeID(100)},
	}
	l.assignVolumes(a, b, restored)
	require.Eventually(t, func() bool {
		_, err := l.storage.Pools()[0].Status(volumeID(3))
		return err == nil
	}, within, 10*time.Millisecond)
	require.Equal(t, counterOf(t, filepath.Join(l.pool, a.VolumeId+"."+volumeID(100)+".snapshot.qcow2")),
		counterOf(t, filepath.Join(l.pool, volumeID(3)+".qcow2")))
}

// TestSnapshotEndsWithQEMU kills QEMU while it copies a volume. The snapshot fails, its file is removed, and the volume
// can be opened by the next QEMU.
func TestSnapshotEndsWithQEMU(t *testing.T) {
	l := newLab(t)
	want := l.blank(1)
	v := blankVolume(1)
	v.SizeBytes = 1 << 30
	v = grant(v, want, "a")
	l.assignVolumes(v)
	file := filepath.Join(l.pool, v.VolumeId+".raw")
	require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, within, 10*time.Millisecond)
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	chunk := bytes.Repeat([]byte("x"), 8*mib)
	for at := int64(0); at < 512*mib; at += int64(len(chunk)) {
		_, err := f.WriteAt(chunk, at)
		require.NoError(t, err)
	}
	want = on(give(want, v, virtio, noCache))
	l.assign(want)
	l.seesDisks(want, "a")
	ref := volume.SnapshotRef{Volume: v.VolumeId, ID: volumeID(101)}
	v = proto.CloneOf(v)
	v.Generation++
	v.Snapshots = []*agentv1.AssignedSnapshot{{SnapshotId: ref.ID, Deadline: time.Now().Add(time.Hour).UnixMilli()}}
	l.assignVolumes(v)
	copied := filepath.Join(l.pool, ref.Volume+"."+ref.ID+".snapshot.qcow2")
	require.Eventually(t, func() bool {
		st, err := os.Stat(copied)
		return err == nil && st.Size() > 16*mib
	}, within, time.Millisecond, "the copy is in progress")
	procs, err := l.tree.Procs(want.VmId)
	require.NoError(t, err)
	require.NoError(t, unix.Kill(procs[0], unix.SIGKILL))
	require.NotEmpty(t, l.seesSnapshot(ref, volume.Failed).Error)
	require.NoFileExists(t, copied)
	l.sees(want, cloud.ObservedEnded)
	want = on(want)
	l.assign(want)
	l.seesDisks(want, "a")
}

// assignVolumes sets the desired states of all volumes.
func (l *lab) assignVolumes(all ...*agentv1.AssignedVolume) {
	volumes := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	for _, v := range all {
		volumes[cloud.VolumeID(v.GetVolumeId())] = v
	}
	l.storage.Assign(volumes, false)
}

// snapshotGroup adds a snapshot of one instant to the desired states of two volumes. The snapshots have the ids
// volumeID(90 + n) and volumeID(190 + n).
func (l *lab) snapshotGroup(a, b *agentv1.AssignedVolume, n int) (nextA, nextB *agentv1.AssignedVolume) {
	add := func(v *agentv1.AssignedVolume, id int) *agentv1.AssignedVolume {
		v = proto.CloneOf(v)
		v.Generation++
		v.Snapshots = append(v.Snapshots, &agentv1.AssignedSnapshot{
			SnapshotId: volumeID(id), Deadline: time.Now().Add(time.Hour).UnixMilli(), GroupId: fmt.Sprint("group", n),
			GroupVolumes: []string{a.GetVolumeId(), b.GetVolumeId()},
		})
		return v
	}
	a, b = add(a, 90+n), add(b, 190+n)
	l.assignVolumes(a, b)
	return a, b
}

// withSnapshot returns the desired state of a volume with another snapshot, and the snapshot. The host must begin the
// snapshot within this time.
func withSnapshot(v *agentv1.AssignedVolume, n int, within time.Duration) (*agentv1.AssignedVolume, volume.SnapshotRef) {
	v = proto.CloneOf(v)
	v.Generation++
	v.Snapshots = append(v.Snapshots, &agentv1.AssignedSnapshot{
		SnapshotId: volumeID(n), Deadline: time.Now().Add(within).UnixMilli(),
	})
	return v, volume.SnapshotRef{Volume: v.VolumeId, ID: volumeID(n)}
}

// seesSnapshot waits until a snapshot has this state on the host, and returns it.
func (l *lab) seesSnapshot(ref volume.SnapshotRef, state volume.SnapshotState) (s volume.Snapshot) {
	l.Helper()
	require.Eventually(l, func() bool {
		var err error
		s, err = l.storage.Pools()[0].Snapshot(ref)
		if !errors.Is(err, volume.ErrNoSnapshot) {
			require.NoError(l, err)
		}
		return s.State == state
	}, within, 10*time.Millisecond, "snapshot %s is %s, last %+v", ref.ID, state, &s)
	return s
}

// TestSnapshotOfEncryptedVolume makes a snapshot of an encrypted volume while a guest runs with it, and one after the
// volume was detached. Volumes that are made from the snapshots have what the guest wrote. No file of the pool has it
// in plain text. While the guest runs, a snapshot without the key fails at its deadline.
func TestSnapshotOfEncryptedVolume(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	v := grant(encryptedVolume(1), want, "secret")
	want = on(give(want, v, virtio, noCache))
	l.assignVolumes(v)
	l.assign(want)
	l.seesDisks(want, "secret")
	l.boots(want, 1)
	l.write(want.VmId, "vdb", "hidden", 0)
	snapshot := func(n int, within time.Duration) (ref volume.SnapshotRef) {
		v, ref = withSnapshot(v, n, within)
		return ref
	}
	keyless := snapshot(99, 2*time.Second)
	l.assignVolumes(withKey(v, ""))
	require.Contains(t, l.seesSnapshot(keyless, volume.Failed).Error, "has not sent its key")
	live := snapshot(100, time.Hour)
	l.assignVolumes(v)
	require.True(t, l.seesSnapshot(live, volume.Complete).Encrypted)

	l.write(want.VmId, "vdb", "later", 0)
	want = take(want, "secret")
	l.assign(want)
	l.seesDisks(want)
	v = revoke(v)
	idle := snapshot(101, time.Hour)
	v.EncryptionKey = nil
	l.assignVolumes(v)
	require.True(t, l.seesSnapshot(idle, volume.Complete).Encrypted)

	all := []*agentv1.AssignedVolume{v}
	for n, ref := range map[int]volume.SnapshotRef{2: live, 3: idle} {
		r := withKey(encryptedVolume(n), "")
		r.SizeBytes, r.Source = v.SizeBytes, &agentv1.SnapshotSource{VolumeId: ref.Volume, SnapshotId: ref.ID}
		all = append(all, r)
	}
	l.assignVolumes(all...)
	for i, r := range all[1:] {
		require.Eventually(t, func() bool {
			_, err := l.storage.Pools()[0].Status(r.VolumeId)
			return err == nil
		}, within, 10*time.Millisecond)
		r = grant(withKey(r, volumeKey), want, "copy")
		all[i+1] = r
		l.assignVolumes(all...)
		want = give(want, r, virtio, noCache)
		l.assign(want)
		l.seesDisks(want, "copy")
		pattern := map[string]string{volumeID(2): "hidden", volumeID(3): "later"}[r.VolumeId]
		l.reads(want.VmId, "vdb", pattern, 0)
		want = take(want, "copy")
		l.assign(want)
		l.seesDisks(want)
	}
	for _, seed := range []string{"hidden", "later"} {
		files, err := filepath.Glob(filepath.Join(l.pool, "*.qcow2"))
		require.NoError(t, err)
		require.Len(t, files, 5)
		head := make([]byte, 512)
		guest.Pattern(head, seed, 0)
		for _, file := range files {
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			require.False(t, bytes.Contains(content, head), "%s has the guest's data in plain text", file)
		}
	}
	l.requireNoKey()
}
