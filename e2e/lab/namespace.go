package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// inside is the environment variable that Again sets in the process that it starts. Its value is the pid of the process
// that called Again.
const inside = "TRIVET_LAB_INSIDE"

// Inside reports whether this process was started by Again.
func Inside() bool { return os.Getenv(inside) != "" }

// RunID returns a number that is unique among the test programs that run on this host: the pid of the process that
// called Again, or the pid of this process if it was not started by Again.
func RunID() int {
	if id, err := strconv.Atoi(os.Getenv(inside)); err == nil {
		return id
	}
	return os.Getpid()
}

// Again runs this program with the same arguments in a child process, and returns the child's exit code. The child is
// in a new network namespace and in a new namespace of each kind in flags (CLONE_NEW…); there, Inside reports true. The
// child must call Loopback first, and must clean up on SIGTERM or be in a new PID namespace: see Init. It receives
// SIGTERM, perhaps twice, when this process receives SIGINT or SIGTERM, or dies.
func Again(flags uintptr) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", inside, os.Getpid()))
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

// IsInit reports whether this process is the first one of its PID namespace. It must then call Init.
func IsInit() bool { return Inside() && os.Getpid() == 1 }

// Init runs this program with the same arguments in a child process, and returns the child's exit code. When Init
// returns, or this process is killed, the kernel kills all processes of the PID namespace, also those that have their own
// sessions: members, agents and guests. Init mounts /proc, and reaps processes whose parents have ended. On SIGTERM it
// returns without waiting for the child.
func Init() int {
	if err := errors.Join(PrivateMounts(), unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
		fmt.Fprintln(os.Stderr, "prepare the namespaces:", err)
		return 1
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	child, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		fmt.Fprintln(os.Stderr, "run in the PID namespace:", err)
		return 1
	}
	exited := make(chan int)
	go func() {
		for {
			var status unix.WaitStatus
			switch pid, err := unix.Wait4(-1, &status, 0, nil); {
			case errors.Is(err, unix.ECHILD):
				return
			case pid == child.Pid && status.Exited():
				exited <- status.ExitStatus()
			case pid == child.Pid:
				exited <- 1
			}
		}
	}()
	select {
	case code := <-exited:
		return code
	case <-signals:
		return 1
	}
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
