package failstop

import (
	"context"
	"errors"
	"io/fs"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
)

// faulty returns an in-memory file system whose operations of the kind what fail with the error with, while *on is
// true.
func faulty(what errorfs.OpKind, with error) (below vfs.FS, on *bool) {
	on = new(bool)
	return errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if *on && op.Kind == what {
			return &fs.PathError{Op: "do", Path: op.Path, Err: with}
		}
		return nil
	})), on
}

// TestCallsBlockAfterFailure checks that the call that fails and all later calls that write block until the context
// ends, and that Failed and Err report the error.
func TestCallsBlockAfterFailure(t *testing.T) {
	below, on := faulty(errorfs.OpFileSync, syscall.ENOSPC)
	ctx, end := context.WithCancel(t.Context())
	d := New(ctx, below, "data")
	require.NoError(t, d.MkdirAll("data", 0o700))
	f, err := d.Create("data/log", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write([]byte("one"))
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	require.NoError(t, d.Err())

	*on = true
	synced, created := make(chan error, 1), make(chan error, 1)
	go func() { synced <- f.Sync() }()
	<-d.Failed()
	go func() {
		_, err := d.Create("data/other", vfs.WriteCategoryUnspecified)
		created <- err
	}()
	var failure *Error
	require.ErrorAs(t, d.Err(), &failure)
	require.True(t, failure.Full())
	require.Equal(t, "data/log", failure.File)
	require.Empty(t, synced, "a failed Sync does not return")
	require.Empty(t, created)
	// Calls that read do not block.
	_, err = d.Stat("data/log")
	require.NoError(t, err)

	end()
	require.ErrorIs(t, <-synced, syscall.ENOSPC)
	require.ErrorIs(t, <-created, syscall.ENOSPC)
	_, err = below.Stat("data/other")
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestOtherErrorsAreReturned checks that an error that does not mean a failed disk is returned to the caller, and so is
// any error outside the watched directories.
func TestOtherErrorsAreReturned(t *testing.T) {
	below, on := faulty(errorfs.OpCreate, syscall.ENOSPC)
	d := New(t.Context(), below, "data/log")
	require.NoError(t, d.MkdirAll("data/log", 0o700))
	_, err := d.Open("data/log/none")
	require.ErrorIs(t, err, fs.ErrNotExist)
	*on = true
	_, err = d.Create("data/logbook", vfs.WriteCategoryUnspecified)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, d.Err())
}

// TestReadErrorIsReturned checks that a read error counts as a failed disk, and that the reader gets the error.
func TestReadErrorIsReturned(t *testing.T) {
	below, on := faulty(errorfs.OpFileReadAt, syscall.EIO)
	d := New(t.Context(), below, "data")
	require.NoError(t, d.MkdirAll("data", 0o700))
	f, err := d.Create("data/table", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write([]byte("one"))
	require.NoError(t, errors.Join(err, f.Close()))
	f, err = d.Open("data/table")
	require.NoError(t, err)
	*on = true
	_, err = f.ReadAt(make([]byte, 3), 0)
	require.ErrorIs(t, err, syscall.EIO)
	<-d.Failed()
	require.NoError(t, f.Close())
}
