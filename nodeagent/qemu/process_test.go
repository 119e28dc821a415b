package qemu

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// types writes letters to the guest's serial port, and returns the connection. It is closed at the end of the test if
// the caller has not closed it before.
func (l *lab) types(letters string) net.Conn {
	l.Helper()
	dir, err := os.Open(l.home.dir)
	require.NoError(l, err)
	defer dir.Close()
	var c net.Conn
	l.eventually(func() bool { // EAGAIN means that QEMU has not accepted an earlier connection yet.
		c, err = net.Dial("unix", socketPath(dir, consoleSocket))
		return !errors.Is(err, unix.EAGAIN)
	}, "QEMU accepts connections to the serial port")
	require.NoError(l, err)
	l.Cleanup(func() { _ = c.Close() })
	go func() { _, _ = io.Copy(io.Discard, c) }() // a client that does not read stops the guest
	_, err = c.Write([]byte(letters))
	require.NoError(l, err)
	return c
}

func signal(t *testing.T, p *Process, sig unix.Signal) {
	t.Helper()
	require.NoError(t, unix.Kill(p.record.PID, sig))
}

// proc returns the content of a file in /proc/PID. The parameter name is the name of the file.
func proc(t *testing.T, pid int, name string) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	require.NoError(t, err)
	return string(text)
}

func TestExitReasons(t *testing.T) {
	for _, tc := range []struct {
		name   string
		how    func(l *lab, p *Process)
		reason Reason
		says   string
	}{
		{"guest powers off", func(l *lab, _ *Process) { l.types("o") }, Guest, "the guest powered itself off"},
		{"power button", func(l *lab, p *Process) { require.NoError(l, p.PressPowerButton(l.ctx)) }, Requested, "as requested"},
		{"hard power off", func(l *lab, p *Process) { require.NoError(l, p.PowerOff(l.ctx)) }, Requested, "as requested"},
		{"killed by the agent", func(l *lab, p *Process) { require.NoError(l, p.Kill(l.ctx)) }, Requested, "as requested"},
		{"kernel panic", func(l *lab, _ *Process) { l.types("p") }, Crashed, "the guest's kernel panicked"},
		{"killed by another process", func(l *lab, p *Process) { signal(l.T, p, unix.SIGKILL) }, Crashed, "QEMU was ended by signal 9 (killed)"},
		{"SIGTERM from another process", func(l *lab, p *Process) { signal(l.T, p, unix.SIGTERM) }, Crashed, "terminating on signal 15"},
		{"aborted", func(l *lab, p *Process) { signal(l.T, p, unix.SIGABRT) }, Crashed, "signal 6 (aborted)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newLab(t)
			p := l.boot()
			tc.how(l, p)
			exit := l.exited(p)
			require.Equal(t, tc.reason, exit.Reason)
			require.Contains(t, exit.Text, tc.says)
			require.NotContains(t, exit.Text, l.home.dir)

			// The control group is removed, Status fails with ErrExited, and ending the process again is no error.
			names, err := l.launcher.Cgroups.List()
			require.NoError(t, err)
			require.Empty(t, names)
			_, err = p.Status(l.ctx)
			require.ErrorIs(t, err, ErrExited)
			require.NoError(t, p.Kill(l.ctx))
			require.NoError(t, p.PowerOff(l.ctx))

			// Adopt after the end returns the same exit.
			var gone *GoneError
			_, err = l.launcher.Adopt(l.ctx, l.home)
			require.ErrorAs(t, err, &gone)
			require.Equal(t, exit, gone.Exit)
		})
	}
}

func TestStartsAgain(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	l.types("o")
	l.exited(p)
	p.Close()
	again := l.boot()
	require.NotEqual(t, p.record.PID, again.record.PID)
	_, known, err := l.home.Exit()
	require.NoError(t, err)
	require.False(t, known, "the exit of the previous start must not be returned for this one")
	tail, err := l.home.Console().Tail(1 << 20)
	require.NoError(t, err)
	require.GreaterOrEqual(t, strings.Count(string(tail), "GUEST UP\n"), 1, "the console log must contain the output of this start")
	require.FileExists(t, l.home.path("stderr.log.old"))

	_, err = l.launcher.Launch(l.ctx, l.home, spec(), Files{}, 8, "")
	require.ErrorIs(t, err, ErrRunning)
	require.NoError(t, again.PowerOff(l.ctx))
}

