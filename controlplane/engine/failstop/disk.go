// Package failstop provides a file system that blocks all writes after the first I/O error. The raft log and the state
// machines of a member use it.
//
// After a failed write the content of the disk is unknown, so nothing that depends on the write may be acknowledged. A
// failed fsync cannot be repeated, because the kernel drops the pages that it could not write. If Pebble got the error,
// it would panic with locks held, or retry forever while all callers wait. Therefore the failed call, and all later
// calls that write, block instead of returning the error. FS.Failed notifies the owner of the process, which transfers
// leadership and exits. At the next start, all data that was synced is still there.
//
// The package does not interpret files. It is only for data that must not be lost. Backups and images do not use it: if
// the disk is full, the operation fails and the member continues.
package failstop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// FS is a file system that blocks all writes in the watched directories after the first failure in one of them.
// Examples of failures are an I/O error and a full disk.
type FS struct {
	vfs.FS
	ctx    context.Context
	roots  []string
	failed chan struct{}

	mu  sync.Mutex
	err *Error
}

// New returns a file system that passes calls to the file system below. It watches the files in and below the
// directories roots, which are clean paths in the form that callers use as prefix. After a failure, calls that write
// there block until ctx ends, and then return the failure.
func New(ctx context.Context, below vfs.FS, roots ...string) *FS {
	return &FS{FS: below, ctx: ctx, roots: roots, failed: make(chan struct{})}
}

func (d *FS) watches(path string) bool {
	return slices.ContainsFunc(d.roots, func(root string) bool {
		return path == root || strings.HasPrefix(path, root+string(os.PathSeparator))
	})
}

// Failed returns a channel that is closed at the first failure. After that, Err returns the failure.
func (d *FS) Failed() <-chan struct{} { return d.failed }

// Err returns the first failure, as an *Error. It returns nil if there was none.
func (d *FS) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		return nil
	}
	return d.err
}

// Error is the failure because of which a file system blocks writes.
type Error struct {
	// File is the path of the file on which the call failed.
	File string
	Err  error
}

// Error returns the message of the underlying error, including the name of the file.
func (e *Error) Error() string {
	if path := (*fs.PathError)(nil); errors.As(e.Err, &path) {
		return path.Error()
	}
	return fmt.Sprintf("%s: %s", e.File, e.Err)
}

// Unwrap returns the underlying error, for errors.Is and errors.As.
func (e *Error) Unwrap() error { return e.Err }

// Full reports whether the failure was a full disk or an exceeded quota.
func (e *Error) Full() bool { return errors.Is(e.Err, unix.ENOSPC) || errors.Is(e.Err, unix.EDQUOT) }

// broken lists the errors that mean that the disk or its file system is unusable, as opposed to an invalid call.
var broken = []error{
	unix.ENOSPC, unix.EDQUOT, unix.EIO, unix.EROFS, unix.ENXIO, unix.ENODEV, unix.EUCLEAN, unix.EBADMSG, unix.ESTALE, unix.ESHUTDOWN,
	unix.EREMOTEIO, unix.ETIMEDOUT,
}

func isBroken(err error) bool {
	return slices.ContainsFunc(broken, func(b error) bool { return errors.Is(err, b) })
}

func (d *FS) fail(file string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = &Error{file, err}
		close(d.failed)
	}
}

// enter must be called before each write. If there was a failure, enter blocks until ctx ends and then returns the
// failure. Otherwise it returns nil at once.
func (d *FS) enter() error {
	select {
	case <-d.failed:
		if mutant.On(mutant.WriteAfterFailure) {
			return nil
		}
		<-d.ctx.Done()
		return d.Err()
	default:
		return nil
	}
}

// change calls the function do, which creates, renames or removes a file. If the file is in a watched directory and do
// returns one of the errors in broken, that is a failure, and change blocks. Other errors, such as that the file does
// not exist, are returned to the caller.
func (d *FS) change(file string, do func() error) error {
	if !d.watches(file) {
		return do()
	}
	if err := d.enter(); err != nil {
		return err
	}
	err := do()
	if err == nil || !isBroken(err) {
		return err
	}
	d.fail(file, err)
	return d.enter()
}

