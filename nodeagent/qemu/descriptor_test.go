package qemu

import (
	"io/fs"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// openDescriptors returns the open descriptors of this process: the number of each and the file that it refers to.
func openDescriptors(t *testing.T) map[string]string {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	open := map[string]string{}
	for _, n := range names {
		if target, err := os.Readlink("/proc/self/fd/" + n.Name()); err == nil {
			open[n.Name()] = target
		}
	}
	return open
}

// TestFindProcessClosesItsDescriptor checks that findProcess, when it finds another process than the recorded one,
// closes the descriptor that it opened, and no other one, such as 0: a file of the agent may have that number.
func TestFindProcessClosesItsDescriptor(t *testing.T) {
	l := newLab(t)
	boot, err := bootID()
	require.NoError(t, err)
	began, err := startTime(os.Getpid())
	require.NoError(t, err)
	_, err = unix.FcntlInt(0, unix.F_GETFD, 0)
	require.NoError(t, err, "descriptor 0 must be open")
	for name, c := range map[string]struct {
		record Record
		want   error
	}{
		"another process has the PID": {Record{BootID: boot, PID: os.Getpid(), StartTime: began + 1}, fs.ErrNotExist},
		"another user's process":      {Record{BootID: boot, PID: os.Getpid(), StartTime: began}, errLaunchUnfinished},
	} {
		t.Run(name, func(t *testing.T) {
			before := openDescriptors(t)
			_, err := l.launcher.findProcess(l.home, c.record)
			require.ErrorIs(t, err, c.want)
			require.Equal(t, before, openDescriptors(t))
		})
	}
}

// TestFailedLaunchClosesItsDescriptors checks that a failed Launch closes only the descriptors that it opened, and
// leaves no process.
func TestFailedLaunchClosesItsDescriptors(t *testing.T) {
	l := newLab(t)
	l.launcher.Program = "/usr/lib/os-release" // a file that is no program
	before := openDescriptors(t)
	_, err := l.launcher.Launch(l.ctx, l.home, spec(), Files{}, 1, "test")
	require.Error(t, err)
	t.Log(err)
	require.Equal(t, before, openDescriptors(t))
	procs, err := l.launcher.Cgroups.Procs(vmID)
	require.NoError(t, err)
	require.Empty(t, procs)
}
