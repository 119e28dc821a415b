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
	"regexp"
	"slices"
	"strconv"
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
func (h *ByHand) QMP() string { return filepath.Join(h.Dir, "qmp-work") }

// Console returns the path of the socket of the serial port.
func (h *ByHand) Console() string { return filepath.Join(h.Dir, "console") }

// Start starts QEMU with an empty log. QEMU is killed when ctx ends. The caller must wait for it.
func (h *ByHand) Start(ctx context.Context) (_ *exec.Cmd, err error) {
	d, err := parseDescriptors(h.Argv)
	if err != nil {
		return nil, err
	}
	if len(d.disks) != len(h.Disks) {
		return nil, fmt.Errorf("QEMU expects %d files of disks, and there are %d", len(d.disks), len(h.Disks))
	}
	files := make([]*os.File, 1+len(d.sockets)+len(d.disks)) // cmd.ExtraFiles begins at descriptor 3
	defer func() {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}()
	open := func(fd int, open func() (*os.File, error)) error {
		if fd < 3 || fd-3 >= len(files) || files[fd-3] != nil {
			return fmt.Errorf("the descriptors in QEMU's arguments are not 3 to %d", len(files)+2)
		}
		files[fd-3], err = open()
		return err
	}
	for fd, name := range d.sockets {
		if err := open(fd, func() (*os.File, error) { return listen(filepath.Join(h.Dir, name)) }); err != nil {
			return nil, err
		}
	}
	if err := open(d.log, func() (*os.File, error) {
		return os.OpenFile(h.Log(), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	}); err != nil {
		return nil, err
	}
	for i, fd := range d.disks {
		mode := os.O_RDWR
		if h.Disks[i].ReadOnly {
			mode = os.O_RDONLY
		}
		if err := open(fd, func() (*os.File, error) { return os.OpenFile(h.Disks[i].Path, mode, 0) }); err != nil {
			return nil, err
		}
	}
	cmd := exec.CommandContext(ctx, h.Argv[0], h.Argv[1:]...)
	cmd.ExtraFiles = files
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

// descriptors holds the numbers of the descriptors that QEMU's arguments refer to.
type descriptors struct {
	sockets map[int]string // listening sockets, by number, with the IDs of their character devices
	log     int            // of the serial port
	disks   []int          // ascending
}

var (
	socketPattern = regexp.MustCompile(`^socket,id=([a-z-]+),fd=([0-9]+),`)
	filePattern   = regexp.MustCompile(`^fd=([0-9]+),set=[0-9]+,opaque=(.+)$`)
)

// parseDescriptors reads the numbers from the options -chardev and -add-fd of the agent's QEMU arguments.
func parseDescriptors(argv []string) (d descriptors, err error) {
	d.sockets = map[int]string{}
	for _, arg := range argv {
		if m := socketPattern.FindStringSubmatch(arg); m != nil {
			fd, _ := strconv.Atoi(m[2])
			d.sockets[fd] = m[1]
		}
		m := filePattern.FindStringSubmatch(arg)
		if m == nil {
			continue
		}
		fd, _ := strconv.Atoi(m[1])
		if m[2] == "console" {
			d.log = fd
		} else {
			d.disks = append(d.disks, fd)
		}
	}
	slices.Sort(d.disks)
	if len(d.sockets) == 0 || d.log == 0 {
		return d, errors.New("QEMU's arguments have no descriptors of sockets or of the serial log")
	}
	return d, nil
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
