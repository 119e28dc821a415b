package uplink

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestVolumeKeysAreNotStored stores an assignment with an encrypted volume, and requires that no file contains the
// volume's key, that the assignment in memory keeps the key, and that everything else is stored.
func TestVolumeKeysAreNotStored(t *testing.T) {
	dir := t.TempDir()
	k, _, err := openAssignmentStore(dir, nil)
	require.NoError(t, err)
	k.raiseTerm(1)
	const key = "the key of the volume"
	v := &agentv1.AssignedVolume{VolumeId: "v", Generation: 3, Encrypted: true, EncryptionKey: []byte(key)}
	vm := &agentv1.AssignedVm{VmId: "a", Disks: []*agentv1.AssignedDisk{{Id: "root"}, {Id: "data", Volume: proto.CloneOf(v)}}}
	k.put(&Assignment{
		Term: 1, VMs: map[cloud.VMID]*agentv1.AssignedVm{"a": vm}, Volumes: map[cloud.VolumeID]*agentv1.AssignedVolume{"v": v},
	})
	require.NoError(t, k.write())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		content, err := os.ReadFile(filepath.Join(dir, f.Name()))
		require.NoError(t, err)
		require.NotContains(t, string(content), key, f.Name())
	}
	require.Equal(t, key, string(v.EncryptionKey))
	require.Equal(t, key, string(vm.Disks[1].Volume.EncryptionKey))
	_, stored, err := openAssignmentStore(dir, nil)
	require.NoError(t, err)
	require.True(t, stored.Volumes["v"].Encrypted)
	require.EqualValues(t, 3, stored.VMs["a"].Disks[1].Volume.Generation)
}
