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

// What is written beyond the file size limit is refused, and QEMU lives on without: here, its guest's console.
func TestFileSizeLimit(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	p := l.launch(s, files)
	require.Regexp(t, fmt.Sprintf(`Max file size +%d +%[1]d +bytes`, files.limit()), proc(t, p.record.PID, "limits"))
	log := l.home.Console()
	require.NoError(t, os.Truncate(log.Path(), int64(files.limit())))
	socket, err := net.Dial("unix", socketPath(p.dir, consoleSocket))
	require.NoError(t, err)
	defer socket.Close()
	require.NoError(t, p.Cont(l.ctx))
	said, deadline := bufio.NewReader(socket), time.Now().Add(40*time.Second)
	require.NoError(t, socket.SetReadDeadline(deadline))
	for line := ""; !strings.HasSuffix(line, "GUEST UP\n"); {
		line, err = said.ReadString('\n')
		require.NoError(t, err)
	}
	length, err := log.Length()
	require.NoError(t, err)
	require.LessOrEqual(t, length, int64(files.limit()))
	go func() { _, _ = io.Copy(io.Discard, said) }()
	require.NoError(t, p.Powerdown(l.ctx))
	require.Equal(t, asIntended, l.exited(p))
}

func TestLimitFollowsTheDisks(t *testing.T) {
	require.EqualValues(t, 1<<30, Files{}.limit(), "a QEMU without disks still needs room for its logs")
	two := Files{Disks: map[string]Layers{"a": {Size: 1 << 30}, "b": {Size: 160 << 30}}}
	require.EqualValues(t, 170<<30+64<<20, two.limit())
}

// A QEMU process that an intruder makes write to a log without pause is ended within seconds, and the Exit has the
// reason.
func TestLogFloodEndsQEMU(t *testing.T) {
	for _, name := range []string{"console.log", "stderr.log"} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			p := l.boot()
			// The very file that QEMU holds, as it holds it.
			f, err := os.OpenFile(l.home.path(name), os.O_WRONLY|os.O_APPEND, 0)
			require.NoError(t, err)
			defer f.Close()
			piece := make([]byte, 4<<20)
			for range 32 {
				_, err := f.Write(piece)
				require.NoError(t, err)
			}
			require.Equal(t, flooded, l.exited(p))
			require.Equal(t, flooded, l.gone())
		})
	}
}

// What counts as a flood.
func TestFloods(t *testing.T) {
	at := time.Now()
	for _, c := range []struct {
		grown   int64
		seconds int
		floods  bool
	}{
		{5 << 20, 5, false}, // more than a serial port can
		{floodBytes + 1, 5, true},
		{floodBytes + 1, 60, false}, // the agent was stopped for a minute
		{floodRate*60 + 1, 60, true},
		{-1 << 30, 5, false}, // the file was cut
	} {
		now := growth{1<<30 + c.grown, at.Add(time.Duration(c.seconds) * time.Second)}
		require.Equal(t, c.floods, growth{1 << 30, at}.floods(now), "%v", c)
		require.False(t, growth{}.floods(now), "the length of the log is unknown")
	}
}

// An agent that ends between the start of QEMU and the handing over of the kernel's command line is followed by one that
// does the rest.
func TestAdoptUnconfigured(t *testing.T) {
	l := newLab(t)
	s, files := l.kernel()
	argv, err := Argv(l.host.Program, s)
	require.NoError(t, err)
	boot, err := bootID()
	require.NoError(t, err)
	r := Record{Spec: s, Argv: argv, BootID: boot}
	require.NoError(t, l.home.begin(r))
	require.NoError(t, l.host.Cgroups.Create(vmID, cgroup.Limits{CPUs: 1, Memory: s.MemoryMiB<<20 + s.Overhead(), Tasks: s.tasks()}))
	own, err := l.home.open()
	require.NoError(t, err)
	pl := plan{Cgroups: l.host.Cgroups.Entries(vmID), UID: l.home.uid, Root: l.home.dir, Tasks: s.tasks(), FileBytes: files.limit(),
		Files: map[string]string{kernelPath: files.Kernel.Name(), initrdPath: files.Initrd.Name()}, Argv: argv}
	pl.RootFS, err = findRootFS(l.host.Program)
	require.NoError(t, err)
	pidfd, err := l.host.spawn(l.ctx, l.home, &r, pl, own)
	require.NoError(t, err)
	closeAll(own...)
	require.NoError(t, unix.Close(pidfd))

	p := l.adopt()
	status, err := p.Status(l.ctx)
	require.NoError(t, err)
	require.Equal(t, "prelaunch", status.State)
	require.NoError(t, p.Cont(l.ctx))
	require.Equal(t, Guest, l.exited(p).Reason)
	l.says("KERNEL [" + s.Cmdline + "] INITRD 00001234\n")
}

// QEMU is found, and what it needs is shown, also when its path is a symbolic link; nowhere but under /usr.
func TestRootFS(t *testing.T) {
	l := newLab(t)
	link := "/usr/local/bin/trivet-test-qemu-" + fmt.Sprint(os.Getpid())
	require.NoError(t, os.Symlink(l.host.Program, link))
	t.Cleanup(func() { _ = os.Remove(link) })
	l.host.Program = link
	p := l.boot()
	require.True(t, strings.HasPrefix(proc(t, p.record.PID, "cmdline"), link+"\x00"))
	require.NoError(t, p.Cut(l.ctx))
	for _, path := range []string{"/etc/hostname", t.TempDir()} {
		_, err := findRootFS(path)
		require.ErrorContains(t, err, "under /usr")
	}
	_, err := findRootFS("/usr/bin/nowhere")
	require.ErrorIs(t, err, os.ErrNotExist)
}
