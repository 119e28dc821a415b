// Package console stores the last part of what a guest writes to its serial port, and of what QEMU writes to its
// standard error. Both are bounded log files of different sizes.
//
// A [Log] is one file. The writing program opens it for appending and does not depend on the agent: it continues while
// the agent restarts, and no output is lost. The agent limits the file's size from outside ([Log.Trim]): it punches a
// hole before the last part, so that the file keeps its length but occupies little space. An offset in the file stays
// valid until the file reaches [Longest]; then it is cut to its last part.
//
// The package handles files and bytes. It does not depend on QEMU and does not interpret the content, which guests
// control.
//
// # Decisions
//
//   - There is no socket or pipe between the writer and the agent: without a reader, a pipe either loses bytes or
//     blocks the guest. QEMU writes its serial port's log to a descriptor (a chardev's logfile) and ignores write
//     errors.
//   - Only a running agent trims. While none runs, a guest that prints without pause makes the file grow (170 KiB/s was
//     measured through QEMU's serial port, under TCG). This is one more reason why the host's service manager must
//     restart the agent.
//   - A file stays far below the file size limit of its writer, beyond which writes are lost. At [Longest] the agent
//     removes the beginning of the file, also while it is being written, with fallocate's FALLOC_FL_COLLAPSE_RANGE on
//     ext4 and xfs. On other file systems it removes the whole content. A reader that follows the file then receives
//     the remaining content again.
//   - If the file system cannot punch holes (ext4, xfs, btrfs and tmpfs can), a file is emptied at twice the length
//     that is kept: the size limit has priority over complete output.
//   - Readers poll, every 20 to 250 ms and only while there are readers: the kernel grants a user 128 inotify
//     instances, and a host may have more readers.
package console

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Numbers of bytes that are kept at the end of a log.
const (
	KeepConsole = 1 << 20  // of a guest's serial port
	KeepStderr  = 64 << 10 // of QEMU's standard error
)

const (
	// slack is the number of bytes that a file may occupy in addition to the bytes that are kept. A file that occupies
	// more is trimmed.
	slack = 128 << 10

	// Longest is the length, in bytes, at which the beginning of a file is removed. A guest that prints 170 KiB/s
	// without pause reaches it after about 50 minutes.
	Longest = 512 << 20
)

// Log is a bounded log file. Its methods are safe for concurrent use, but Writer may be called only while no program
// writes.
type Log struct {
	path    string
	keep    int64
	longest int64
	punch   func(f *os.File, to int64) error
	// collapse removes bytes from the beginning of f. Its error wraps errors.ErrUnsupported if the file system cannot
	// do that.
	collapse func(f *os.File, to int64) error
}

// At returns the Log at path. The parameter keep is the number of bytes that are kept at its end. At does not access
// the file.
func At(path string, keep int64) *Log {
	return &Log{path: path, keep: keep, longest: Longest, punch: punch, collapse: collapse}
}

// Path returns the path of the file.
func (l *Log) Path() string { return l.path }

// Writer opens the log for a program that appends to it. If there is no file, Writer creates it with mode 0600. The
// caller must pass the descriptor to the program and close it.
func (l *Log) Writer() (*os.File, error) {
	if st, err := os.Stat(l.path); err == nil && st.Size() >= l.longest {
		if err := l.replaceFile(); err != nil {
			return nil, fmt.Errorf("begin log anew: %w", err)
		}
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// replaceFile replaces the file by a new one that contains only the last l.keep bytes.
func (l *Log) replaceFile() error {
	tail, err := l.Tail(l.keep)
	if err != nil {
		return err
	}
	next := l.path + ".new"
	if err := os.WriteFile(next, tail, 0o600); err != nil {
		return err
	}
	return os.Rename(next, l.path)
}

// Trim frees the space that the file occupies before its last l.keep bytes. It costs one stat if there is nothing to
// free. A missing file is no error.
func (l *Log) Trim() error {
	st, err := os.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	long := st.Size() >= l.longest
	if !long && allocatedBytes(st) <= l.keep+slack || st.Size() <= l.keep {
		return nil
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	defer f.Close()
	if long {
		if err = l.collapse(f, st.Size()-l.keep); errors.Is(err, errors.ErrUnsupported) {
			err = f.Truncate(0)
		}
		if err != nil {
			return fmt.Errorf("trim log: %w", err)
		}
		return nil
	}
	err = l.punch(f, st.Size()-l.keep)
	if errors.Is(err, errors.ErrUnsupported) && st.Size() > 2*l.keep {
		err = f.Truncate(0)
	}
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("trim log: %w", err)
	}
	return nil
}

// punch makes a hole at the beginning of f. The parameter to is the offset at which the hole ends. The length of f and
// all offsets stay the same.
func punch(f *os.File, to int64) error {
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	for {
		err := unix.Fallocate(int(f.Fd()), mode, 0, to)
		if !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// collapse removes whole blocks from the beginning of f. The parameter to is the maximum number of removed bytes. The
// remaining content moves to offset 0. A program that appends to f continues at the new end.
func collapse(f *os.File, to int64) error {
	// The kernel removes only whole file system blocks or block clusters. Their sizes are powers of two, at most align.
	const align = 64 << 10
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_COLLAPSE_RANGE, 0, to/align*align)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case errors.Is(err, syscall.EINVAL):
			return fmt.Errorf("fallocate: %w: %w", errors.ErrUnsupported, err)
		}
		return os.NewSyscallError("fallocate", err)
	}
}

// Length returns the file's length in bytes, including any hole; 0 if there is no log.
func (l *Log) Length() (int64, error) {
	st, err := os.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read length of log: %w", err)
	}
	return st.Size(), nil
}

func allocatedBytes(st fs.FileInfo) int64 {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return sys.Blocks * 512
	}
	return st.Size()
}

// Tail returns the last n bytes of the log, but not more than l.keep bytes. The error wraps fs.ErrNotExist if there is
// no log.
func (l *Log) Tail(n int64) ([]byte, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, fmt.Errorf("read log: %w", err)
	}
	defer f.Close()
	out, err := l.tail(f, n)
	if err != nil {
		return nil, fmt.Errorf("read log: %w", err)
	}
	return out, nil
}

func (l *Log) tail(f *os.File, n int64) ([]byte, error) {
	size, err := length(f)
	if err != nil {
		return nil, err
	}
	from := size - max(0, min(n, l.keep, size))
	buf := make([]byte, size-from)
	got, err := f.ReadAt(buf, from)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	// If the file grew while it was read, the first bytes may have been trimmed before they were read. ReadAt returned
	// zeros for them, so the result omits them.
	now, err := length(f)
	if err != nil {
		return nil, err
	}
	gone := max(0, now-l.keep-from)
	return buf[min(gone, int64(got)):got], nil
}

func length(f *os.File) (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
