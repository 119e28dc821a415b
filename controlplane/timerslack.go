package main

import (
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// timerSlack is how late the kernel may end a sleep, so that it can end several at once; the default is 50 µs. All
// timers of a member are far longer.
const timerSlack = time.Millisecond

// setTimerSlack sets the timer slack of all threads. While a member works, a thread of the Go runtime (sysmon) sleeps
// for 20 µs at a time; with the default these wake-ups are a sixth of the CPU time of a member under load, and a third
// of that of an idle one.
//
// A thread inherits the slack from the thread that creates it, and changing that of another thread needs a capability.
// Only a program's first thread creates sysmon, before main runs. So setTimerSlack sets the slack of this thread and
// executes the program again in the same process; in the second execution it returns at once. If anything fails, it
// returns, and the member runs with the default.
func setTimerSlack() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if currentTimerSlack() >= timerSlack {
		return
	}
	// A real-time thread has no slack, and setting it has no effect.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack), 0, 0, 0); err != nil || currentTimerSlack() < timerSlack {
		return
	}
	program, err := os.Executable()
	if err != nil {
		return
	}
	_ = syscall.Exec(program, os.Args, os.Environ()) // returns only on an error
}

// currentTimerSlack returns the slack of the calling thread, or 0 if it cannot be read.
func currentTimerSlack() time.Duration {
	n, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return 0
	}
	return time.Duration(n)
}
