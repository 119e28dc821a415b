// Package lab runs a complete cloud of the real programs on one host: three control-plane members, node agents and
// clients. `make up`, the end-to-end tests and the benchmarks use it.
//
// Every process that lab starts has its own session and a pid file, so that it survives the program that started it and
// a later program finds it. All files are beneath one directory. The control plane runs under an unprivileged uid with
// that directory as its working directory, and uses relative paths, so that it needs no access to the directories
// above.
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

// UID is the uid and gid under which root runs members of the control plane. Other users run them themselves. It lies just below the uids of the guests.
const UID = 599_999

// Dir is the path of the directory that holds all files of a cloud.
type Dir string

// Path returns the path of a file or directory beneath d.
func (d Dir) Path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

// Program describes one process of the cloud, for Dir.Start.
type Program struct {
	// Name identifies the program within a Dir, and is the base name of its pid file and log file.
	Name string
	// Binary is the path of the executable; Args holds its arguments.
	Binary string
	Args   []string
	// Work is the working directory of the process.
	Work string
	// UID is the uid and gid of the process. If it is 0, the process has the uid and gid of the process that calls
	// Start.
	UID int
	// GID, unless 0, is the gid of a process whose UID is 0. Packet filters can select the process's packets by it.
	GID int
	// Net is the path of the network namespace that the process joins. If it is empty, the process stays in the
	// namespace of the process that calls Start.
	Net string
	// Env holds environment variables, as NAME=VALUE, that the process gets besides PATH and GOTRACEBACK.
	Env []string
	// Ended, if not nil, is called with the exit code (-1 after a signal) when the process has ended. It is not called
	// if the process that called Start has ended before.
	Ended func(code int)
}

func (d Dir) pidFile(name string) string { return d.Path("pid", name) }

// LogFile returns the path of the file to which the standard output and error of a program are written.
func (d Dir) LogFile(name string) string { return d.Path("log", name) }

// Running returns the pid of the program that Start started under name, or 0 if that process does not run.
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
	// Compare the start times too, because another process may have the same pid by now.
	if now, state := startTime(pid); now == "" || now != start || state == "Z" {
		return 0
	}
	return pid
}

// startTime returns the start time of a process, in clock ticks since boot, and its state letter as in /proc/PID/stat.
// Both are "" if there is no such process.
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

// Start starts p and writes its pid file. The program continues to run when the process that called Start exits.
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
		// setpriv, because os/exec would change the uid before the working directory, and that uid may not be able to
		// reach the directory by its path.
		drop := []string{"--reuid", strconv.Itoa(p.UID), "--regid", strconv.Itoa(p.UID), "--clear-groups", "--no-new-privs", "--", p.Binary}
		cmd = exec.Command("setpriv", append(drop, p.Args...)...)
	}
	if p.Net != "" {
		// nsenter, like setpriv, replaces itself with the program, so that the pid is the program's. It does not change
		// the mount namespace.
		cmd = exec.Command("nsenter", append([]string{"--net=" + p.Net, "--"}, cmd.Args...)...)
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.Work, log, log
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GOTRACEBACK=all"}, p.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if p.GID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Gid: uint32(p.GID)}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	go func() {
		cmd.Wait() // reaps the process if it ends before this program does; otherwise init reaps it
		if p.Ended != nil {
			p.Ended(cmd.ProcessState.ExitCode())
		}
	}()
	start, _ := startTime(cmd.Process.Pid)
	return os.WriteFile(d.pidFile(p.Name), fmt.Appendf(nil, "%d %s\n", cmd.Process.Pid, start), 0o644)
}

// Signal sends a signal to the program that Start started under name. It does nothing if that program does not run.
func (d Dir) Signal(name string, sig syscall.Signal) {
	if pid := d.Running(name); pid != 0 {
		syscall.Kill(pid, sig)
	}
}

// Stop sends SIGTERM and SIGCONT to a program and waits until it ends. If it still runs after grace, Stop kills it and
// returns an error.
func (d Dir) Stop(name string, grace time.Duration) error {
	d.Signal(name, syscall.SIGTERM)
	d.Signal(name, syscall.SIGCONT)
	if d.gone(name, grace) {
		return d.forget(name)
	}
	return errors.Join(fmt.Errorf("%s did not stop in %s and was killed; see %s", name, grace, d.LogFile(name)), d.Kill(name))
}

// Kill sends SIGKILL to a program and waits until its process has ended, for at most 10 seconds.
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

// Stale reports whether a running process executes other content than the file binary has now. It also reports true if
// either cannot be read.
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

// stopped is the error of a process that has ended. Until does not try again after it.
type stopped struct{ log string }

func (s *stopped) Error() string { return "it has stopped: " + s.log }

// Until calls the function try repeatedly, with pauses of 20 to 500 ms, until it returns nil. If ctx ends first, or if a
// process that try needs has stopped, Until returns the last error of try, with the text what before it.
func Until(ctx context.Context, what string, try func(context.Context) error) error {
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if end := (*stopped)(nil); errors.As(err, &end) {
			return fmt.Errorf("wait until %s: %w", what, err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, err)
		}
	}
}
