package volume

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// imgEncrypter implements Encrypter with the program qemu-img.
type imgEncrypter struct{ t *testing.T }

func (e imgEncrypter) run(ctx context.Context, key []byte, arguments func(file string) []string) (*os.File, error) {
	dir := e.t.TempDir()
	file, secret := filepath.Join(dir, "luks"), filepath.Join(dir, "key")
	require.NoError(e.t, os.WriteFile(secret, key, 0o600))
	command := arguments(file)
	all := append([]string{command[0], "--object", "secret,id=key,file=" + secret}, command[1:]...)
	text, err := exec.CommandContext(ctx, "qemu-img", all...).CombinedOutput()
	for range 20 { // QEMU's benchmark of its hash function fails at random.
		if !bytes.Contains(text, []byte("Unable to get accurate CPU usage")) {
			break
		}
		text, err = exec.CommandContext(ctx, "qemu-img", all...).CombinedOutput()
	}
	require.NoError(e.t, err, "%s", text)
	return os.Open(file)
}

func (e imgEncrypter) Header(ctx context.Context, _ string, key []byte) (*os.File, error) {
	return e.run(ctx, key, func(file string) []string {
		return []string{"create", "-f", "luks", "-o", "key-secret=key,iter-time=10", file, "0"}
	})
}

func (e imgEncrypter) Encrypt(ctx context.Context, _ string, key []byte, image *os.File, format qcow2.Format, _ uint64) (*os.File, error) {
	return e.run(ctx, key, func(file string) []string {
		return []string{"convert", "-f", string(format), "-O", "luks", "-o", "key-secret=key,iter-time=10", image.Name(), file}
	})
}

// decrypted returns the content of an encrypted volume, as qemu-img decrypts it.
func (l *rbdLab) decrypted(id string, key []byte) []byte {
	l.Helper()
	dir := l.TempDir()
	secret, out := filepath.Join(dir, "key"), filepath.Join(dir, "plain")
	require.NoError(l, os.WriteFile(secret, key, 0o600))
	image := "driver=luks,key-secret=key,file.driver=rbd,file.pool=" + rbdtest.Pool + ",file.image=" + volumeImage(id) + ",file.conf=" + l.ceph.Conf
	l.ceph.Run("qemu-img", "convert", "--object", "secret,id=key,file="+secret, "-O", "raw", "--image-opts", image, out)
	content, err := os.ReadFile(out)
	require.NoError(l, err)
	return content
}

// TestEncryptedRBDVolumes makes encrypted volumes: an empty one, one from an image, and one from a snapshot. The
// cluster must not contain the image in plain text, and each volume must have the size that the guest sees, also after
// it has grown. Deleted volumes leave nothing.
func TestEncryptedRBDVolumes(t *testing.T) {
	l := newRBDLab(t)
	ctx := t.Context()
	plain := bytes.Repeat([]byte("plain text of an image. "), 64<<10)[:mib]
	host := l.host(nil, plain)
	host.o.Encrypter = imgEncrypter{t}
	key, image := []byte("passphrase"), imageOf(plain)
	empty := Volume{ID: id(1), Size: 8 * mib, Encrypted: true, Key: key}
	of := Volume{ID: id(2), Size: 4 * mib, Encrypted: true, Key: key, Image: &image}

	keyless := empty
	keyless.Key = nil
	require.ErrorIs(t, host.Create(ctx, keyless), ErrNoKey)
	other := l.host(nil)
	require.ErrorIs(t, other.Create(ctx, empty), ErrRefused, "a host that cannot encrypt")
	for _, v := range []Volume{empty, of} {
		require.NoError(t, host.Create(ctx, v))
		require.NoError(t, host.Create(ctx, v), "the second call finds the volume")
		status, err := host.Status(ctx, v.ID)
		require.NoError(t, err)
		require.Equal(t, []any{true, v.Size, v.Image != nil}, []any{status.Encrypted, status.Size, status.Flattened})
		require.Nil(t, status.Image, "the content of the volume is its own")
		require.Len(t, l.content(v.ID), luksHeader+int(v.Size))
		v.Encrypted = false
		require.ErrorIs(t, host.Create(ctx, v), ErrRefused, "it is encrypted")
	}
	require.False(t, bytes.Contains(l.content(id(2)), plain[:512]), "the cluster has the image in plain text")
	content := l.decrypted(id(2), key)
	require.Len(t, content, 4*mib)
	require.True(t, bytes.Equal(plain, content[:mib]))
	tooSmall := of
	tooSmall.ID, tooSmall.Size = id(3), mib/2
	require.ErrorIs(t, host.Create(ctx, tooSmall), ErrRefused)
	require.NoError(t, host.Delete(ctx, id(3)))

	require.NoError(t, host.Resize(ctx, id(2), 6*mib))
	require.Len(t, l.decrypted(id(2), key), 6*mib)
	a := Attachment{VM: "vm", Generation: 1}
	files, err := host.Open(ctx, id(2), a)
	require.NoError(t, err)
	require.Equal(t, []any{true, uint64(6 * mib)}, []any{files.Encrypted, files.Size})
	require.NoError(t, host.Release(ctx, id(2), a))
	require.NoError(t, host.Detach(ctx, id(2), 1))

	ref := SnapshotRef{Volume: id(2), ID: id(20)}
	s, err := host.BeginSnapshot(ctx, ref, Attachment{Generation: 1})
	require.NoError(t, err)
	require.NoError(t, s.Take(ctx))
	require.NoError(t, s.Finish(ctx, time.Now(), "crash"))
	require.ErrorIs(t, host.ExportSnapshot(ctx, Export{Snapshot: ref, Scanned: func() error { return nil }}, &bytes.Buffer{}), ErrRefused)
	clone := Volume{ID: id(4), Size: 7 * mib, Encrypted: true, Source: &ref}
	decrypted := clone
	decrypted.Encrypted = false
	require.ErrorIs(t, other.Create(ctx, decrypted), ErrRefused, "the content is encrypted")
	require.NoError(t, other.Create(ctx, clone), "a copy of encrypted bytes needs no key")
	content = l.decrypted(id(4), key)
	require.Len(t, content, 7*mib)
	require.True(t, bytes.Equal(plain, content[:mib]))
	require.NoError(t, other.Flatten(ctx, id(4), nil))

	// An import that was interrupted leaves a record and a part of an image.
	l.ceph.Run("rbd", "create", "--size", strconv.Itoa(8), rbdtest.Pool+"/"+volumeImage(id(1))+".partial")
	require.NoError(t, host.DeleteSnapshot(ctx, ref))
	for n := range 4 {
		require.NoError(t, host.Delete(ctx, id(n+1)))
	}
	require.Empty(t, l.ceph.Run("rbd", "ls", rbdtest.Pool))
	require.NoError(t, host.SweepDeletions(ctx, 0))
	require.NotContains(t, l.ceph.Run("rados", "-p", rbdtest.Pool, "ls"), "volume-")
}
