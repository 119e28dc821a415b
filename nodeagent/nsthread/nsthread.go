// Package nsthread calls functions in a network namespace. [Do] calls a function on a new operating-system thread,
// which may change its namespace. [In] and [InNamed] enter a given namespace first.
//
// # Decisions
//
//   - The thread ends with the call. A thread that was returned to the Go runtime in another namespace would run other
//     goroutines there.
//   - The main thread is never used. It cannot end, because the runtime keeps it until the process ends. Besides,
//     /proc/self/ns/net and /proc/self/net show the namespace of the main thread, so programs and packages that read
//     them would see the namespace of a VPC.
//   - Programs that a function starts run in its namespace. Goroutines that it starts do not, because they run on other
//     threads. The same is true for net.Dialer with a timeout, which dials from a goroutine.
package nsthread

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Do calls f on a new thread and returns the error of f. The thread ends with the call, so f may change its namespace.
func Do(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() && !mutant.On(mutant.EnterMainThread) {
			// The runtime chose the main thread for this goroutine. While the goroutine is locked to it, the runtime
			// must choose another thread for f.
			result <- Do(f)
			runtime.UnlockOSThread()
			return
		}
		result <- f() // the thread ends with the goroutine, because it is still locked
	}()
	return <-result
}

// In calls f on a new thread in the network namespace ns and returns the error of f.
func In(ns netns.NsHandle, f func() error) error {
	return Do(func() error {
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// InNamed calls f on a new thread in the network namespace with a name of ip-netns(8), and returns the error of f.
func InNamed(name string, f func() error) error {
	ns, err := netns.GetFromName(name)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer ns.Close()
	return In(ns, f)
}
