package nsthread

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// newNamespace returns a network namespace without a name, which is removed at the end of the test.
func newNamespace(t *testing.T) netns.NsHandle {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("this test makes network namespaces and needs root")
	}
	var ns netns.NsHandle
	require.NoError(t, Do(func() (err error) {
		ns, err = netns.New()
		return err
	}))
	t.Cleanup(func() { ns.Close() })
	return ns
}

// threadNamespace returns the network namespace of the calling thread.
func threadNamespace(t *testing.T) string {
	t.Helper()
	target, err := os.Readlink("/proc/thread-self/ns/net")
	require.NoError(t, err)
	return target
}

// foreignThreads returns the number of threads of the process that are in the given namespace.
func foreignThreads(t *testing.T, namespace string) (n int) {
	t.Helper()
	paths, err := filepath.Glob("/proc/self/task/*/ns/net")
	require.NoError(t, err)
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil && target == namespace {
			n++
		}
	}
	return n
}

// TestIn checks that the function runs in the given namespace, and that no thread stays there after concurrent calls.
func TestIn(t *testing.T) {
	ns := newNamespace(t)
	own := threadNamespace(t)
	var inside string
	failed := errors.New("failed")
	require.ErrorIs(t, In(ns, func() error {
		inside = threadNamespace(t)
		return failed
	}), failed)
	require.NotEqual(t, own, inside)
	require.ErrorContains(t, In(netns.None(), func() error { return nil }), "enter network namespace")
	require.ErrorContains(t, InNamed("nsthread-test-none", func() error { return nil }), "nsthread-test-none")

	var calls sync.WaitGroup
	for range 200 {
		calls.Go(func() {
			if err := In(ns, func() error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	require.Equal(t, own, threadNamespace(t))
	require.Eventually(t, func() bool { return foreignThreads(t, inside) == 0 }, 30*time.Second, 10*time.Millisecond)
}

// TestMainThreadKeepsNamespace checks that the function never runs on the main thread, also when the runtime chooses
// the main thread first. The runtime runs a new goroutine on the thread of the goroutine that starts it, if that one
// then waits and there is only one processor. So the test makes the calls from the main thread.
func TestMainThreadKeepsNamespace(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	onMainThread(t, func() {
		for range 100 {
			if err := Do(func() error {
				if unix.Gettid() == unix.Getpid() {
					return errors.New("the function runs on the main thread")
				}
				return nil
			}); err != nil {
				t.Error(err)
				return
			}
		}
	})
}

// onMainThread calls f on a goroutine that is on the main thread at first and is not locked to it. Until f returns, the
// threads that the runtime tried before are locked to other goroutines.
func onMainThread(t *testing.T, f func()) {
	t.Helper()
	found, release := make(chan bool), make(chan struct{})
	var others sync.WaitGroup
	defer others.Wait()
	defer close(release)
	for range 1000 {
		done := make(chan struct{})
		others.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if unix.Gettid() != unix.Getpid() {
				found <- false
				<-release
				return
			}
			found <- true
			runtime.UnlockOSThread()
			f()
			runtime.LockOSThread()
			close(done)
		})
		if <-found {
			<-done
			return
		}
		// If the main thread waits for events of the network, the runtime does not choose it. A timer ends this wait.
		time.Sleep(time.Millisecond)
	}
	t.Fatal("no goroutine ran on the main thread")
}
