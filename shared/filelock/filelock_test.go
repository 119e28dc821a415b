package filelock

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestLock locks a file that is locked already: without waiting, and while the lock ends.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	first, second := open(), open()
	require.NoError(t, Lock(first, 0))
	require.ErrorIs(t, Lock(second, 0), unix.EWOULDBLOCK)
	time.AfterFunc(50*time.Millisecond, func() { _ = first.Close() })
	require.NoError(t, Lock(second, time.Minute))
}
