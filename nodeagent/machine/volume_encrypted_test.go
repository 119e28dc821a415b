package machine

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const volumeKey = "9b0ce31c6dd5d1a5a9b0a3a5f4c2e1d09b0ce31c6dd5d1a5a9b0a3a5f4c2e1d0"

func encryptedVolume(n int) *agentv1.AssignedVolume {
	v := blankVolume(n)
	v.Encrypted, v.EncryptionKey, v.Format = true, []byte(volumeKey), vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2
	return v
}

// withKey returns a copy of the volume v with another key; "" means without a key.
func withKey(v *agentv1.AssignedVolume, key string) *agentv1.AssignedVolume {
	v = proto.CloneOf(v)
	v.EncryptionKey = []byte(key)
	return v
}

// replace returns a copy of the assignment want in which v is the desired state of the volume of its disk.
func replace(want *agentv1.AssignedVm, v *agentv1.AssignedVolume) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Disks = slices.Clone(w.Disks)
		for i, d := range w.Disks {
			if d.GetId() == v.GetDiskId() {
				w.Disks[i] = proto.CloneOf(d)
				w.Disks[i].Volume = v
			}
		}
	})
}

// poolHas reports whether the file of a volume contains the beginning of a pattern that a guest wrote. A QCOW2 file may
// have the clusters of the guest in any order, so only the first part is searched for.
func (l *lab) poolHas(n int, seed string, offset int) bool {
	l.Helper()
	pattern := make([]byte, 512)
	guest.Pattern(pattern, seed, int64(offset))
	files, err := filepath.Glob(filepath.Join(l.pool, volumeID(n)+".*"))
	require.NoError(l, err)
	require.Len(l, files, 2)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(l, err)
		if bytes.Contains(content, pattern) {
			return true
		}
	}
	return false
}

// TestEncryptedVolume lets a guest write to an encrypted volume and to a plain one, and searches the files of the pool
// for what the guest wrote. An encrypted volume is grown, detached and attached again to the running guest. After a
// restart of the agent without the key, the guest must keep running. The agent must start the VM again only when it has
// the key, and must not store the key anywhere.
func TestEncryptedVolume(t *testing.T) {
	l := newLab(t)
	want := l.linux(1)
	plain, secret := grant(blankVolume(1), want, "plain"), grant(encryptedVolume(2), want, "secret")
	plain.Format = vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2
	want = on(give(give(want, plain, virtio, noCache), secret, virtio, noCache))
	l.assign(want)
	l.seesDisks(want, "plain", "secret")
	l.boots(want, 1)
	l.write(want.VmId, "vdb", "visible", 0)
	l.write(want.VmId, "vdc", "hidden", 0)
	require.True(t, l.poolHas(1, "visible", 0), "the test must be able to find a pattern")
	require.False(t, l.poolHas(2, "hidden", 0), "the encrypted volume has the guest's data in plain text")

	secret = proto.CloneOf(secret)
	secret.Generation, secret.SizeBytes = secret.Generation+1, 96*mib
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(secret.VolumeId): secret}, false)
	want = replace(want, secret)
	l.assign(want)
	l.seesSize(want, "vdc", 96*mib)
	want = take(want, "secret")
	l.assign(want)
	l.seesDisks(want, "plain")
	secret = grant(revoke(secret), want, "secret")
	wrong := withKey(secret, strings.Repeat("0", len(volumeKey)))
	refused := give(want, wrong, virtio, noCache)
	l.assign(refused)
	l.until(cloud.VMID(want.VmId), "refused", func(o cloud.Observation) bool {
		return len(o.Disks) == 2 && strings.Contains(o.Disks[1].Error, "the key does not decrypt the disk's file")
	})
	want = replace(refused, secret)
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(secret.VolumeId): secret}, false)
	l.assign(want)
	l.seesDisks(want, "plain", "secret")
	l.seesSize(want, "vdc", 96*mib)
	l.reads(want.VmId, "vdc", "hidden", 0)
	l.requireNoKey()

	l.stop()
	l.start()
	keyless := withKey(secret, "")
	want = replace(want, keyless)
	l.assign(want)
	l.seesDisks(want, "plain", "secret")
	l.write(want.VmId, "vdc", "away", 80*mib) // QEMU does not need the key any more
	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	want = on(want)
	l.assign(want)
	l.until(cloud.VMID(want.VmId), "waiting for the key", func(o cloud.Observation) bool {
		return strings.Contains(o.LastError, volume.ErrNoKey.Error())
	})
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(secret.VolumeId): secret}, false)
	l.assign(replace(want, keyless)) // the key is in the list of volumes only
	l.boots(want, 2)
	l.reads(want.VmId, "vdc", "away", 80*mib)
	require.False(t, l.poolHas(2, "away", 80*mib))
	l.requireNoKey()
}

// requireNoKey requires that no file of the agent and of the pool contains the key of the volume, nor the arguments and
// the environment of any process of the host.
func (l *lab) requireNoKey() {
	l.Helper()
	var files []string
	require.NoError(l, filepath.WalkDir(l.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	require.NotEmpty(l, files)
	for _, name := range []string{"cmdline", "environ"} {
		all, err := filepath.Glob(fmt.Sprintf("/proc/[0-9]*/%s", name))
		require.NoError(l, err)
		files = append(files, all...)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil { // the process has ended
			continue
		}
		require.False(l, bytes.Contains(content, []byte(volumeKey)), "%s contains the key", file)
	}
}

// TestEncryptedOverlay boots a guest from an encrypted overlay of an image.
func TestEncryptedOverlay(t *testing.T) {
	l := newLab(t)
	want := l.vm(1)
	v := encryptedVolume(1)
	v.SizeBytes, v.Image = 1<<30, want.Disks[0].Image
	want.Disks = nil
	v = grant(v, want, "root")
	want = on(give(want, v, virtio, writeback))
	l.assign(want)
	l.seesDisks(want, "root")
	l.says(want.VmId, "GUEST UP\n", 1)
	require.True(t, l.status(1).Encrypted)
	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	require.Equal(t, uint64(1), l.status(1).Flushed)
}
