package storage

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newEncryptingHost returns a host on which the content of every encrypted volume begins with its key. Package qemu has
// the tests of real encryption.
func newEncryptingHost(t *testing.T) *host {
	h := newHost(t)
	h.stop()
	h.Close()
	for i := range h.o.Pools {
		h.o.Pools[i].Format = func(_ context.Context, _ string, _ uint64, key []byte) (*os.File, error) {
			f, err := os.CreateTemp(h.dir, "content")
			if err == nil {
				_, err = f.Write(key)
			}
			return f, err
		}
	}
	h.Storage = New(t.Context(), h.o)
	t.Cleanup(h.Close)
	return h
}

func encrypted() *agentv1.AssignedVolume {
	v := detached()
	v.Encrypted, v.EncryptionKey = true, []byte("key")
	return attach(v)
}

// TestEncryptedVolumeNeedsItsKey opens an encrypted volume with and without its key. A desired state from disk has no
// key, and neither has the disk of a VM.
func TestEncryptedVolumeNeedsItsKey(t *testing.T) {
	h := newEncryptingHost(t)
	v := encrypted()
	keyless := next(v, func(*agentv1.AssignedVolume) {})
	keyless.EncryptionKey = nil
	_, err := h.Open(t.Context(), vm, "data", keyless)
	require.ErrorIs(t, err, volume.ErrNoKey)
	h.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{vol: keyless}, true)
	_, err = h.Open(t.Context(), vm, "data", keyless)
	require.ErrorIs(t, err, volume.ErrNoKey)
	require.NoFileExists(t, filepath.Join(h.dir, "local", string(vol)+".qcow2"))
	v.Generation = keyless.Generation
	h.assign(v)
	files, err := h.Open(t.Context(), vm, "data", keyless)
	require.NoError(t, err)
	defer files.Close()
	require.Equal(t, []any{true, "key"}, []any{files.Encrypted, string(files.Key)})
	record, err := os.ReadFile(filepath.Join(h.dir, "local", string(vol)+".json"))
	require.NoError(t, err)
	require.NotContains(t, string(record), `"key"`)
}

// TestPlainFileIsNotOpenedAsEncrypted replaces an encrypted volume in the pool by one that is not encrypted. The host
// must not open it, because everybody with access to the pool could read what the guest writes. It also must not open
// an encrypted volume as one that is not encrypted.
func TestPlainFileIsNotOpenedAsEncrypted(t *testing.T) {
	h := newEncryptingHost(t)
	plain := attach(detached())
	files, err := h.Open(t.Context(), vm, "data", plain)
	require.NoError(t, err)
	files.Close()
	v := encrypted()
	v.Generation, v.AttachmentGeneration = 5, 2
	files, err = h.Open(t.Context(), vm, "data", v)
	files.Close()
	require.ErrorIs(t, err, volume.ErrRefused)
	require.ErrorContains(t, err, "is encrypted")
}
