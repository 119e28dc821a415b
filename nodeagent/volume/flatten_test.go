package volume

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// qemuIO runs commands of qemu-io on an overlay, as a QEMU of a guest would write to it. Without qemu-io it skips the
// test, or fails it in CI.
func (h *host) qemuIO(id string, commands ...string) {
	h.Helper()
	if _, err := exec.LookPath("qemu-io"); err != nil && os.Getenv("CI") != "true" {
		h.Skip("qemu-io is not installed")
	}
	base := filepath.Join(filepath.Dir(h.o.State), "images", h.image.SHA256)
	args := []string{"--image-opts", fmt.Sprintf("driver=qcow2,discard=unmap,file.driver=file,file.filename=%s/%s.qcow2,"+
		"backing.driver=%s,backing.file.driver=file,backing.file.filename=%s", h.dir, id, h.image.Format, base)}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out, err := exec.Command("qemu-io", args...).CombinedOutput()
	require.NoError(h, err, "%s", out)
	require.NotContains(h, string(out), "failed")
}

// guestView returns the bytes that a guest reads from a volume of 4 MiB that was made from the image imageContent, of 1
// MiB, after the commands in changes.
func guestView() []byte {
	b := make([]byte, 4*mib)
	copy(b, imageContent)
	copy(b[200<<10:300<<10], bytes.Repeat([]byte{0xa1}, 100<<10))
	copy(b[900<<10:1200<<10], bytes.Repeat([]byte{0xa2}, 300<<10))
	clear(b[64<<10 : 192<<10])
	copy(b[4*mib-512:], bytes.Repeat([]byte{0xa3}, 512))
	return b
}

var changes = []string{
	"write -P 0xa1 200k 100k", "write -P 0xa2 900k 300k", "write -z 64k 128k", fmt.Sprintf("write -P 0xa3 %d 512", 4*mib-512),
	"write -P 0xa4 2M 64k", "discard 2M 64k", "write -z 2M 64k", // back to zeros
}

// view reads a volume as a guest sees it.
func (h *host) view(id string, a Attachment) []byte {
	h.Helper()
	files, err := h.Open(h.Context(), id, a)
	require.NoError(h, err)
	defer files.Close()
	require.Equal(h, qcow2.Raw, files.Format)
	require.Nil(h, files.Base)
	b, err := io.ReadAll(files.Content)
	require.NoError(h, err)
	return b
}

// setImage replaces the host's image by a QCOW2 file with the same content, compressed.
func (h *host) setImage() {
	raw, packed := filepath.Join(h.TempDir(), "raw"), filepath.Join(h.TempDir(), "packed")
	require.NoError(h, os.WriteFile(raw, imageContent, 0o600))
	out, err := exec.Command("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, packed).CombinedOutput()
	require.NoError(h, err, "%s", out)
	data, err := os.ReadFile(packed)
	require.NoError(h, err)
	sum := sha256.Sum256(data)
	h.image = disk.Image{SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data)), Format: qcow2.QCOW2}
	h.content = data
}

func none(uint32) {}

// TestFlatten flattens volumes that a guest has written to. A volume must have the same content as before, without the
// image, and a second call must do nothing. The volume must be opened only for later attachments, as before.
func TestFlatten(t *testing.T) {
	for name, packed := range map[string]bool{"raw image": false, "compressed QCOW2 image": true} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, t.TempDir(), false)
			if packed {
				h.setImage()
			}
			h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
			files, err := h.Open(t.Context(), id(1), Attachment{"vm", 1})
			require.NoError(t, err)
			require.ErrorIs(t, h.Flatten(t.Context(), id(1), none), ErrInUse)
			files.Close()
			require.ErrorIs(t, h.Flatten(t.Context(), id(1), none), ErrInUse, "the last attachment is not released")
			h.qemuIO(id(1), changes...)
			require.NoError(t, h.Release(t.Context(), id(1), Attachment{"vm", 1}))
			require.NoError(t, h.Resize(t.Context(), id(1), 6*mib), "QEMU has not grown the file yet")

			var last uint32
			require.NoError(t, h.Flatten(t.Context(), id(1), func(percent uint32) {
				require.Greater(t, percent, last)
				last = percent
			}))
			require.LessOrEqual(t, last, uint32(100))
			require.Equal(t, []string{id(1) + ".json", id(1) + ".raw"}, h.names())
			status, err := h.Status(id(1))
			require.NoError(t, err)
			require.Empty(t, status.Error)
			require.Nil(t, status.Image)
			require.Equal(t, []any{true, qcow2.Raw, uint64(6 * mib), uint64(1)}, []any{status.Flattened, status.Format, status.Size, status.Flushed})
			require.Less(t, status.Allocated, uint64(3*mib), "zeros take no space")

			require.NoError(t, h.Flatten(t.Context(), id(1), none))
			h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image}) // an outdated assignment
			got := h.view(id(1), Attachment{"vm", 2})
			require.True(t, bytes.Equal(append(guestView(), make([]byte, 2*mib)...), got), "the content of the flattened volume differs")
			_, err = h.Open(t.Context(), id(1), Attachment{"vm", 1})
			require.ErrorIs(t, err, ErrStale)
			require.NoError(t, h.Resize(t.Context(), id(1), 8*mib))
			require.NoError(t, h.Delete(t.Context(), id(1)))
			require.Empty(t, h.names())
		})
	}
}

