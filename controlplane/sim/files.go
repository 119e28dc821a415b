package sim

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// CopyFiles recursively copies a directory to another file system, in the order of names. It does not sync the copies,
// so a crash may lose them like files that were just received over the network.
func CopyFiles(from vfs.FS, fromDir string, to vfs.FS, toDir string) error {
	if err := to.MkdirAll(toDir, 0o700); err != nil {
		return err
	}
	names, err := from.List(fromDir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		source, target := from.PathJoin(fromDir, name), to.PathJoin(toDir, name)
		info, err := from.Stat(source)
		if err != nil {
			return err
		}
		if info.IsDir() {
			err = CopyFiles(from, source, to, target)
		} else {
			err = copyFile(from, source, to, target)
		}
		if err != nil {
			return fmt.Errorf("copy %s: %w", source, err)
		}
	}
	return nil
}

func copyFile(from vfs.FS, source string, to vfs.FS, target string) error {
	in, err := from.Open(source)
	if err != nil {
		return err
	}
	out, err := to.Create(target, vfs.WriteCategoryUnspecified)
	if err != nil {
		return errors.Join(err, in.Close())
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, in.Close(), out.Close())
}
