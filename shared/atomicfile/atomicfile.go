// Package atomicfile replaces files so that readers, and the state after a crash or a power failure, have either the
// complete old content or the complete new content.
//
// The content is written to a temporary file in the directory of the target. The file is synced and renamed to the
// target, and then the directory is synced. Package renameio executes all steps but the last. A write that returns an
// error leaves no temporary file. A process that is killed while it writes leaves one.
//
// # Decisions
//
//   - Temporary files are named .TARGET followed by a random decimal number. They never have the name of a target, and
//     code that lists a directory must ignore them, as it ignores other names that it does not know.
//   - [RemoveLeftovers] removes the temporary files that killed processes left. It is a function of its own, because it
//     would break a write that is in progress: the program that owns a directory calls it before its first write. In
//     directories that belong to a user, such as that of a saved snapshot, nothing is removed.
//   - The mode of a file is the one that the caller gives. The process's umask and the mode of the old file have no
//     effect.
//
// Files of the storage engine are not written with this package: they go through a vfs.FS that tests replace.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/renameio/v2"
)

// WriteFile replaces the file at path by a file with the given content and mode, or creates it. When WriteFile returns
// nil, the content is durable. If path is a symbolic link, the link is replaced, not its target.
func WriteFile(path string, data []byte, perm os.FileMode) error {
	return Write(path, perm, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// Write is like WriteFile, but the function fill writes the content to the file f. The file f is open for reading and
// writing. fill may also read it by its name, change its owner and seek, but must not close it. If fill returns an
// error, the old file stays as it is, and Write returns that error. Errors of methods of f name path, not the temporary
// file.
func Write(path string, perm os.FileMode, fill func(f *os.File) error) (err error) {
	dir := filepath.Dir(path)
	f, err := renameio.NewPendingFile(path, renameio.WithTempDir(dir), renameio.WithStaticPermissions(perm))
	if err != nil {
		return inTarget(err, path)
	}
	defer func() {
		if cleanupErr := f.Cleanup(); cleanupErr != nil { // Cleanup does nothing after a replacement
			err = errors.Join(err, fmt.Errorf("remove temporary file: %w", cleanupErr))
		}
	}()
	if err := fill(f.File); err != nil {
		return inTarget(err, path)
	}
	if err := f.CloseAtomicallyReplace(); err != nil {
		return inTarget(err, path)
	}
	return SyncDir(dir)
}

// inTarget replaces the name of the temporary file in an error of package os by path. It returns other errors, and
// errors that wrap one of package os, unchanged.
func inTarget(err error, path string) error {
	switch e := err.(type) {
	case *fs.PathError:
		if strings.HasPrefix(filepath.Base(e.Path), "."+filepath.Base(path)) {
			return &fs.PathError{Op: e.Op, Path: path, Err: e.Err}
		}
	case *os.LinkError:
		return &fs.PathError{Op: e.Op, Path: path, Err: e.Err}
	}
	return err
}

// SyncDir calls fsync on a directory, so that creations, renames and removals in it are durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// temporary matches the names of temporary files, which end with a random number. About one such number in a million
// has fewer than 13 digits. A file with such a name is not recognized.
var temporary = regexp.MustCompile(`^\..+[0-9]{13,19}$`)

// RemoveLeftovers removes the temporary files that killed processes left in dir. A directory that does not exist is no
// error. The caller must ensure that no process is writing in dir, and that dir belongs to the program: every regular
// file whose name matches temporary is removed.
func RemoveLeftovers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove temporary files: %w", err)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !temporary.MatchString(e.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove temporary files: %w", err)
		}
	}
	return nil
}
