// Package libvirt runs a libvirt of its own beside whatever the host has, for a comparison: its configuration, state and
// sockets lie in memory in the mount namespace of the caller, and end with it.
//
// It is libvirt as Debian has it, but for what a host without systemd and without a security module needs: QEMU runs as
// root, with no security driver. That spares libvirt work and so does not favour us.
//
// The caller must live in a mount namespace of its own in which nothing propagates, as root; see [Mount].
package libvirt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dirs are where libvirt keeps everything.
var dirs = []string{"/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"}

// Prepare makes the directories that are missing, so that something can be mounted over them, and says how to remove
// those that it made. Call it outside of the mount namespace.
func Prepare() (undo func(), err error) {
	var made []string
	undo = func() {
		for _, dir := range made {
			_ = os.Remove(dir) // only when it is still empty
		}
	}
	for _, dir := range dirs {
		err := os.Mkdir(dir, 0o755)
		if err == nil {
			made = append(made, dir)
		} else if !errors.Is(err, fs.ErrExist) {
			undo()
			return nil, err
		}
	}
	// libvirt makes a group of this name for all of its machines, and leaves it.
	groups, err := filepath.Glob("/sys/fs/cgroup/*")
	if err != nil {
		return nil, err
	}
	for _, g := range append(groups, "/sys/fs/cgroup") {
		if _, err := os.Stat(filepath.Join(g, "machine")); errors.Is(err, fs.ErrNotExist) {
			made = append(made, filepath.Join(g, "machine"))
		}
	}
	return undo, nil
}

// Mount covers libvirt's directories with memory, for this mount namespace alone.
func Mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, dir := range dirs {
		if err := unix.Mount("trivet-bench", dir, "tmpfs", 0, "size=64m,mode=755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	// libvirt wants its user to exist, also when QEMU is not to run under it.
	for path, line := range map[string]string{
		"/etc/passwd": "libvirt-qemu:x:65533:65533::/:/usr/sbin/nologin\n", "/etc/group": "libvirt-qemu:x:65533:\n",
	} {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if bytes.Contains(text, []byte("\nlibvirt-qemu:")) {
			continue
		}
		own := filepath.Join("/run/libvirt", filepath.Base(path))
		if err := os.WriteFile(own, append(text, line...), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
	}
	return nil
}

// Daemon is a libvirt that runs.
type Daemon struct {
	dir   string
	procs []*exec.Cmd
	logs  []*os.File
}

const settings = `user = "root"
group = "root"
security_driver = "none"
`

// startWithin bounds the start, in which libvirt asks QEMU what it can do.
const startWithin = time.Minute

// Start starts virtlogd and libvirtd and waits until virsh gets an answer. dir takes their logs and the domains' files.
func Start(ctx context.Context, dir string) (*Daemon, error) {
	if err := os.WriteFile("/etc/libvirt/qemu.conf", []byte(settings), 0o644); err != nil {
		return nil, err
	}
	d := &Daemon{dir: dir}
	for _, name := range []string{"virtlogd", "libvirtd"} {
		if err := d.run(name); err != nil {
			return nil, errors.Join(err, d.Close())
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	for {
		err := d.virsh(ctx, "list")
		if err == nil {
			return d, nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for libvirtd: %w\n%s", err, d.said()), d.Close())
		}
	}
}

// said is the end of libvirtd's log.
func (d *Daemon) said() []byte {
	text, _ := os.ReadFile(filepath.Join(d.dir, "libvirtd.log"))
	return text[max(0, len(text)-1000):]
}

func (d *Daemon) run(name string) error {
	log, err := os.Create(filepath.Join(d.dir, name+".log"))
	if err != nil {
		return err
	}
	d.logs = append(d.logs, log)
	cmd := exec.Command("/usr/sbin/" + name)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	d.procs = append(d.procs, cmd)
	return nil
}

func (d *Daemon) virsh(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "virsh", append([]string{"-q", "-c", "qemu:///system"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("virsh %s: %w: %s", args[0], err, out)
	}
	return nil
}

// Create defines a transient domain out of a file of XML and starts it: `virsh create`.
func (d *Daemon) Create(ctx context.Context, file string) error { return d.virsh(ctx, "create", file) }

// PID is the QEMU of a domain that runs; 0 when there is none.
func (d *Daemon) PID(name string) int {
	text, err := os.ReadFile(filepath.Join("/run/libvirt/qemu", name+".pid"))
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid
}

// Destroy cuts a domain.
func (d *Daemon) Destroy(ctx context.Context, name string) error {
	return d.virsh(ctx, "destroy", name)
}

// Close ends both daemons, by their pids. Domains must have been destroyed.
func (d *Daemon) Close() error {
	var errs []error
	for i := len(d.procs) - 1; i >= 0; i-- {
		p := d.procs[i]
		_ = p.Process.Signal(syscall.SIGTERM)
		cut := time.AfterFunc(10*time.Second, func() { _ = p.Process.Kill() })
		_ = p.Wait() // it ends by the signal
		if !cut.Stop() {
			errs = append(errs, fmt.Errorf("%s did not end and was killed", p.Path))
		}
	}
	for _, f := range d.logs {
		errs = append(errs, f.Close())
	}
	d.procs, d.logs = nil, nil
	return errors.Join(errs...)
}
