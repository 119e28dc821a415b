package qemu

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

// TestFileSizeLimit checks that QEMU continues to run when writes beyond the file size limit fail. The writes here are
// output of the guest to a console log that has reached the limit.
func TestFileSizeLimit(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	p := l.launch(s, files)
	require.Regexp(t, fmt.Sprintf(`Max file size +%d +%[1]d +bytes`, files.fileSizeLimit()), proc(t, p.record.PID, "limits"))
	log := l.home.Console()
	require.NoError(t, os.Truncate(log.Path(), int64(files.fileSizeLimit())))
	socket, err := net.Dial("unix", socketPath(p.dir, consoleSocket))
	require.NoError(t, err)
	defer socket.Close()
	require.NoError(t, p.Resume(l.ctx))
	reader, deadline := bufio.NewReader(socket), time.Now().Add(40*time.Second)
	require.NoError(t, socket.SetReadDeadline(deadline))
	for line := ""; !strings.HasSuffix(line, "GUEST UP\n"); {
		line, err = reader.ReadString('\n')
		require.NoError(t, err)
	}
	length, err := log.Length()
	require.NoError(t, err)
	require.LessOrEqual(t, length, int64(files.fileSizeLimit()))
	go func() { _, _ = io.Copy(io.Discard, reader) }()
	require.NoError(t, p.PressPowerButton(l.ctx))
	require.Equal(t, exitRequested, l.exited(p))
}

func TestLimitFollowsTheDisks(t *testing.T) {
	require.EqualValues(t, 1<<30, Files{}.fileSizeLimit(), "the limit without a disk must leave room for logs")
	two := Files{Disks: map[string]Layers{"a": {Size: 1 << 30}, "b": {Size: 160 << 30}}}
	require.EqualValues(t, 170<<30+64<<20, two.fileSizeLimit())
}

// TestLogFloodEndsQEMU checks that a QEMU that writes too fast to one of its logs is killed, and that its exit is
// recorded as exitFlooded.
func TestLogFloodEndsQEMU(t *testing.T) {
	for _, name := range []string{"console.log", "stderr.log"} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			p := l.boot()
			// The test writes to the log in place of QEMU, with the same open flags.
			f, err := os.OpenFile(l.home.path(name), os.O_WRONLY|os.O_APPEND, 0)
			require.NoError(t, err)
			defer f.Close()
			piece := make([]byte, 4<<20)
			for range 32 {
				_, err := f.Write(piece)
				require.NoError(t, err)
			}
			require.Equal(t, exitFlooded, l.exited(p))
			require.Equal(t, exitFlooded, l.gone())
		})
	}
}

// TestFloods checks which growth of a log, in bytes and seconds, counts as a flood.
func TestFloods(t *testing.T) {
	at := time.Now()
	for _, c := range []struct {
		grown   int64
		seconds int
		floods  bool
	}{
		{5 << 20, 5, false}, // less than floodBytes
		{floodBytes + 1, 5, true},
		{floodBytes + 1, 60, false}, // the agent did not run for a minute
		{floodRate*60 + 1, 60, true},
		{-1 << 30, 5, false}, // Trim removed the beginning of the file
	} {
		now := growth{1<<30 + c.grown, at.Add(time.Duration(c.seconds) * time.Second)}
		require.Equal(t, c.floods, growth{1 << 30, at}.floods(now), "%v", c)
		require.False(t, growth{}.floods(now), "growth from an unknown length must not count as a flood")
	}
}

// TestAdoptUnconfigured checks that Resume passes the kernel's command line to an adopted QEMU whose agent ended after
// it started QEMU and before it called configure.
func TestAdoptUnconfigured(t *testing.T) {
	l := newLab(t)
	s, files := l.kernel()
	argv, err := Argv(l.launcher.Program, s)
	require.NoError(t, err)
	boot, err := bootID()
	require.NoError(t, err)
	r := Record{Spec: s, Argv: argv, BootID: boot}
	require.NoError(t, l.home.begin(r))
	require.NoError(t, l.launcher.Cgroups.Create(vmID, cgroup.Limits{CPUs: 1, Memory: s.MemoryMiB<<20 + s.Overhead(), Tasks: s.tasks(false)}))
	own, err := l.home.open()
	require.NoError(t, err)
	pl := plan{Cgroups: l.launcher.Cgroups.Entries(vmID), UID: l.home.uid, Root: l.home.dir, Tasks: s.tasks(false), FileBytes: files.fileSizeLimit(),
		Files: map[string]string{kernelPath: files.Kernel.Name(), initrdPath: files.Initrd.Name()}, Argv: argv}
	pl.RootFS, err = findRootFS(l.launcher.Program)
	require.NoError(t, err)
	pidfd, err := l.launcher.startLauncher(l.ctx, l.launcher.guest(l.home, &r), pl, own)
	require.NoError(t, err)
	closeAll(own...)
	require.NoError(t, unix.Close(pidfd))

	p := l.adopt()
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.Equal(t, "prelaunch", status.State)
	require.NoError(t, p.Resume(l.ctx))
	require.Equal(t, Guest, l.exited(p).Reason)
	l.says("KERNEL [" + s.Cmdline + "] INITRD 00001234\n")
}

// TestRootFS checks that QEMU runs if its path is a symbolic link, and that findRootFS refuses a path outside of /usr.
func TestRootFS(t *testing.T) {
	l := newLab(t)
	link := "/usr/local/bin/trivet-test-qemu-" + fmt.Sprint(os.Getpid())
	require.NoError(t, os.Symlink(l.launcher.Program, link))
	t.Cleanup(func() { _ = os.Remove(link) })
	l.launcher.Program = link
	p := l.boot()
	require.True(t, strings.HasPrefix(proc(t, p.record.PID, "cmdline"), link+"\x00"))
	require.NoError(t, p.PowerOff(l.ctx))
	for _, path := range []string{"/etc/hostname", t.TempDir()} {
		_, err := findRootFS(path)
		require.ErrorContains(t, err, "under /usr")
	}
	_, err := findRootFS("/usr/bin/nowhere")
	require.ErrorIs(t, err, os.ErrNotExist)
}
