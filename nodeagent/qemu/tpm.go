package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// tpmMemory is the memory in bytes that swtpm may need, in addition to Spec.Overhead.
	tpmMemory = 32 << 20
	// tpmTasks is the maximum number of threads of swtpm.
	tpmTasks = 4
	// tpmFileBytes is swtpm's file size limit in bytes. The state of a TPM has a few KiB.
	tpmFileBytes = 1 << 20
	// tpmStatePath is the directory of the TPM's state in swtpm's own mount namespace.
	tpmStatePath = "/state"
	// tpmStateFile is the file of the permanent state in this directory. swtpm makes it at the first start of the TPM.
	tpmStateFile = "tpm2-00.permall"
	// fdTPM is the number of swtpm's descriptor of the socket to QEMU.
	fdTPM = 3
)

// TPMProcess identifies the process of a VM's TPM: its pid and its start time (see Record.StartTime).
type TPMProcess struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
}

// tpmDir returns the directory of the VM's TPM:
//
//	uid    the uid and gid of swtpm
//	state/ the state of the TPM, owned by this uid
//	root/  an empty directory, on which swtpm's root file system is mounted
//	log    swtpm's standard error
func (h *Home) tpmDir(elements ...string) string {
	return filepath.Join(append([]string{h.dir, "tpm"}, elements...)...)
}

// tpmUID returns the uid of the VM's TPM, or 0 if the VM never had a TPM.
func (h *Home) tpmUID() (int, error) {
	text, err := os.ReadFile(h.tpmDir("uid"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	uid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || uid < 1000 {
		return 0, fmt.Errorf("%s does not contain a valid uid", h.tpmDir("uid"))
	}
	return uid, nil
}

// claimTPM creates the directory of the VM's TPM if needed, and returns the uid of swtpm. This uid differs from that of
// QEMU. An attacker who controls QEMU therefore has no access to the files of the TPM's state. Such an attacker can
// use the TPM and, like a migration, read its state through swtpm.
func (h *Home) claimTPM() (uid int, err error) {
	h.homes.mu.Lock()
	defer h.homes.mu.Unlock()
	if uid, err = h.tpmUID(); err != nil {
		return 0, err
	}
	if uid == 0 {
		if uid, err = h.homes.freeUID(h.id); err != nil {
			return 0, err
		}
		if err := os.MkdirAll(h.tpmDir(), 0o700); err != nil {
			return 0, err
		}
		if err := atomicfile.WriteFile(h.tpmDir("uid"), []byte(strconv.Itoa(uid)+"\n"), 0o600); err != nil {
			return 0, err
		}
	}
	if mutant.On(mutant.ShareTPMUser) {
		uid = h.uid
	}
	for _, dir := range []string{"state", "root"} {
		if err := os.Mkdir(h.tpmDir(dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return 0, err
		}
	}
	return uid, os.Chown(h.tpmDir("state"), uid, uid)
}

// startTPM starts swtpm, writes its pid to the record r, and returns QEMU's end of the socket to swtpm, and the pidfd of
// swtpm. swtpm ends when this socket is closed, or when the processes of the VM's control group are killed. The caller
// must close both.
func (l *Launcher) startTPM(ctx context.Context, home *Home, r *Record) (socket *os.File, pidfd int, err error) {
	uid, err := home.claimTPM()
	if err == nil && r.Incoming {
		err = home.clearTPM()
	}
	if err != nil {
		return nil, 0, fmt.Errorf("make directory of TPM: %w", err)
	}
	root, err := findRootFS(l.SWTPM)
	if err != nil {
		return nil, 0, err
	}
	root.Data = nil
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, os.NewSyscallError("socketpair", err)
	}
	qemuEnd, tpmEnd := os.NewFile(uintptr(fds[0]), "TPM"), os.NewFile(uintptr(fds[1]), "TPM")
	defer closeAll(tpmEnd)
	pl := plan{Cgroups: l.Cgroups.Entries(home.id), UID: uid, Root: home.tpmDir("root"), RootFS: root, Tasks: tpmTasks,
		FileBytes: tpmFileBytes, Writable: map[string]string{tpmStatePath: home.tpmDir("state")}, Argv: []string{
			l.SWTPM, "socket", "--tpm2", "--tpmstate", "dir=" + tpmStatePath + ",mode=0600",
			"--ctrl", fmt.Sprintf("type=unixio,clientfd=%d", fdTPM), "--terminate"}}
	c := child{log: console.At(home.tpmDir("log"), console.KeepStderr), isolated: true, record: func(pid int, start uint64) error {
		r.TPM = &TPMProcess{PID: pid, StartTime: start}
		return home.write("record.json", r)
	}}
	pidfd, err = l.startLauncher(ctx, c, pl, []*os.File{tpmEnd})
	if err != nil {
		closeAll(qemuEnd)
		return nil, 0, fmt.Errorf("start TPM: %w", err)
	}
	return qemuEnd, pidfd, nil
}

// endTPM kills a swtpm whose QEMU could not be started, and collects its exit status, unless that has been done. It waits
// for at most killTimeout, and closes pidfd.
func endTPM(pidfd int) {
	_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(killTimeout.Milliseconds()))
	reapPIDFD(pidfd)
	_ = unix.Close(pidfd)
}

// tpm adds the TPM. The parameter fd is the descriptor of the socket to swtpm.
func (a *args) tpm(fd int) {
	a.add("-chardev", fmt.Sprintf("socket,id=tpm,fd=%d", fd))
	a.add("-tpmdev", "emulator,id=tpm-backend,chardev=tpm")
	a.json("-device", object{"driver": "tpm-crb", "id": "tpm", "tpmdev": "tpm-backend"})
}

// openTPM returns a pidfd of the process of the VM's TPM. The error wraps fs.ErrNotExist if the process has ended.
func (h *Home) openTPM(t *TPMProcess) (*os.File, error) {
	pidfd, err := unix.PidfdOpen(t.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	// The start time is read after the pidfd was opened, so that both belong to the same process.
	began, err := startTime(t.PID)
	if err == nil && began != t.StartTime {
		err = fs.ErrNotExist
	}
	if err != nil {
		_ = unix.Close(pidfd)
		return nil, err
	}
	return os.NewFile(uintptr(pidfd), "pidfd of TPM"), nil
}

// watchTPM waits until the process of the VM's TPM ends, and then makes TPMLost return true. It returns when p is
// closed.
func (p *Process) watchTPM() {
	if p.tpm != nil {
		if awaitEnd(p.tpm) != nil {
			return // p was closed.
		}
		p.reapTPM()
	}
	p.tpmLost.Store(true)
	p.notify()
}

// TPMLost reports whether the process of the VM's TPM has ended while QEMU runs. The guest then has no usable TPM until
// the VM is stopped and started. The state of the TPM is kept.
func (p *Process) TPMLost() bool { return p.tpmLost.Load() && !p.gone.Load() }

// checkTPM returns errTPMEnded if the VM has a TPM whose process has ended. QEMU cannot migrate the state of such a
// TPM.
func (p *Process) checkTPM() error {
	if p.Record().Spec.TPM && p.TPMLost() && !mutant.On(mutant.MigrateLostTPM) {
		return errTPMEnded
	}
	return nil
}

var errTPMEnded = errors.New("the process of the VM's TPM has ended: stop and start the VM")