func TestControl(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	l.disk(&s, &files, Disk{ID: "data", Bus: Virtio, Slot: -1, Cache: NoCache})
	p := l.launch(s, files)
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.Equal(t, Status{State: "prelaunch"}, status, "the guest must not run before Resume")
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	status, err = p.Status(l.ctx)
	require.NoError(t, err)
	require.Equal(t, Status{State: "running", Running: true}, status)

	require.NoError(t, p.Pause(l.ctx))
	select {
	case <-p.Wake():
	case <-l.ctx.Done():
		t.Fatal("the pause did not cause a value on Wake")
	}
	require.NoError(t, p.Resume(l.ctx))

	l.types("w")
	l.says("W")
	disks, err := p.DiskStats(l.ctx)
	require.NoError(t, err)
	require.Len(t, disks, 2)
	require.Equal(t, "root", disks[0].ID)
	require.GreaterOrEqual(t, disks[0].ReadBytes, uint64(512))
	require.EqualValues(t, 512, disks[0].WriteBytes)
	require.Zero(t, disks[1].WriteBytes)
	usage, err := p.Usage()
	require.NoError(t, err)
	require.Positive(t, usage.CPU)
	require.Greater(t, usage.Memory, uint64(5<<20))

	require.NoError(t, p.Reset(l.ctx))
	l.eventually(func() bool {
		tail, err := l.home.Console().Tail(1 << 20)
		return err == nil && strings.Count(string(tail), "GUEST UP\n") == 2
	}, "the guest prints GUEST UP again after a reset")
	require.Equal(t, Exit{}, p.Exit())
	require.NoError(t, p.PowerOff(l.ctx))
}

// kernel returns a Spec with a kernel, an initrd and a command line, and the open files of both.
func (l *lab) kernel() (Spec, Files) {
	t := l.T
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "kernel"), kernel, 0o444))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "initrd"), make([]byte, 0x1234), 0o444))
	require.NoError(t, os.Chmod(dir, 0o700)) // QEMU's uid has no access to the directory
	s, files := spec(), Files{}
	s.Kernel, s.Initrd, s.Cmdline = true, true, `root=/dev/vda,a=b "quoted" -kernel /etc/shadow`
	var err error
	files.Kernel, err = os.Open(filepath.Join(dir, "kernel"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = files.Kernel.Close() })
	files.Initrd, err = os.Open(filepath.Join(dir, "initrd"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = files.Initrd.Close() })
	return s, files
}

// TestKernel checks that a guest's kernel receives its command line of the maximum length, and that the arguments of
// the QEMU process do not contain it.
func TestKernel(t *testing.T) {
	l := newLab(t)
	s, files := l.kernel()
	s.Cmdline += " secret=" + strings.Repeat("x", maxCmdline-len(s.Cmdline)-8)
	p := l.launch(s, files)
	require.NotContains(t, proc(t, p.record.PID, "cmdline"), "secret")
	require.NotContains(t, proc(t, p.record.PID, "cmdline"), "/dev/vda")
	require.NoError(t, p.Resume(l.ctx))
	require.Equal(t, Guest, l.exited(p).Reason)
	l.says("KERNEL [" + s.Cmdline + "] INITRD 00001234\n")
}

// TestBusesAndCaches checks for each bus that a guest boots from a disk on it and writes to it. The cache modes and
// formats of the base image vary between the buses.
func TestBusesAndCaches(t *testing.T) {
	caches := []Cache{NoCache, Writeback, Writethrough}
	for i, bus := range slices.Sorted(maps.Keys(slots)) {
		t.Run(string(bus), func(t *testing.T) {
			l := newLab(t)
			s, files := spec(), Files{}
			cache, base := caches[i%len(caches)], []qcow2.Format{qcow2.Raw, qcow2.QCOW2}[i%2]
			// The boot disk is not in the first slot: the order in the Spec must decide, not the slot.
			l.disk(&s, &files, Disk{ID: "boot", Bus: bus, Slot: 1, Cache: cache, Base: base})
			l.disk(&s, &files, Disk{ID: "blank", Bus: bus, Slot: -1, Cache: Writethrough})
			l.disk(&s, &files, Disk{ID: "an-id-as-long-as-an-id-may-be-32", Bus: bus, Slot: -1, Cache: NoCache})
			l.disk(&s, &files, Disk{ID: "other-bus", Bus: Virtio, Slot: 9, Cache: Writeback, ReadOnly: true})
			other := files.Disks["other-bus"]
			var err error
			other.Overlay, err = os.Open(other.Overlay.Name())
			require.NoError(t, err)
			defer other.Overlay.Close()
			files.Disks["other-bus"] = other
			p := l.launch(s, files)
			require.NoError(t, p.Resume(l.ctx))
			l.says("GUEST UP\n")
			l.types("w")
			l.says("W")
			require.Equal(t, 0, p.record.Spec.Disks[1].Slot)
			require.Equal(t, 2, p.record.Spec.Disks[2].Slot)

			blocks, err := query(l.ctx, p, (*raw.Monitor).QueryBlock)
			require.NoError(t, err)
			require.Len(t, blocks, 4)
			b := blocks[0].Inserted
			for _, other := range blocks {
				if *other.Inserted.NodeName == s.Disks[0].node() {
					b = other.Inserted
				}
			}
			// The test does not compare b.Cache.Writeback: a guest may turn that off, and SeaBIOS does so with virtio.
			writeCache, err := query(l.ctx, p, func(m *raw.Monitor) (any, error) {
				return m.QomGet("/machine/peripheral/disk-boot", "write-cache")
			})
			require.NoError(t, err)
			require.Equal(t, map[Cache]string{NoCache: "on", Writeback: "on", Writethrough: "off"}[cache], writeCache)
			require.Equal(t, cache == NoCache, b.Cache.Direct)
			require.False(t, b.Cache.NoFlush)
			require.NoError(t, p.PowerOff(l.ctx))

			// The written data is in the overlay, and not in the image.
			overlay := files.Disks["boot"].Overlay.Name()
			out, err := exec.Command("qemu-img", "check", "-f", "qcow2", overlay).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "allocated")
		})
	}
}

