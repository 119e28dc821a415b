package qcow2

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// qemuImg runs qemu-img with args and returns its output. Without qemu-img it skips the test, or fails it in CI.
func qemuImg(t *testing.T, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(testenv.Program(t, "qemu-img"), args...)
	out, err := cmd.Output()
	require.NoError(t, err, "qemu-img %v", args)
	return out
}

func inspectFile(t *testing.T, path string) (Info, error) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(t, err)
	return Inspect(f, st.Size())
}

func TestQEMUAcceptsCreatedImages(t *testing.T) {
	for _, size := range []uint64{512, 1 << 20, 10<<30 + 512, 512 << 20, 1 << 40, MaxVirtualSize} {
		path := filepath.Join(t.TempDir(), "disk.qcow2")
		f, err := os.Create(path)
		require.NoError(t, err)
		length, err := Create(f, size)
		require.NoError(t, err)
		st, err := f.Stat()
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.Equal(t, length, st.Size())

		qemuImg(t, "check", "-q", path)
		var got struct {
			VirtualSize uint64 `json:"virtual-size"`
			Backing     string `json:"backing-filename"`
			Specific    struct {
				Data struct {
					Compat        string
					LazyRefcounts bool `json:"lazy-refcounts"`
				}
			} `json:"format-specific"`
		}
		require.NoError(t, json.Unmarshal(qemuImg(t, "info", "--output=json", "-f", "qcow2", path), &got))
		require.Equal(t, size, got.VirtualSize)
		require.Empty(t, got.Backing)
		require.Equal(t, "1.1", got.Specific.Data.Compat)
		require.False(t, got.Specific.Data.LazyRefcounts)

		info, err := inspectFile(t, path)
		require.NoError(t, err)
		require.Equal(t, Info{Version: 3, VirtualSize: size, ClusterBits: CreateClusterBits}, info)
	}
}

func TestAcceptsImagesOfQEMU(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	data := make([]byte, 3<<20+512) // ends in the middle of a cluster
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	require.NoError(t, os.WriteFile(raw, data, 0o600))
	for name, args := range map[string][]string{
		"plain":       nil,
		"version 2":   {"-o", "compat=0.10"},
		"compressed":  {"-c"},
		"zstd":        {"-c", "-o", "compression_type=zstd"},
		"small":       {"-o", "cluster_size=512"},
		"small zlib":  {"-c", "-o", "cluster_size=4k"},
		"large":       {"-o", "cluster_size=2M"},
		"large zlib":  {"-c", "-o", "cluster_size=2M"},
		"extended L2": {"-o", "extended_l2=on"},
		"lazy":        {"-o", "lazy_refcounts=on"},
		"refcounts":   {"-o", "refcount_bits=64"},
		"falloc":      {"-o", "preallocation=falloc"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk.qcow2")
			qemuImg(t, append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, path)...)
			info, err := inspectFile(t, path)
			require.NoError(t, err)
			require.EqualValues(t, len(data), info.VirtualSize)
			require.NotZero(t, info.Allocated)
		})
	}
	t.Run("preallocated and empty", func(t *testing.T) {
		path := filepath.Join(dir, "pre.qcow2")
		qemuImg(t, "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path, "100M")
		_, err := inspectFile(t, path)
		require.NoError(t, err)
	})
}

func TestRefusesUnsupportedImagesOfQEMU(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	qemuImg(t, "create", "-q", "-f", "qcow2", path("base"), "10M")
	for name, make := range map[string][]string{
		"backing file": {"create", "-q", "-f", "qcow2", "-b", path("base"), "-F", "qcow2", path("backing file")},
		"another file": {"create", "-q", "-f", "qcow2", "-o", "data_file=" + path("data"), path("another file"), "10M"},
		"encrypted": {"create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x",
			"-o", "encrypt.format=aes,encrypt.key-secret=s", path("encrypted"), "10M"},
	} {
		t.Run(name, func(t *testing.T) {
			qemuImg(t, make...)
			_, err := inspectFile(t, path(name))
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, name)
		})
	}
	t.Run("snapshots", func(t *testing.T) {
		qemuImg(t, "snapshot", "-c", "s1", path("base"))
		_, err := inspectFile(t, path("base"))
		require.ErrorContains(t, err, "1 internal snapshots")
	})
	t.Run("bitmaps", func(t *testing.T) {
		qemuImg(t, "create", "-q", "-f", "qcow2", path("bitmap"), "10M")
		qemuImg(t, "bitmap", "--add", path("bitmap"), "b0")
		_, err := inspectFile(t, path("bitmap"))
		require.ErrorContains(t, err, "bitmaps")
	})
}
