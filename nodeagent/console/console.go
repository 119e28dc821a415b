// Package console keeps the last part of what a guest wrote to its serial port, and of what QEMU wrote to its standard
// error: the same thing with another size.
//
// A [Log] is one file. The writing program has it open for appending and needs nobody: it goes on while the agent is
// restarted, and nothing is lost. The agent bounds the file from outside ([Log.Trim]) by giving the blocks before the
// last part back to the file system. The file then looks long and occupies little, and an offset in it means the
// same until the file is [Longest], when it is cut to its last part.
//
// The package knows files and bytes; not QEMU, and not what the bytes mean: they are a guest's and may hold anything.
//
// # Decisions
//
//   - No socket or pipe between the writer and the agent: with nobody at its other end it either loses bytes or stops
//     the guest. QEMU writes its serial port's log to a descriptor (a chardev's logfile), and ignores errors of it.
//   - Only a running agent trims. While none runs, a guest that prints without pause makes the file grow (170 KiB/s was
//     measured through QEMU's serial port, under TCG): a host's service manager must restart its agent, for this too.
//   - A file stays far below the file size limit of its writer, beyond which writes are lost. At [Longest] the agent
//     removes the beginning of the file, also while it is being written, with fallocate's FALLOC_FL_COLLAPSE_RANGE on
//     ext4 and xfs; on other file systems it removes the whole content. A reader that follows the file then receives
//     the remaining content again.
//   - Where the file system cannot punch holes (ext4, xfs, btrfs and tmpfs can), a file that is twice as long as what is
//     kept is emptied: bounded first, complete second.
//   - Readers poll, every 20 to 250 ms and only while somebody reads: the kernel grants a user 128 inotify instances,
//     on a host that may have more readers.
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

// Kept by default, in bytes.
const (
	KeepConsole = 1 << 20  // of a guest's serial port
	KeepStderr  = 64 << 10 // of QEMU's standard error
)

const (
	// slack is how much more than it should a file may occupy before it is trimmed.
	slack = 128 << 10

	// Longest is the length, in bytes, at which the beginning of a file is removed: hours of output of a guest that
	// prints without pause.
	Longest = 512 << 20
)

// Log is a bounded log. Its methods may be called at the same time, but Writer only while nobody writes.
type Log struct {
	path    string
	keep    int64
	longest int64
	punch   func(f *os.File, to int64) error
	// collapse removes the beginning of f; its error wraps errors.ErrUnsupported where that is not possible.
	collapse func(f *os.File, to int64) error
}

// At names the log at path, of which the last keep bytes are kept. It touches nothing.
func At(path string, keep int64) *Log {
	return &Log{path: path, keep: keep, longest: Longest, punch: punch, collapse: collapse}
}

// Path is the file's.
func (l *Log) Path() string { return l.path }

// Writer opens the log for a program that will append to it, making it if there is none (0600). The caller hands the
// descriptor on and closes it.
func (l *Log) Writer() (*os.File, error) {
	if st, err := os.Stat(l.path); err == nil && st.Size() >= l.longest {
		if err := l.begin(); err != nil {
			return nil, fmt.Errorf("begin log anew: %w", err)
		}
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// begin replaces the file by one that holds its last part.
func (l *Log) begin() error {
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

// Trim gives back what the file occupies beyond the part that is kept. It costs one stat when there is nothing to do.
// A log that is not there needs none.
func (l *Log) Trim() error {
	st, err := os.Stat(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	long := st.Size() >= l.longest
	if !long && occupied(st) <= l.keep+slack || st.Size() <= l.keep {
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

// punch makes a hole from the beginning of f.
func punch(f *os.File, to int64) error {
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	for {
		err := unix.Fallocate(int(f.Fd()), mode, 0, to)
		if !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// collapse removes at most to bytes, in whole blocks, from the beginning of f. The rest moves to offset 0; a program
// that appends to f continues at the new end.
func collapse(f *os.File, to int64) error {
	// Blocks, and clusters of them, have powers of two up to this size.
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

// Length is the file's length in bytes, of which most may be a hole; 0 when there is no log.
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

func occupied(st fs.FileInfo) int64 {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return sys.Blocks * 512
	}
	return st.Size()
}

// Tail returns the last n bytes, at most what is kept. The error wraps fs.ErrNotExist when there is no log.
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
	// What was written meanwhile may have led to the beginning being trimmed before it was read: then that is zeros.
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
