package volume

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// openFile opens a regular file in the pool's directory. It refuses symbolic links and files with several hard links.
// With the flag O_CREAT it creates the file if the file does not exist. If another goroutine replaces or removes the file
// meanwhile, openFile opens the name again.
func (p *Pool) openFile(name string, flags uint64) (*os.File, error) {
	for attempt := 1; ; attempt++ {
		f, err := p.openFileOnce(name, flags)
		if !errors.Is(err, errUnlinked) || attempt == openAttempts {
			return f, err
		}
	}
}

// openAttempts is the maximum number of attempts to open a file that is replaced again and again.
const openAttempts = 10

// errUnlinked means that the file lost its name after it was opened.
var errUnlinked = fmt.Errorf("%w: the file was replaced or removed while it was opened", ErrRefused)

func (p *Pool) openFileOnce(name string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{
		Flags: flags | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS |
			unix.RESOLVE_NO_XDEV,
	}
	if flags&unix.O_CREAT != 0 {
		how.Mode = 0o600
	}
	fd, err := unix.Openat2(int(p.dir.Fd()), name, &how)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Nlink == 0 {
		_ = f.Close()
		return nil, &os.PathError{Op: "open", Path: name, Err: errUnlinked}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 || int(st.Uid) != os.Geteuid() {
		_ = f.Close()
		return nil, fmt.Errorf("%w: the file %s is not a regular file with one link that belongs to the agent", ErrRefused, name)
	}
	return f, nil
}

// lockedBytes is the number of bytes at the beginning of a volume's file with which processes lock the file. A process
// that has the file open for a VM has locked one of these bytes. During a migration of the VM, the QEMU processes of both
// hosts have the file open, and each has locked one byte. Everybody else locks all bytes, which succeeds only if no
// process has the file open. QEMU itself locks only bytes from offset 100 on.
const lockedBytes = 2

// setLock sets the lock of f to F_WRLCK or F_UNLCK. The lock belongs to the open file description, and ends when its
// last duplicate is closed. The error wraps ErrInUse if another open file description has the lock.
func setLock(f *os.File, kind int16) error { return setLockOf(f, kind, 0, lockedBytes) }

// setLockOf is like setLock for n bytes at the offset start.
func setLockOf(f *os.File, kind int16, start, n int64) error {
	lock := unix.Flock_t{Type: kind, Whence: 0, Start: start, Len: n}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrInUse
	}
	return os.NewSyscallError("fcntl", err)
}

// openLocked opens the file of a volume for reading and writing, and locks it. The error wraps ErrInUse if a process
// has the file open.
func (p *Pool) openLocked(name string) (*os.File, error) {
	f, err := p.openFile(name, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	if mutant.On(mutant.OpenVolumeTwice) {
		return f, nil
	}
	if err := setLock(f, unix.F_WRLCK); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
