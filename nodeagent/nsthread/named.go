package nsthread

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Dir is the directory in which ip-netns(8) mounts namespaces.
const Dir = "/run/netns"

// Create makes a network namespace with a name of ip-netns(8). It returns false if the namespace exists.
func Create(name string) (created bool, err error) {
	path := filepath.Join(Dir, name)
	mounted, err := Exists(path)
	switch {
	case mounted:
		return false, nil
	case err == nil:
		// The file of a namespace of which the creation or the removal was interrupted.
		if err := os.Remove(path); err != nil {
			return false, err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	if err := shareDir(); err != nil {
		return false, fmt.Errorf("share mounts below %s: %w", Dir, err)
	}
	err = Do(func() error {
		ns, err := netns.NewNamed(name)
		if err != nil {
			return fmt.Errorf("create network namespace %s: %w", name, err)
		}
		return ns.Close()
	})
	return err == nil, err
}

// Exists reports whether a namespace is mounted at path. It returns fs.ErrNotExist if there is no file.
func Exists(path string) (bool, error) {
	var info unix.Statfs_t
	if err := unix.Statfs(path, &info); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return info.Type == unix.NSFS_MAGIC, nil
}

// shareDir makes mounts and unmounts below Dir take effect in all mount namespaces, as ip-netns(8) does. Otherwise a
// process with its own mount namespace keeps a copy of each mount, and thereby the network namespace.
func shareDir() error {
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return err
	}
	// Other programs do the same, under the same lock.
	dir, err := os.Open(Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	err = unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	// Only mount points can be shared.
	if err := unix.Mount(Dir, Dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
}
