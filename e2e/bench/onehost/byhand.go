package onehost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Record holds the fields that benchmarks read of record.json, the file in which an agent describes the last start of a
// VM.
type Record struct {
	Spec struct{ Machine string }
	Argv []string
	PID  int
}

// Record reads the record of the last start of a VM.
func (c *Cloud) Record(id string) (r Record, err error) {
	text, err := os.ReadFile(filepath.Join(c.VMDir(id), "record.json"))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(text, &r)
}

// AwaitState waits until a VM of the project default is in the given state, for at most BootWithin.
func (c *Cloud) AwaitState(ctx context.Context, id string, state vmv1.VmState) error {
	ctx, cancel := context.WithTimeout(ctx, BootWithin)
	defer cancel()
	return lab.Until(ctx, fmt.Sprintf("VM %s is %s", id, state), func(ctx context.Context) error {
		vm, err := c.Admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: Org, ProjectId: "default", VmId: id})
		if err == nil && vm.GetState() != state {
			err = fmt.Errorf("it is %s: %s", vm.GetState(), vm.GetStatus().GetLastError())
		}
		return err
	})
}

// Cmdline returns the kernel command line of the small guest in the directory guest, from its file manifest.json.
func Cmdline(guest string) (string, error) {
	text, err := os.ReadFile(filepath.Join(guest, "manifest.json"))
	if err != nil {
		return "", fmt.Errorf("the small guest: %w (make guest)", err)
	}
	var m struct{ Cmdline string }
	if err := json.Unmarshal(text, &m); err != nil {
		return "", fmt.Errorf("read the guest's manifest: %w", err)
	}
	if m.Cmdline == "" {
		return "", errors.New("the guest's manifest has no command line")
	}
	return m.Cmdline, nil
}

// Arguments returns the agent's QEMU arguments for use outside of the agent's sandbox: with the paths of kernel and
// initrd in the directory guest, and without -S and -preconfig, so that QEMU starts the guest without waiting for a
// monitor command. It adds the kernel command line, which the agent passes by QMP, as an argument.
func Arguments(argv []string, guest, cmdline string) []string {
	out := slices.DeleteFunc(slices.Clone(argv), func(a string) bool { return a == "-S" || a == "-preconfig" })
	if cmdline != "" {
		out = append(out, "-append", cmdline)
	}
	for i, a := range out {
		switch a {
		case "/boot/kernel":
			out[i] = filepath.Join(guest, "vmlinuz")
		case "/boot/initrd":
			out[i] = filepath.Join(guest, "initrd.lz4")
		}
	}
	return out
}

// ByHand describes a QEMU that is started with the agent's arguments and the same file descriptors, but as an ordinary
// process of root: without a cgroup or namespaces of its own.
type ByHand struct {
	Argv []string // as Arguments returns them
	// Dir is the directory for the files Log, QMP and Console. A file name in Dir may be long: see Dial.
	Dir string
	// Disks are the files of the disks, in the order of the descriptors in Argv.
	Disks []DiskFile
}

// DiskFile is a file that QEMU inherits.
type DiskFile struct {
	Path     string
	ReadOnly bool
}

// Log returns the path of the log of the serial port.
func (h *ByHand) Log() string { return filepath.Join(h.Dir, "serial") }

// QMP returns the path of the socket of the monitor.
func (h *ByHand) QMP() string { return filepath.Join(h.Dir, "work") }

// Console returns the path of the socket of the serial port.
func (h *ByHand) Console() string { return filepath.Join(h.Dir, "console") }

// Start starts QEMU with an empty log. QEMU is killed when ctx ends. The caller must wait for it.
func (h *ByHand) Start(ctx context.Context) (_ *exec.Cmd, err error) {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, path := range []string{h.QMP(), filepath.Join(h.Dir, "inspect"), h.Console()} {
		f, err := listen(path)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	log, err := os.OpenFile(h.Log(), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	files = append(files, log)
	for _, d := range h.Disks {
		mode := os.O_RDWR
		if d.ReadOnly {
			mode = os.O_RDONLY
		}
		f, err := os.OpenFile(d.Path, mode, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	cmd := exec.CommandContext(ctx, h.Argv[0], h.Argv[1:]...)
	cmd.ExtraFiles = files
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

func listen(path string) (*os.File, error) {
	_ = os.Remove(path) // the previous round left a socket there
	var f *os.File
	err := shortPath(path, func(short string) error {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: short})
		if err != nil {
			return err
		}
		defer l.Close()
		l.SetUnlinkOnClose(false)
		f, err = l.File()
		return err
	})
	return f, err
}

// Dial connects to a unix socket, whose path may be longer than a socket address can be.
func Dial(ctx context.Context, path string) (conn net.Conn, err error) {
	err = shortPath(path, func(short string) error {
		conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "unix", short)
		return err
	})
	return conn, err
}

// shortPath calls do with another path of the same file, through /proc/self/fd. The address of a unix socket holds at
// most 108 bytes, and path may be longer. The other path is valid until do returns.
func shortPath(path string, do func(string) error) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return do(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}