// write calls the function do, which writes or syncs a file. Every error of do except os.ErrClosed is a failure,
// because the content of the file is unknown after it; write then blocks.
func (d *FS) write(file string, do func() error) error {
	if err := d.enter(); err != nil {
		return err
	}
	err := do()
	if err == nil || errors.Is(err, os.ErrClosed) {
		return err
	}
	d.fail(file, err)
	return d.enter()
}

// read is called with the error of a call that reads a file, and returns this error. If the error is in broken and the
// file is in a watched directory, read registers it as a failure, so that writes block. The reading caller is not
// blocked.
func (d *FS) read(file string, err error) error {
	if err != nil && isBroken(err) && d.watches(file) {
		d.fail(file, err)
	}
	return err
}

// Unwrap implements vfs.FS. It returns the underlying file system.
func (d *FS) Unwrap() vfs.FS { return d.FS }

func (d *FS) open(name string, do func() (vfs.File, error)) (out vfs.File, err error) {
	err = d.change(name, func() error {
		f, err := do()
		if err == nil {
			out = d.file(f, name)
		}
		return err
	})
	return out, err
}

// Create implements vfs.FS. After a failure it blocks if name is in a watched directory.
func (d *FS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.open(name, func() (vfs.File, error) { return d.FS.Create(name, c) })
}

// OpenReadWrite implements vfs.FS. After a failure it blocks if name is in a watched directory.
func (d *FS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.open(name, func() (vfs.File, error) { return d.FS.OpenReadWrite(name, c, opts...) })
}

// ReuseForWrite implements vfs.FS. After a failure it blocks if the file is in a watched directory.
func (d *FS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.open(to, func() (vfs.File, error) { return d.FS.ReuseForWrite(from, to, c) })
}

// Open implements vfs.FS. It does not block after a failure, because it only reads.
func (d *FS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := d.FS.Open(name, opts...)
	if err != nil {
		return nil, d.read(name, err)
	}
	return d.file(f, name), nil
}

// OpenDir implements vfs.FS. It does not block after a failure, because it only reads.
func (d *FS) OpenDir(name string) (vfs.File, error) {
	f, err := d.FS.OpenDir(name)
	if err != nil {
		return nil, d.read(name, err)
	}
	return d.file(f, name), nil
}

// Link implements vfs.FS. After a failure it blocks if the file is in a watched directory.
func (d *FS) Link(from, to string) error {
	return d.change(to, func() error { return d.FS.Link(from, to) })
}

// Rename implements vfs.FS. After a failure it blocks if the file is in a watched directory.
func (d *FS) Rename(from, to string) error {
	return d.change(to, func() error { return d.FS.Rename(from, to) })
}

// MkdirAll implements vfs.FS. After a failure it blocks if dir is in a watched directory.
func (d *FS) MkdirAll(dir string, perm os.FileMode) error {
	return d.change(dir, func() error { return d.FS.MkdirAll(dir, perm) })
}

// Remove implements vfs.FS. After a failure it blocks if name is in a watched directory.
func (d *FS) Remove(name string) error {
	return d.change(name, func() error { return d.FS.Remove(name) })
}

// RemoveAll implements vfs.FS. After a failure it blocks if name is in a watched directory.
func (d *FS) RemoveAll(name string) error {
	return d.change(name, func() error { return d.FS.RemoveAll(name) })
}

func (d *FS) file(f vfs.File, name string) vfs.File {
	if !d.watches(name) {
		return f
	}
	return &file{f, d, name}
}

// file is an open file in a watched directory. Its writes and syncs block after a failure.
type file struct {
	vfs.File
	disk *FS
	name string
}

func (f *file) Write(p []byte) (n int, err error) {
	err = f.disk.write(f.name, func() (err error) { n, err = f.File.Write(p); return err })
	return n, err
}

func (f *file) WriteAt(p []byte, at int64) (n int, err error) {
	err = f.disk.write(f.name, func() (err error) { n, err = f.File.WriteAt(p, at); return err })
	return n, err
}

func (f *file) Sync() error { return f.disk.write(f.name, f.File.Sync) }

func (f *file) SyncData() error { return f.disk.write(f.name, f.File.SyncData) }

func (f *file) SyncTo(length int64) (full bool, err error) {
	err = f.disk.write(f.name, func() (err error) { full, err = f.File.SyncTo(length); return err })
	return full, err
}

func (f *file) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	return n, f.disk.read(f.name, err)
}

func (f *file) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(p, at)
	return n, f.disk.read(f.name, err)
}
