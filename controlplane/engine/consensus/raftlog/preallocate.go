package raftlog

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// logFileBytes is about what Pebble writes to one of its log files before it begins another.
const logFileBytes = 32 << 20

// preallocatingFS makes Pebble's log files as long as they will be from the start: a sync that makes a file longer waits for the
// file system's journal, too. Pebble takes zeroes after the last record for the end, and writes over old files later on.
type preallocatingFS struct {
	vfs.FS
	bytes int64
}

// Preallocate returns fs with log files of logFileBytes if fs is the operating system's, otherwise fs.
func Preallocate(fs vfs.FS) vfs.FS {
	if vfs.Root(fs) == vfs.Default {
		return preallocatingFS{fs, logFileBytes}
	}
	return fs
}

// Create implements vfs.FS.
func (fs preallocatingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	if err != nil || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	_ = f.Preallocate(0, fs.bytes) // not every file system can, and nothing depends on it
	if err := f.Close(); err != nil {
		return nil, err
	}
	if f, err = fs.FS.OpenReadWrite(name, category); err != nil {
		return nil, err
	}
	if _, err = f.WriteAt([]byte{0}, fs.bytes-1); err == nil {
		err = f.Sync()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make room in %s: %w", name, err), f.Close())
	}
	return f, nil
}