// TestFlattenRefuses flattens volumes that cannot be flattened, or need not be.
func TestFlattenRefuses(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	require.ErrorIs(t, h.Flatten(t.Context(), id(1), none), ErrNotFound)
	require.ErrorIs(t, h.Flatten(t.Context(), "../x", none), ErrRefused)
	h.make(Volume{ID: id(1), Size: mib})
	require.NoError(t, h.Flatten(t.Context(), id(1), none), "a blank volume has no image")
	require.Equal(t, []string{id(1) + ".json", id(1) + ".raw"}, h.names())

	// A guest that has taken over its QEMU may have written anything to the overlay.
	h.make(Volume{ID: id(2), Size: mib, Image: &h.image})
	f, err := os.OpenFile(filepath.Join(h.dir, id(2)+".qcow2"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt(bytes.Repeat([]byte{0xff}, 64), 3<<16) // the L1 table
	require.NoError(t, err)
	require.ErrorIs(t, h.Flatten(t.Context(), id(2), none), ErrRefused)
	require.NotContains(t, h.names(), id(2)+".raw")
	_, err = f.WriteAt([]byte{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 11}, 8) // a backing file
	require.NoError(t, err)
	require.ErrorContains(t, h.Flatten(t.Context(), id(2), none), "backing file")
	files, err := h.Open(t.Context(), id(2), Attachment{"vm", 1})
	require.NoError(t, err, "the volume stays as it was")
	files.Close()
}

// TestFlattenEnds cancels the flattening of a volume, as a VM does that opens the volume. The volume must stay an
// overlay, which the VM can open at once.
func TestFlattenEnds(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := h.Flatten(ctx, id(1), func(uint32) {
		if calls++; calls == 2 {
			cancel()
		}
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{id(1) + ".json", id(1) + ".qcow2"}, h.names())
	files, err := h.Open(t.Context(), id(1), Attachment{"vm", 1})
	require.NoError(t, err)
	require.NotNil(t, files.Base)
	files.Close()
}

// TestInterruptedFlatten puts the files of a pool into the states that a crash at each step of Flatten leaves.
func TestInterruptedFlatten(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
	h.qemuIO(id(1), changes...)
	overlay, err := os.ReadFile(filepath.Join(h.dir, id(1)+".qcow2"))
	require.NoError(t, err)
	raw := filepath.Join(h.dir, id(1)+".raw")

	require.NoError(t, os.WriteFile(raw, []byte("a part of the copy, and longer than the rest"), 0o600))
	require.NoError(t, h.again())
	require.Empty(t, h.list().Unknown)
	files, err := h.Open(t.Context(), id(1), Attachment{"vm", 1})
	require.NoError(t, err)
	require.Equal(t, qcow2.QCOW2, files.Format, "the overlay is valid until the record names the copy")
	files.Close()
	require.NoError(t, h.Release(t.Context(), id(1), Attachment{"vm", 1}))
	require.NoError(t, h.Flatten(t.Context(), id(1), none))
	require.True(t, bytes.Equal(guestView(), h.view(id(1), Attachment{"vm", 2})))

	// The record names the copy, and the overlay is not removed yet.
	require.NoError(t, os.WriteFile(filepath.Join(h.dir, id(1)+".qcow2"), overlay, 0o600))
	require.NoError(t, h.again())
	require.NoError(t, h.Flatten(t.Context(), id(1), none))
	require.Equal(t, []string{id(1) + ".json", id(1) + ".raw"}, h.names())
	require.True(t, bytes.Equal(guestView(), h.view(id(1), Attachment{"vm", 3})))

	// A deletion removes both files.
	require.NoError(t, os.WriteFile(filepath.Join(h.dir, id(1)+".qcow2"), overlay, 0o600))
	require.NoError(t, h.Delete(t.Context(), id(1)))
	require.Empty(t, h.names())
}

// TestRecordFlattened records that QEMU has copied the image, and checks that only the newest attachment may do so.
func TestRecordFlattened(t *testing.T) {
	h := newHost(t, t.TempDir(), false)
	h.make(Volume{ID: id(1), Size: 4 * mib, Image: &h.image})
	files, err := h.Open(t.Context(), id(1), Attachment{"vm", 2})
	require.NoError(t, err)
	defer files.Close()
	require.NotNil(t, h.list().Volumes[0].Image)
	h.qemuIO(id(1), "write -P 0xa1 0 512k", "write -z 512k 448k") // all but the last cluster of the image
	require.ErrorIs(t, h.RecordFlattened(t.Context(), id(1), Attachment{"vm", 2}), errIncomplete)
	require.NotNil(t, h.list().Volumes[0].Image)
	h.qemuIO(id(1), "write -P 0xa1 960k 64k")
	require.NoError(t, os.WriteFile(filepath.Join(h.dir, id(1)+".raw"), nil, 0o600)) // of an interrupted Flatten
	require.ErrorIs(t, h.RecordFlattened(t.Context(), id(1), Attachment{"vm", 1}), ErrStale)
	require.ErrorIs(t, h.RecordFlattened(t.Context(), id(1), Attachment{"other", 2}), ErrStale)
	for range 2 {
		require.NoError(t, h.RecordFlattened(t.Context(), id(1), Attachment{"vm", 2}))
	}
	status := h.list().Volumes[0]
	require.Nil(t, status.Image)
	require.Equal(t, []any{true, qcow2.QCOW2}, []any{status.Flattened, status.Format})
	require.Equal(t, []string{id(1) + ".json", id(1) + ".qcow2"}, h.names())
}
