package volume

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// newFile makes the empty file of a volume, and locks it like Open. It removes an incomplete file of the same name. The
// file is a new inode, so another host that is still writing the removed file changes nothing in the new one. The error
// wraps ErrInUse if a process has the old file locked. The caller must have locked the pool.
func (p *Pool) newFile(name string) (*os.File, error) {
	old, err := p.openLocked(name)
	switch {
	case err == nil && mutant.On(mutant.ReuseUnfinished):
		return old, nil
	case err == nil:
		defer old.Close()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	if err := p.removeFile(name); err != nil {
		return nil, err
	}
	f, err := p.openFile(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return nil, err
	}
	if err := setLock(f, unix.F_WRLCK); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// errReplaced means that another host has replaced a file that this host was writing. This happens if this host did not
// reach the file system of a shared pool for so long that its locks have ended.
var errReplaced = fmt.Errorf("%w: it was changed while this host wrote it", ErrInUse)

// checkName returns errReplaced if the file of the pool with this name is not f.
func (p *Pool) checkName(f *os.File, name string) error {
	have, err := os.Lstat(p.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return errReplaced
	}
	if err != nil {
		return err
	}
	own, err := f.Stat()
	if err == nil && !os.SameFile(have, own) {
		err = errReplaced
	}
	return err
}

// removeOwn removes the file with this name if the file is f. The caller must have locked the pool.
func (p *Pool) removeOwn(f *os.File, name string) error {
	err := p.checkName(f, name)
	if errors.Is(err, errReplaced) {
		return nil
	}
	if err != nil {
		return err
	}
	return p.removeFile(name)
}

// claimRecord creates the empty record of a new volume. The error wraps ErrInUse if the volume has a record. In contrast to
// write, claimRecord never replaces a record that this host does not see yet, because its cache of a network file system
// is older than the record. An empty record means that the volume does not exist. The caller must have locked the pool.
func (p *Pool) claimRecord(id string) error {
	f, err := p.openFile(id+".json", unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
	if err == nil {
		return f.Close()
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(p.path(id + ".json"))
	switch {
	case err != nil:
		return err
	case st.Size() > 0:
		return fmt.Errorf("%w: another host has just made the volume", ErrInUse)
	}
	return nil
}
