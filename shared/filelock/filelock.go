// Package filelock locks files with flock(2), which the kernel unlocks when the process has ended.
package filelock

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// pause is the time between two attempts to lock a file.
const pause = 20 * time.Millisecond

// Lock locks a file until f is closed. If another process has locked the file, Lock waits until the time within has
// passed, and then returns an error that wraps [unix.EWOULDBLOCK]. A process that was killed keeps its locks until the
// last of its threads has ended, so a restarted program should wait for some seconds.
func Lock(f *os.File, within time.Duration) error {
	for end := time.Now().Add(within); ; time.Sleep(pause) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return os.NewSyscallError("flock", err)
		}
	}
}
