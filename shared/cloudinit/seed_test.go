package cloudinit

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// output runs a program, which must succeed, and returns its standard output.
func output(t *testing.T, name string, arguments ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), testenv.Program(t, name), arguments...)
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	require.NoError(t, err, "%s: %s%s", cmd, out, errors.String())
	return string(out)
}

// writeSeed makes the seed of an instance in a temporary file, and returns the file's path.
func writeSeed(t *testing.T, i *Instance) (path string, files *Files) {
	t.Helper()
	files, err := Render(i)
	require.NoError(t, err)
	image, err := Seed(files)
	require.NoError(t, err)
	require.Len(t, image, SeedSize)
	again, err := Seed(files)
	require.NoError(t, err)
	require.True(t, bytes.Equal(image, again), "equal files give equal images")
	path = filepath.Join(t.TempDir(), "seed.img")
	require.NoError(t, os.WriteFile(path, image, 0o600))
	return path, files
}

// TestSeedIsReadByOtherPrograms reads seeds with programs that share no code with the library that writes them: mtools
// for the files, blkid for the label by which cloud-init searches, and fsck.vfat for the file system's structure. The
// kernels of test machines have no vfat, so the image cannot be mounted there.
func TestSeedIsReadByOtherPrograms(t *testing.T) {
	for name, instance := range map[string]*Instance{
		"small":   {ID: "vm-1", HostName: "web", UserData: []byte("#!/bin/sh\necho hello\n")},
		"empty":   {ID: "vm-2"},
		"largest": largest(t),
		"of one cluster exactly": {ID: "vm-3", UserData: bytes.Repeat([]byte("a"), sectorSize),
			VendorData: bytes.Repeat([]byte("b"), sectorSize+1)},
	} {
		t.Run(name, func(t *testing.T) {
			path, files := writeSeed(t, instance)
			var names strings.Builder
			for _, f := range files.list() {
				if f.name == UserDataFile && len(f.content) == 0 {
					f.content = []byte("#cloud-config\n{}\n")
				}
				if len(f.content) == 0 {
					continue
				}
				require.Equal(t, string(f.content), output(t, "mcopy", "-i", path, "::/"+f.name, "-"), f.name)
				fmt.Fprintf(&names, "::/%s\n", f.name)
			}
			require.Equal(t, names.String(), output(t, "mdir", "-b", "-i", path, "::"))
			probe := output(t, "blkid", "-p", "-o", "export", path)
			require.Contains(t, probe, "\nLABEL=cidata\n")
			require.Contains(t, probe, "\nTYPE=vfat\n")
			requireNoDamage(t, path)
		})
	}
}

// requireNoDamage checks the file system with fsck.vfat. The program reports one cluster without a file, which the
// library reserves in every file system, and for this reason ends with status 1.
func requireNoDamage(t *testing.T, path string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), testenv.Program(t, "fsck.vfat"), "-n", path).CombinedOutput()
	var ended *exec.ExitError
	require.ErrorAs(t, err, &ended, "%s", out)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	require.Len(t, lines, 5, "%s", out)
	require.Equal(t, []string{"Reclaimed 1 unused cluster (512 bytes).", "", "Leaving filesystem unchanged."}, lines[1:4])
}

// TestSeedIsReproducible compares the image of an instance with its SHA-256 when this test was written. The image
// depends on the version of the file system's library, and on nothing else besides the instance.
func TestSeedIsReproducible(t *testing.T) {
	path, _ := writeSeed(t, &Instance{ID: "vm-1", HostName: "web", UserData: []byte("#!/bin/sh\n")})
	image, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "e2b153008f3e433981a7d62ade117a4d6a82707caf02ed143ddf6164bda1ec24", fmt.Sprintf("%x", sha256.Sum256(image)))
}

// TestSeedsOfDifferentInstancesDiffer ensures that the comparison in writeSeed can fail.
func TestSeedsOfDifferentInstancesDiffer(t *testing.T) {
	one, _ := writeSeed(t, &Instance{ID: "vm-1"})
	two, _ := writeSeed(t, &Instance{ID: "vm-2"})
	a, err := os.ReadFile(one)
	require.NoError(t, err)
	b, err := os.ReadFile(two)
	require.NoError(t, err)
	require.NotEqual(t, a, b)
}

func TestSeedRefusesFilesThatDoNotFit(t *testing.T) {
	_, err := Seed(&Files{MetaData: []byte("instance-id: a\n"), UserData: make([]byte, SeedSize)})
	require.ErrorContains(t, err, "write user-data to seed")
}
