package volume

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/session"
)

func newExport(t *testing.T, format string) *export {
	t.Helper()
	s := &session.Session{Shell: session.Shell{Stderr: &bytes.Buffer{}}}
	return &export{s: s, path: filepath.Join(t.TempDir(), "out"), name: "data", state: savedExport{Volume: "v", Snapshot: "s", Format: format}}
}

// TestExportDoesNotContinueAShorterFile checks that an export begins again if the incomplete file has less than the
// saved progress. Otherwise the missing part would be zeros.
func TestExportDoesNotContinueAShorterFile(t *testing.T) {
	for format, progress := range map[string]savedExport{
		formatRaw:  {Offset: 8192},
		formatDiff: {Offset: 1 << 30, Length: 8192},
	} {
		for size, want := range map[int]uint64{8191: 0, 8192: progress.Offset, 9000: progress.Offset} {
			e := newExport(t, format)
			e.state.Offset, e.state.Length = progress.Offset, progress.Length
			require.NoError(t, e.save())
			require.NoError(t, os.WriteFile(e.path+".part", make([]byte, size), 0o600))
			again := newExport(t, format)
			again.path = e.path
			require.NoError(t, again.resume())
			require.NoError(t, again.open())
			require.Equal(t, want, again.state.Offset, "%s with %d bytes", format, size)
			again.file.Close()
		}
	}
}

// TestExportsToOneFile checks that two processes cannot write to the same file.
func TestExportsToOneFile(t *testing.T) {
	e := newExport(t, formatRaw)
	require.NoError(t, e.open())
	other := newExport(t, formatRaw)
	other.path = e.path
	require.ErrorContains(t, other.open(), "another process is exporting to")
	e.file.Close()
	require.NoError(t, other.open())
	other.file.Close()
}

// TestExportKeepsOtherFiles checks that a file that appeared during the export is not replaced, and that a file that
// cannot be synced does not get its final name.
func TestExportKeepsOtherFiles(t *testing.T) {
	e := newExport(t, formatRaw)
	require.NoError(t, e.open())
	require.NoError(t, os.WriteFile(e.path, []byte("other"), 0o600))
	require.ErrorContains(t, e.publish(), "exists")
	text, err := os.ReadFile(e.path)
	require.NoError(t, err)
	require.Equal(t, "other", string(text))
	require.FileExists(t, e.path+".part")

	e = newExport(t, formatRaw)
	require.NoError(t, e.open())
	require.NoError(t, e.file.Close()) // Sync now fails
	require.Error(t, e.publish())
	require.NoFileExists(t, e.path)

	e = newExport(t, formatRaw)
	require.NoError(t, e.open())
	require.NoError(t, e.publish())
	require.FileExists(t, e.path)
	require.NoFileExists(t, e.path+".part")
}
