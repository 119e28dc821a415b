package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// inside is the environment variable that Again sets in the process that it starts.
const inside = "TRIVET_LAB_INSIDE"

// Inside reports whether this process was started by Again.
func Inside() bool { return os.Getenv(inside) != "" }

// Again runs this program with the same arguments in a child process, and returns the child's exit code. The child is
// in a new network namespace and in a new namespace of each kind in flags (CLONE_NEW…); there, Inside reports true. The
// child must call Loopback first and must clean up on SIGTERM. It receives SIGTERM, perhaps twice, when this process
// receives SIGINT or SIGTERM, or dies.
func Again(flags uintptr) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | flags, Pdeathsig: syscall.SIGTERM}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run in namespaces (it takes root):", err)
		return 1
	}
	return 0
}

// Loopback brings up the interface lo of this process's network namespace; in a new namespace, lo is down.
func Loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	defer unix.Close(s)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}
