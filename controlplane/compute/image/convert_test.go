package image

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestConvert imports images in the formats of other hypervisors, which qemu-img made, and requires that the stored
// image is a QCOW2 image with the same bytes, also after an import that was interrupted.
func TestConvert(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("qemu-img is not installed")
	}
	raw := filepath.Join(t.TempDir(), "raw")
	data := bytes.Repeat(append(noise(100000), make([]byte, 200000)...), 10)
	require.NoError(t, os.WriteFile(raw, data[:len(data)/512*512], 0o600))
	run := func(args ...string) {
		t.Helper()
		out, err := exec.Command("qemu-img", args...).CombinedOutput()
		require.NoError(t, err, "qemu-img %v: %s", args, out)
	}
	for _, c := range []struct {
		name     string
		declared cloud.ImageFormat
		args     []string
	}{
		{"vmdk", cloud.FormatUnspecified, []string{"-O", "vmdk"}},
		{"vmdk, as declared", cloud.FormatVMDK, []string{"-O", "vmdk", "-o", "subformat=streamOptimized"}},
		{"vhd", cloud.FormatUnspecified, []string{"-O", "vpc", "-o", "force_size=on"}},
		{"fixed vhd, as declared", cloud.FormatVHD, []string{"-O", "vpc", "-o", "subformat=fixed,force_size=on"}},
		{"vhdx, declared vhd", cloud.FormatVHD, []string{"-O", "vhdx"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 1)
			path := filepath.Join(t.TempDir(), "image")
			run(append(append([]string{"convert", "-f", "raw"}, c.args...), raw, path)...)
			source, err := os.ReadFile(path)
			require.NoError(t, err)
			s := w.member(1)
			w.run(s)
			i := described(w.write("image", source))
			i.Format = c.declared
			made, err := s.Create(member(t), i, [32]byte{})
			require.NoError(t, err)
			got := w.settled(made.Image.ID)
			require.Equal(t, cloud.ImageAvailable, got.Status, got.Metadata)
			require.Equal(t, cloud.FormatQCOW2, got.Format)
			require.Equal(t, sumOf(source), got.Metadata[cloud.SourceSHA256])
			require.GreaterOrEqual(t, got.VirtualSize, uint64(len(data)/512*512))
			require.Equal(t, []string{got.SHA256}, w.kept(1), "the source is not kept")
			stored, err := s.opts.Files.path(got.SHA256)
			require.NoError(t, err)
			content, err := os.ReadFile(stored)
			require.NoError(t, err)
			require.Equal(t, got.SHA256, sumOf(content))
			require.EqualValues(t, got.SizeBytes, len(content))
			require.Less(t, len(content), len(data), "zeros take no space")
			run("check", "-f", "qcow2", stored)
			run("compare", "-f", "raw", "-F", "qcow2", raw, stored)
		})
	}
}
