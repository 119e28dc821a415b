package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestConfinement(t *testing.T) {
	l := newLab(t)
	leak, err := os.Open("/etc/hostname") // the agent has files open that are nobody's business
	require.NoError(t, err)
	defer leak.Close()
	p := l.boot()
	pid := p.record.PID

	status := map[string]string{}
	for line := range strings.Lines(proc(t, pid, "status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.Join(strings.Fields(value), " ")
	}
	uid := fmt.Sprint(l.home.UID())
	require.GreaterOrEqual(t, l.home.UID(), FirstUID)
	four := strings.Join([]string{uid, uid, uid, uid}, " ")
	none := "0000000000000000"
	for key, want := range map[string]string{"Uid": four, "Gid": four, "Groups": "", "CapInh": none, "CapPrm": none, "CapEff": none,
		"CapAmb": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2", "NSsid": fmt.Sprint(pid)} {
		require.Equal(t, want, status[key], key)
	}
	ignored, err := strconv.ParseUint(status["SigIgn"], 16, 64)
	require.NoError(t, err)
	require.NotZero(t, ignored&(1<<(unix.SIGXFSZ-1)), "a write beyond the file size limit must not end QEMU")
	require.Empty(t, proc(t, pid, "environ"))
	require.Contains(t, proc(t, pid, "limits"), "Max core file size        0                    0")
	require.Regexp(t, `Max file size +1207959552 +1207959552 +bytes`, proc(t, pid, "limits")) // the disk's 1 GiB, its 16th and 64 MiB
	require.Equal(t, "200\n", proc(t, pid, "oom_score_adj"))

	// Its groups are its own, and no two of its namespaces are ours.
	groups := 0
	for line := range strings.Lines(proc(t, pid, "cgroup")) {
		if strings.HasSuffix(strings.TrimSpace(line), "/"+vmID) {
			groups++
		}
	}
	require.GreaterOrEqual(t, groups, len(l.launcher.Cgroups.Entries(vmID)))
	limits := 0
	for _, entry := range l.launcher.Cgroups.Entries(vmID) {
		for file, want := range map[string]uint64{"memory.limit_in_bytes": 64<<20 + spec().Overhead(), "memory.max": 64<<20 + spec().Overhead(),
			"cpu.cfs_quota_us": 100_000, "pids.max": 201} {
			text, err := os.ReadFile(filepath.Join(filepath.Dir(entry), file))
			if err == nil {
				limits++
				require.Equal(t, fmt.Sprint(want), strings.TrimSpace(string(text)), file)
			}
		}
	}
	require.GreaterOrEqual(t, limits, 2)
	for _, ns := range []string{"mnt", "net", "ipc", "uts"} {
		ours, err := os.Readlink("/proc/self/ns/" + ns)
		require.NoError(t, err)
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		require.NoError(t, err)
		require.NotEqual(t, ours, theirs)
	}
	devices := strings.Split(strings.TrimSpace(proc(t, pid, "net/dev")), "\n")
	require.Len(t, devices, 3, "two lines of heading, and lo")

	// All it sees of the host is what it is made of: nothing of it can be written, and no data executed.
	for line := range strings.Lines(proc(t, pid, "mountinfo")) {
		fields := strings.Fields(line)
		at, options := fields[4], strings.Split(fields[5], ",")
		require.Subset(t, options, []string{"ro", "nosuid"}, line)
		if at != "/" {
			require.Contains(t, options, "nodev", line)
		}
		if code := strings.HasPrefix(at, "/usr/lib") || strings.HasPrefix(at, "/lib") || at == l.launcher.Program; !code {
			require.Contains(t, options, "noexec", line)
		}
	}
	var seen []string
	root := fmt.Sprintf("/proc/%d/root", pid)
	for _, dir := range []string{"/", "/dev", "/usr", "/usr/bin"} {
		entries, err := os.ReadDir(root + dir)
		require.NoError(t, err)
		for _, e := range entries {
			seen = append(seen, filepath.Join(dir, e.Name()))
		}
	}
	require.Subset(t, []string{"/dev", "/dev/null", "/dev/urandom", "/dev/zero", "/lib", "/lib64", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64",
		"/usr/share", "/usr/bin/" + filepath.Base(l.launcher.Program)}, seen)
	shared, err := os.ReadDir(root + "/usr/share")
	require.NoError(t, err)
	for _, e := range shared {
		require.Contains(t, dataDirs, "/usr/share/"+e.Name())
	}
	for _, file := range []string{"/new-file", "/usr/new-file", "/usr/lib/new-file", "/usr/share/qemu/new-file"} {
		require.ErrorIs(t, os.WriteFile(root+file, nil, 0o600), unix.EROFS, file)
	}

	// Every file it has open is one that it was given.
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		require.NoError(t, err)
		known := to == "/dev/null" || strings.HasPrefix(to, "anon_inode:") || strings.HasPrefix(to, "socket:") ||
			slices.Contains([]string{"console.log", "stderr.log", "image", "overlay"}, filepath.Base(to))
		require.True(t, known, "%s -> %s", fd.Name(), to)
	}

	st, err := os.Stat(l.home.dir)
	require.NoError(t, err)
	require.EqualValues(t, 0o700, st.Mode().Perm())
	require.NoError(t, p.PowerOff(l.ctx))
}
