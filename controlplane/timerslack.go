package main

import (
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// timerSlack is the maximum delay with which the kernel may end a sleep, so that it can end several sleeps at once. The
// kernel's default is 50 µs. The timers of a member are all far longer than timerSlack.
const timerSlack = time.Millisecond

// setTimerSlack sets the timer slack of all threads of this process. While a member works, a thread of the Go runtime
// (sysmon) sleeps for 20 µs at a time. With the kernel's default, these wake-ups use a sixth of the CPU time of a
// member under load, and a third of that of an idle one.
//
// A thread inherits the slack from the thread that creates it, and changing the slack of another thread requires a
// capability. The first thread of a program creates sysmon before main runs. So setTimerSlack sets the slack of the
// current thread and executes the program again in the same process; in the second execution it returns at once. If
// anything fails, it returns, and the member runs with the default.
func setTimerSlack() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if currentTimerSlack() >= timerSlack {
		return
	}
	// A thread with real-time scheduling has no slack, and this call has no effect on it.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack), 0, 0, 0); err != nil || currentTimerSlack() < timerSlack {
		return
	}
	program, err := os.Executable()
	if err != nil {
		return
	}
	_ = syscall.Exec(program, os.Args, os.Environ()) // Exec returns only on an error
}

// currentTimerSlack returns the timer slack of the calling thread, or 0 if it cannot be read.
func currentTimerSlack() time.Duration {
	n, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return 0
	}
	return time.Duration(n)
}
