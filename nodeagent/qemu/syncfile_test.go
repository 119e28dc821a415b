package qemu

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestSyncFile checks that syncFile returns an error for a link and for a named pipe, with which a hostile swtpm could
// have replaced the state of the TPM. It must neither follow the link nor wait for a writer of the pipe.
func TestSyncFile(t *testing.T) {
	dir := t.TempDir()
	file, link, pipe := filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	require.NoError(t, os.WriteFile(file, []byte("state"), 0o600))
	require.NoError(t, syncFile(file))
	require.NoError(t, os.Symlink(file, link))
	require.ErrorIs(t, syncFile(link), unix.ELOOP)
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	done := make(chan error, 1)
	go func() { done <- syncFile(pipe) }()
	select {
	case err := <-done:
		require.Error(t, err)
	case <-time.After(10 * time.Second):
		f, err := os.OpenFile(pipe, os.O_WRONLY, 0) // unblocks the call of open in syncFile
		require.NoError(t, err)
		require.NoError(t, f.Close())
		t.Fatal("syncFile waits for a writer of the pipe")
	}
}
