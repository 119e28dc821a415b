package raftlog

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// logFileBytes is the size in bytes to which log files are preallocated. Pebble writes about as much before it begins
// the next file.
const logFileBytes = 32 << 20

// preallocatingFS creates Pebble's log files with their final size. Otherwise an fsync that makes a file longer would
// also wait for the file system's journal. Pebble interprets zeros after the last record as the end of the log.
type preallocatingFS struct {
	vfs.FS
	bytes int64
}

// Preallocate returns a file system that preallocates Pebble's log files. If fs is not the operating system's file
// system, it returns fs unchanged.
func Preallocate(fs vfs.FS) vfs.FS {
	if vfs.Root(fs) == vfs.Default {
		return preallocatingFS{fs, logFileBytes}
	}
	return fs
}

// Create implements vfs.FS. It preallocates the file if its name ends in ".log".
func (fs preallocatingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	if err != nil || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	_ = f.Preallocate(0, fs.bytes) // an optimization only, which not every file system supports
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
		return nil, errors.Join(fmt.Errorf("preallocate %s: %w", name, err), f.Close())
	}
	return f, nil
}
