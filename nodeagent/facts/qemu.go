package facts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	// DefaultQEMU is the name of the program that runs guests.
	DefaultQEMU = "qemu-system-x86_64"

	machineAlias = "q35"            // alias of the newest machine type, which guests get
	maxOutput    = 64 << 10         // bytes of QEMU's output that are stored; the rest is discarded
	qmpTimeout   = 10 * time.Second // for each of the two runs of QEMU
)

// QEMU describes the QEMU program of this host and what it supports.
type QEMU struct {
	Path    string // absolute
	Version string // such as 7.2.22, without the distribution's suffix
	Machine string // the versioned machine type of the alias q35, such as pc-q35-7.2

	// CPUModels are the sorted names of the CPU models of which the accelerator supports every feature.
	CPUModels []string
	// RBD is true if QEMU has the block driver rbd, which may be a module that is not installed.
	RBD bool
}

func queryQEMU(ctx context.Context, name string, accel Kind) (QEMU, error) {
	if name == "" {
		name = DefaultQEMU
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return QEMU{}, fmt.Errorf("find QEMU: %w", err)
	}
	if path, err = filepath.Abs(path); err != nil {
		return QEMU{}, fmt.Errorf("find QEMU: %w", err)
	}
	q := QEMU{Path: path}
	if q.Version, err = version(ctx, path); err != nil {
		return QEMU{}, fmt.Errorf("ask %s for its version: %w", path, err)
	}
	if err := q.inspect(ctx, accel); err != nil {
		return QEMU{}, fmt.Errorf("ask %s what it offers under %s: %w", path, accel, err)
	}
	return q, nil
}

func version(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, qmpTimeout)
	defer cancel()
	var out head
	cmd := command(ctx, path, "--version")
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil { // ctx's error replaces that of the signal that killed the process
			err = ctx.Err()
		}
		return "", err
	}
	return parseVersion(out.String())
}

var versionLine = regexp.MustCompile(`^QEMU emulator version (\d+(?:\.\d+)+)`)

func parseVersion(out string) (string, error) {
	m := versionLine.FindStringSubmatch(out)
	if m == nil {
		line, _, _ := strings.Cut(out, "\n")
		return "", fmt.Errorf("it answers %.80q", line)
	}
	return m[1], nil
}

// inspect starts a QEMU without a machine, and sets q.Machine and q.CPUModels from its machine types and its CPU models
// under accel. The QMP monitor is one end of a socket pair, so that there is no socket file.
func (q *QEMU) inspect(ctx context.Context, accel Kind) (err error) {
	ctx, cancel := context.WithTimeout(ctx, qmpTimeout)
	defer cancel()
	agentEnd, qemuEnd, err := socketPair()
	if err != nil {
		return err
	}
	defer agentEnd.Close()

	var output head
	cmd := command(ctx, q.Path, "-machine", "none", "-accel", string(accel), "-nodefaults", "-no-user-config", "-display", "none", "-S",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control")
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.ExtraFiles = []*os.File{qemuEnd} // becomes descriptor 3
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	runtime.LockOSThread() // Pdeathsig is sent when the parent thread exits, not the process
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	qemuEnd.Close()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			cancel() // kills the process
		}
		if waitErr := cmd.Wait(); err == nil && waitErr != nil {
			err = waitErr
		}
		if line, _, _ := strings.Cut(output.String(), "\n"); err != nil && line != "" {
			err = fmt.Errorf("%w; it says %.200q", err, line)
		}
	}()
	c, err := qmp.New(ctx, agentEnd)
	if err != nil {
		return err
	}
	defer c.Close()
	monitor := raw.NewMonitor(c.With(ctx))
	machines, err := monitor.QueryMachines()
	if err != nil {
		return err
	}
	if q.Machine, err = resolve(machines, machineAlias); err != nil {
		return err
	}
	models, err := monitor.QueryCPUDefinitions()
	if err != nil {
		return err
	}
	q.CPUModels = supportedModels(models)
	if q.RBD, err = hasRBD(ctx, c); err != nil {
		return err
	}
	return monitor.Quit()
}

// hasRBD reports whether QEMU has the block driver rbd. It tries to add a block node whose key does not exist. The
// driver refuses such a node before it connects to a cluster. QEMU's QMP schema cannot be used for this check, because
// it also lists drivers whose module is not installed.
func hasRBD(ctx context.Context, c *qmp.Conn) (bool, error) {
	node := map[string]any{"driver": "rbd", "node-name": "probe", "pool": "probe", "image": "probe", "user": "probe", "key-secret": "missing"}
	err := c.Do(ctx, "blockdev-add", node, nil)
	var refusal *qmp.Error
	if !errors.As(err, &refusal) {
		return false, err
	}
	return strings.Contains(refusal.Desc, "No secret with id"), nil
}

// resolve returns the versioned machine type that alias names. The agent stores the versioned type of each VM, because
// the meaning of the alias changes with an upgrade of QEMU.
func resolve(machines []raw.MachineInfo, alias string) (string, error) {
	for _, m := range machines {
		if m.Alias != nil && *m.Alias == alias {
			return m.Name, nil
		}
	}
	return "", fmt.Errorf("it has no machine type %s", alias)
}

// supportedModels returns the sorted names of the models of which the accelerator supports every feature. QEMU omits
// UnavailableFeatures for a model that it cannot check.
func supportedModels(models []raw.CPUDefinitionInfo) []string {
	names := []string{}
	for _, m := range models {
		if m.UnavailableFeatures != nil && len(m.UnavailableFeatures) == 0 {
			names = append(names, m.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// command returns a command that runs path with a fixed, minimal environment and in its own process group. When ctx
// ends, the whole group is killed. Wait then returns within a second, even if another process still holds the output
// open.
func command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != unix.ESRCH {
			return err
		}
		return os.ErrProcessDone
	}
	return cmd
}

func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	near, far := os.NewFile(uintptr(fds[0]), "monitor"), os.NewFile(uintptr(fds[1]), "monitor")
	defer near.Close() // FileConn has made a duplicate
	conn, err := net.FileConn(near)
	if err != nil {
		far.Close()
		return nil, nil, fmt.Errorf("use socket pair: %w", err)
	}
	return conn, far, nil
}

// head is an io.Writer that stores the first maxOutput bytes and discards the rest. The buffer is not embedded: io.Copy
// would then call the buffer's method ReadFrom, which stores all bytes.
type head struct{ buf bytes.Buffer }

func (h *head) Write(p []byte) (int, error) {
	if free := maxOutput - h.buf.Len(); free > 0 {
		_, _ = h.buf.Write(p[:min(len(p), free)])
	}
	return len(p), nil
}

func (h *head) String() string { return h.buf.String() }
