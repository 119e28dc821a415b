package qemu

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

const (
	// idleWithin is the maximum time of awaitIdle. A QEMU that does not become idle in this time is used all the same.
	idleWithin = 5 * time.Second
	idlePause  = 2 * time.Millisecond
	// startedThreads is the number of threads that a QEMU has at least when its monitors are ready: the main thread,
	// the thread for RCU, and the thread that serves the monitors.
	startedThreads = 3
)

// awaitIdle waits until a new QEMU has prepared its monitors, but not after ctx has ended. Before a QEMU serves a
// monitor in the thread for monitors, its main thread serves the monitor. If a client connects while QEMU changes the
// thread, both threads may read from the connection, and QEMU executes commands that nobody has sent, or aborts in its
// JSON parser. This was seen with QEMU 7.2 on busy machines.
//
// The main thread waits for clients only after it has prepared the monitors, and wakes the other thread when it does
// so. So the monitors are ready when all threads sleep.
func (p *Process) awaitIdle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, idleWithin)
	defer cancel()
	// The states of the threads are not read at one instant, so they must be the same twice.
	for times := 0; times < 2 && ctx.Err() == nil; {
		if pause(ctx, idlePause); threadsSleep(p.record.PID) {
			times++
		} else {
			times = 0
		}
	}
}

// threadsSleep reports whether a process has at least startedThreads threads, and all of them sleep.
func threadsSleep(pid int) bool {
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) < startedThreads {
		return false
	}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		// The state follows the name of the thread, which is in parentheses and may contain some.
		if at := bytes.LastIndexByte(text, ')'); err != nil || at < 0 || !bytes.HasPrefix(text[at:], []byte(") S")) {
			return false
		}
	}
	return true
}
