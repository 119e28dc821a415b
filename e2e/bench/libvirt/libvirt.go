// Package libvirt runs a second libvirt beside any libvirt of the host, to compare Trivet with it. Its configuration,
// state and sockets are on tmpfs in the mount namespace of the caller, and end with that namespace.
//
// It is Debian's libvirt with the default configuration, except that QEMU runs as root and without a security driver,
// because the host may have no systemd and no security module. That reduces libvirt's work, so it does not favour
// Trivet.
//
// The caller must run as root in its own mount namespace and call [Mount] before [Start].
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

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// dirs lists the directories that libvirt uses; Mount mounts a tmpfs over each.
var dirs = []string{"/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"}

// Prepare creates the directories of dirs that do not exist, so that Mount can mount over them. The function undo
// removes the directories that Prepare has created. Prepare must be called in the host's mount namespace, not in the
// one in which Mount is called.
func Prepare() (undo func(), err error) {
	var made []string
	undo = func() {
		for _, dir := range made {
			_ = os.Remove(dir) // the error, if it has content from others, is ignored
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
	// libvirt creates a cgroup `machine` for all of its guests and does not remove it. If there is no such cgroup yet,
	// let undo remove it.
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

// Mount mounts a tmpfs over each of libvirt's directories, in this process's mount namespace only.
func Mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, dir := range dirs {
		if err := unix.Mount("trivet-bench", dir, "tmpfs", 0, "size=64m,mode=755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	// libvirt requires the user and group libvirt-qemu even if QEMU runs as root: add them if the host has none.
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

// Daemon is a running virtlogd and libvirtd.
type Daemon struct {
	dir   string
	procs []*exec.Cmd
	logs  []*os.File
}

const settings = `user = "root"
group = "root"
security_driver = "none"
`

// daemonSettings is a format string; its argument is the UUID of the host. libvirt refuses to migrate guests between
// hosts with the same UUID.
const daemonSettings = `host_uuid = "%s"
`

// startWithin is the timeout of Start. libvirtd runs QEMU to query its capabilities before it serves.
const startWithin = time.Minute

// Start starts virtlogd and libvirtd and waits until virsh can connect. Their logs are written to dir.
func Start(ctx context.Context, dir string) (*Daemon, error) {
	if err := os.WriteFile("/etc/libvirt/qemu.conf", []byte(settings), 0o644); err != nil {
		return nil, err
	}
	daemon := fmt.Sprintf(daemonSettings, uuid.NewString())
	if err := os.WriteFile("/etc/libvirt/libvirtd.conf", []byte(daemon), 0o644); err != nil {
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

// said returns the last 1000 bytes of libvirtd's log.
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
	// The default pid files are not in the directories that Mount has mounted.
	cmd := exec.Command("/usr/sbin/"+name, "--pid-file", "/run/libvirt/trivet-bench-"+name+".pid")
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

// Create starts a transient domain (guest) from an XML file with `virsh create`.
func (d *Daemon) Create(ctx context.Context, file string) error { return d.virsh(ctx, "create", file) }

// PID returns the pid of the QEMU process of the domain with that name, or 0 if the domain does not run.
func (d *Daemon) PID(name string) int {
	text, err := os.ReadFile(filepath.Join("/run/libvirt/qemu", name+".pid"))
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid
}

// Destroy forces the domain with that name off, with `virsh destroy`.
func (d *Daemon) Destroy(ctx context.Context, name string) error {
	return d.virsh(ctx, "destroy", name)
}

// Close stops libvirtd and virtlogd. All domains must have been destroyed before.
func (d *Daemon) Close() error {
	var errs []error
	for i := len(d.procs) - 1; i >= 0; i-- {
		p := d.procs[i]
		_ = p.Process.Signal(syscall.SIGTERM)
		cut := time.AfterFunc(10*time.Second, func() { _ = p.Process.Kill() })
		_ = p.Wait() // its error, if any, only reports the signal
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
