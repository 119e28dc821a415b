// Package lab runs a whole cloud of the real programs on one host: a trio, node agents, clients. `make up`, the
// end-to-end tests and the benchmarks all stand on it.
//
// Everything it starts is a process of its own session with a file that holds its pid, so that a later call finds it;
// everything it keeps is beneath one directory. The control plane runs under an unprivileged uid, with its working
// directory inside that directory and relative paths, so that it needs no right to anything above.
package lab

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// UID is what the control plane runs as: just below the range of the guests.
const UID = 599_999

// Dir is where a cloud keeps everything.
type Dir string

// Path is a path beneath it.
func (d Dir) Path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

// Program is one process of the cloud.
type Program struct {
	// Name names its pid and log files.
	Name string
	// Binary is a path; Args follow it.
	Binary string
	Args   []string
	// Work is its working directory.
	Work string
	// UID other than 0 is what it runs as.
	UID int
	// Net is the path of the network namespace that it runs in; the starter's when empty.
	Net string
	// Env is added to a small environment.
	Env []string
	// Ended is told its exit code, -1 when a signal ended it, if its starter still lives then. Optional.
	Ended func(code int)
}

func (d Dir) pidFile(name string) string { return d.Path("pid", name) }

// LogFile is where a program writes.
func (d Dir) LogFile(name string) string { return d.Path("log", name) }

// Running is the pid of a program that was started here and still runs; 0 when it does not.
func (d Dir) Running(name string) int {
	text, err := os.ReadFile(d.pidFile(name))
	if err != nil {
		return 0
	}
	pidText, start, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	pid, err := strconv.Atoi(pidText)
	if err != nil || pid <= 1 {
		return 0
	}
	// Another process may have the number by now.
	if now, state := startTime(pid); now == "" || now != start || state == "Z" {
		return 0
	}
	return pid
}

// startTime is when a process started, in the kernel's ticks, and its state.
func startTime(pid int) (start, state string) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", ""
	}
	_, rest, ok := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return "", ""
	}
	return fields[19], fields[0]
}

// Start starts a program that outlives its starter.
func (d Dir) Start(p Program) error {
	for _, dir := range []string{"pid", "log"} {
		if err := os.MkdirAll(d.Path(dir), 0o755); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(d.LogFile(p.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.Binary, p.Args...)
	if p.UID != 0 {
		// Go would change the uid before the directory, which the uid may not be able to reach by its path.
		drop := []string{"--reuid", strconv.Itoa(p.UID), "--regid", strconv.Itoa(p.UID), "--clear-groups", "--no-new-privs", "--", p.Binary}
		cmd = exec.Command("setpriv", append(drop, p.Args...)...)
	}
	if p.Net != "" {
		// It becomes the program, as setpriv does, and leaves it in our mount namespace.
		cmd = exec.Command("nsenter", append([]string{"--net=" + p.Net, "--"}, cmd.Args...)...)
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.Work, log, log
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GOTRACEBACK=all"}, p.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	go func() {
		cmd.Wait() // it is ours until we end; then init's
		if p.Ended != nil {
			p.Ended(cmd.ProcessState.ExitCode())
		}
	}()
	start, _ := startTime(cmd.Process.Pid)
	return os.WriteFile(d.pidFile(p.Name), fmt.Appendf(nil, "%d %s\n", cmd.Process.Pid, start), 0o644)
}

// Signal sends a signal to a program, if it runs.
func (d Dir) Signal(name string, sig syscall.Signal) {
	if pid := d.Running(name); pid != 0 {
		syscall.Kill(pid, sig)
	}
}

// Stop ends a program: politely, and after grace not.
func (d Dir) Stop(name string, grace time.Duration) error {
	d.Signal(name, syscall.SIGTERM)
	d.Signal(name, syscall.SIGCONT)
	if d.gone(name, grace) {
		return d.forget(name)
	}
	return errors.Join(fmt.Errorf("%s did not stop in %s and was killed; see %s", name, grace, d.LogFile(name)), d.Kill(name))
}

// Kill ends a program at once and waits until it is gone.
func (d Dir) Kill(name string) error {
	d.Signal(name, syscall.SIGKILL)
	if !d.gone(name, 10*time.Second) {
		return fmt.Errorf("%s survives SIGKILL", name)
	}
	return d.forget(name)
}

func (d Dir) forget(name string) error {
	if err := os.Remove(d.pidFile(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (d Dir) gone(name string, wait time.Duration) bool {
	for end := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		if d.Running(name) == 0 {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// Stale reports whether a program that runs is another build than the file.
func Stale(pid int, binary string) bool {
	a, errA := sum(fmt.Sprintf("/proc/%d/exe", pid))
	b, errB := sum(binary)
	return errA != nil || errB != nil || a != b
}

func sum(path string) (out [32]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return out, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return out, err
	}
	return [32]byte(h.Sum(nil)), nil
}

// Until repeats try until it succeeds or ctx ends, and then gives its last error.
func Until(ctx context.Context, what string, try func(context.Context) error) error {
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, err)
		}
	}
}