// TestDiskError checks that a full file system pauses the guest, that this agent and the next one report the error, and
// that Resume continues the guest after space was freed.
func TestDiskError(t *testing.T) {
	l := newLab(t)
	small := t.TempDir()
	require.NoError(t, unix.Mount("trivet-test", small, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	s, files := l.bootable()
	overlay, err := os.Create(filepath.Join(small, "overlay"))
	require.NoError(t, err)
	_, err = qcow2.Create(overlay, 1<<30)
	require.NoError(t, err)
	files.Disks["root"] = Layers{Overlay: overlay, Base: files.Disks["root"].Base}
	p := l.launch(s, files)
	require.NoError(t, overlay.Close())
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")

	filler := filepath.Join(small, "filler")
	require.Error(t, os.WriteFile(filler, make([]byte, 2<<20), 0o600))
	l.types("w")
	l.eventually(func() bool { return p.LastError() != "" }, "LastError has the disk's error")
	require.Equal(t, "disk root: write error: No space left on device; the guest is stopped", p.LastError())
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.Equal(t, Status{State: "io-error"}, status)

	p.Close()
	p, err = l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	l.eventually(func() bool { return p.LastError() != "" }, "LastError of the next agent has the disk's error")
	require.Contains(t, p.LastError(), "disk root: write error: No space")

	require.NoError(t, os.Remove(filler))
	require.NoError(t, p.Resume(l.ctx))
	require.Empty(t, p.LastError())
	l.says("W")
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestConsoleIsBounded checks that Trim limits the space of the console log of a guest that prints without pause, and
// that the last output stays. The limit here is smaller than the agent's, so that the test is fast.
func TestConsoleIsBounded(t *testing.T) {
	const keep = 64 << 10
	l := newLab(t)
	p := l.boot()
	client := l.types("s")
	l.says("0123456789")
	require.NoError(t, client.Close()) // a slow client would make QEMU log letters twice
	log := console.At(l.home.Console().Path(), keep)
	var st os.FileInfo
	began := time.Now()
	l.eventually(func() bool {
		var err error
		st, err = os.Stat(log.Path())
		return err == nil && st.Size() > 4*keep
	}, "%d bytes of output", 4*keep)
	require.NoError(t, log.Trim())
	now, err := os.Stat(log.Path())
	require.NoError(t, err)
	require.Less(t, now.Sys().(*syscall.Stat_t).Blocks*512, int64(2*keep))
	t.Logf("the guest prints %d KiB/s", int64(float64(st.Size())/1024/time.Since(began).Seconds()))
	tail, err := log.Tail(1 << 20)
	require.NoError(t, err)
	require.Greater(t, len(tail), keep/2)
	require.Equal(t, "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxy", strings.Split(string(tail), "\n")[1])
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestLaunchFails checks that each failed Launch returns an error and no process, and leaves no control group.
func TestLaunchFails(t *testing.T) {
	for _, tc := range []struct {
		name    string
		harm    func(l *lab, s *Spec, f *Files)
		says    string
		invalid bool
	}{
		{"CPU model that the host does not have", func(_ *lab, s *Spec, _ *Files) { s.CPUModel = "EPYC" }, `CPU model "EPYC"`, true},
		{"CPU model with options", func(_ *lab, s *Spec, _ *Files) { s.CPUModel = "max,+vmx" }, "CPU model", true},
		{"another VM's spec", func(_ *lab, s *Spec, _ *Files) { s.ID = strings.Replace(vmID, "a", "b", 1) }, "the spec is of VM", true},
		{"machine that this QEMU does not know", func(_ *lab, s *Spec, _ *Files) { s.Machine = "pc-q35-99.0" }, "unsupported machine type", false},
		{"missing disk file", func(_ *lab, _ *Spec, f *Files) { f.Disks = nil }, "files for disk root", false},
		{"overlay that is opened read-only", func(l *lab, _ *Spec, f *Files) {
			overlay, err := os.Open(f.Disks["root"].Overlay.Name())
			require.NoError(l, err)
			l.Cleanup(func() { _ = overlay.Close() })
			f.Disks["root"] = Layers{Overlay: overlay, Base: f.Disks["root"].Base}
		}, "overlay of disk root is not open for reading and writing", false},
		{"image that is opened for writing", func(l *lab, _ *Spec, f *Files) {
			f.Disks["root"] = Layers{Overlay: f.Disks["root"].Overlay, Base: f.Disks["root"].Overlay}
		}, "image beneath disk root is not open for reading alone", false},
		{"kernel without a file", func(_ *lab, s *Spec, _ *Files) { s.Kernel = true }, "kernel", false},
		{"missing QEMU program", func(l *lab, _ *Spec, _ *Files) { l.launcher.Program = "/usr/bin/qemu-system-none" }, "no such file", false},
		{"QEMU outside of /usr", func(l *lab, _ *Spec, _ *Files) { l.launcher.Program = "/etc/hostname" }, "under /usr", false},
		{"invalid launcher", func(l *lab, _ *Spec, _ *Files) { l.launcher.LauncherCommand = []string{"/bin/true"} }, "", false},
		{"missing launcher", func(l *lab, _ *Spec, _ *Files) { l.launcher.LauncherCommand = []string{"/nonexistent"} }, "start launcher", false},
		{"image that is not QCOW2", func(_ *lab, s *Spec, _ *Files) { s.Disks[0].Base = qcow2.QCOW2 }, "not in qcow2 format", false},
		{"disk that another QEMU writes", func(l *lab, _ *Spec, f *Files) {
			lock := unix.Flock_t{Type: unix.F_WRLCK, Start: 0, Len: 1 << 10}
			other, err := os.OpenFile(f.Disks["root"].Overlay.Name(), os.O_RDWR, 0)
			require.NoError(l, err)
			l.Cleanup(func() { _ = other.Close() })
			require.NoError(l, unix.FcntlFlock(other.Fd(), unix.F_OFD_SETLK, &lock))
		}, "lock", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newLab(t)
			s, files := l.bootable()
			tc.harm(l, &s, &files)
			p, err := l.launcher.Launch(l.ctx, l.home, s, files, 1, "")
			require.Error(t, err)
			require.Nil(t, p)
			require.ErrorContains(t, err, tc.says)
			require.Equal(t, tc.invalid, errors.Is(err, ErrInvalid))
			t.Log(err)
			names, err := l.launcher.Cgroups.List()
			require.NoError(t, err)
			require.Empty(t, names)

			// Adopt then returns that the VM was never started, or that its start failed.
			_, err = l.launcher.Adopt(l.ctx, l.home)
			var gone *GoneError
			if errors.As(err, &gone) {
				require.Equal(t, Crashed, gone.Exit.Reason)
				require.NotContains(t, gone.Exit.Text, "/usr")
			} else {
				require.ErrorIs(t, err, ErrNotStarted)
			}
		})
	}
}

// TestOneImage checks that two guests can boot from the same base image, and that their writes do not change the image.
func TestOneImage(t *testing.T) {
	l, m := newLab(t), newLab(t)
	s, files := l.bootable()
	_, others := m.bootable()
	others.Disks["root"] = Layers{Overlay: others.Disks["root"].Overlay, Base: files.Disks["root"].Base}
	p, q := l.launch(s, files), m.launch(s, others)
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	l.types("w")
	l.says("W")
	require.NoError(t, p.PowerOff(l.ctx))
	require.NoError(t, q.Resume(m.ctx))
	m.says("GUEST UP\n")
	m.types("w")
	m.says("W")
	require.NoError(t, q.PowerOff(m.ctx))
	image, err := os.ReadFile(files.Disks["root"].Base.Name())
	require.NoError(t, err)
	require.Equal(t, append(slices.Clone(guest), make([]byte, 1<<20-len(guest))...), image)
}
