package machine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNewRemovesTemporaryRecords checks that New removes the temporary file of an interrupted write and leaves the
// record unchanged.
func TestNewRemovesTemporaryRecords(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "00000000-0000-4000-8000-000000000001.json")
	require.NoError(t, Record{Version: recordVersion, Built: true}.write(path))
	left := filepath.Join(dir, ".00000000-0000-4000-8000-000000000001.json1234567890123456789")
	require.NoError(t, os.WriteFile(left, []byte(`{"version":`), 0o600))
	_, err := New(Options{Records: dir})
	require.NoError(t, err)
	require.NoFileExists(t, left)
	r, ok, err := readRecord(path)
	require.NoError(t, err)
	require.True(t, ok && r.Built)
}
