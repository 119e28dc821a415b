// Package packaging_test installs, upgrades, removes and purges the Debian packages of this directory in a copy of the
// host's file system, and checks what they contain and what remains.
package packaging_test

import (
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// binaries returns the directory of the built programs: that in the environment variable TRIVET_BIN, or bin.
func binaries(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../bin")
	require.NoError(t, err)
	if named := os.Getenv("TRIVET_BIN"); named != "" {
		dir = named
	}
	if _, err := os.Stat(filepath.Join(dir, "trivet-nodeagent")); err != nil {
		testenv.Skip(t, "the programs are not built: make build")
	}
	return dir
}

// buildPackages writes the packages with a version to a new directory, and returns the paths of the packages.
func buildPackages(t *testing.T, version string) []string {
	t.Helper()
	out := t.TempDir()
	printed, err := exec.Command("./build", binaries(t), out, version).CombinedOutput()
	require.NoError(t, err, "%s", printed)
	packages, err := filepath.Glob(filepath.Join(out, "*.deb"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(packages), 3, "%s", printed)
	return packages
}

// debian is a copy of the host's file system: an overlay, whose changes are in memory, in a mount namespace of its own.
// Its program systemctl records its arguments, and executes /run/at-stop before a stop.
type debian struct {
	t *testing.T
	// pid is the process that keeps the mount namespace.
	pid int
	// upper is the path of the changed files in the mount namespace.
	upper string
}

// setup makes the overlay below the directory $1.
const setup = `set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount -t proc proc "$1/root/proc"
mount --bind /dev "$1/root/dev"
mkdir -p "$1/root/run/systemd/system" "$1/root/packages"
# A policy of the host, such as that of a container, would keep services from being restarted.
rm -f "$1/root/usr/bin/systemctl" "$1/root/usr/sbin/policy-rc.d"
printf '#!/bin/sh\necho "$@" >>/run/calls\nif [ "$1" = is-active ]; then echo active; elif [ "$1" = stop ] && [ -e /run/at-stop ]; then . /run/at-stop; fi\n' >"$1/root/usr/bin/systemctl"
chmod 755 "$1/root/usr/bin/systemctl"
echo ready
read wait || true
`

func newDebian(t *testing.T) *debian {
	t.Helper()
	testenv.NeedRoot(t)
	for _, name := range []string{"dpkg", "unshare", "nsenter", "systemd-sysusers", "systemd-tmpfiles", "man"} {
		testenv.Program(t, name)
	}
	dir := t.TempDir()
	keeper := exec.Command("unshare", "--mount", "bash", "-c", setup, "setup", dir)
	input, err := keeper.StdinPipe()
	require.NoError(t, err)
	output, err := keeper.StdoutPipe()
	require.NoError(t, err)
	var errs strings.Builder
	keeper.Stderr = &errs
	require.NoError(t, keeper.Start())
	t.Cleanup(func() {
		require.NoError(t, input.Close())
		require.NoError(t, keeper.Wait())
	})
	ready := make([]byte, len("ready"))
	_, err = io.ReadFull(output, ready)
	require.NoError(t, err, "%s", errs.String())
	return &debian{t: t, pid: keeper.Process.Pid, upper: filepath.Join(dir, "upper")}
}

// outside returns a command in the mount namespace, but not in the copy.
func (d *debian) outside(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--mount", "--target", strconv.Itoa(d.pid), "--"}, args...)...)
}

// try runs a shell script in the copy, and returns its output and error.
func (d *debian) try(script string) (string, error) {
	cmd := d.outside("chroot", filepath.Join(filepath.Dir(d.upper), "root"), "bash", "-ec", script)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// run runs a shell script in the copy, and returns its output. It must succeed.
func (d *debian) run(script string) string {
	d.t.Helper()
	out, err := d.try(script)
	require.NoError(d.t, err, "%s\n%s", script, out)
	return out
}

// copyIn copies packages into the directory /packages of the copy, and removes those that are there.
func (d *debian) copyIn(packages []string) {
	d.t.Helper()
	d.run("rm -f /packages/*")
	for _, path := range packages {
		f, err := os.Open(path)
		require.NoError(d.t, err)
		cmd := d.outside("chroot", filepath.Join(filepath.Dir(d.upper), "root"), "tee", "/packages/"+filepath.Base(path))
		cmd.Stdin = f
		require.NoError(d.t, cmd.Run())
		require.NoError(d.t, f.Close())
	}
}

// calls returns the calls of systemctl since the last time, a line each.
func (d *debian) calls() string {
	d.t.Helper()
	return d.run("touch /run/calls; cat /run/calls; rm /run/calls")
}

// mode returns the mode, user and group of a file.
func (d *debian) mode(path string) string {
	d.t.Helper()
	return strings.TrimSpace(d.run("stat -c '%a %U:%G' " + path))
}

// TestPackages checks the life of the packages on a host. The parts use the same host one after the other, and end with
// the first that fails.
func TestPackages(t *testing.T) {
	d := newDebian(t)
	part := func(name string, f func(*testing.T)) {
		if !t.Failed() {
			t.Run(name, func(t *testing.T) {
				d.t = t
				f(t)
			})
		}
	}
	older, newer := buildPackages(t, "0.9.0"), buildPackages(t, "0.9.1-rc1+3.g01234567")
	part("install", func(t *testing.T) {
		d.copyIn(older)
		d.run("dpkg -i /packages/*.deb")
		require.Equal(t, "0.9.0", d.run("dpkg-query -W -f '${Version}' trivet-nodeagent"))
		// Nothing is enabled or started.
		require.Regexp(t, `^(--system daemon-reload\n)+$`, d.calls())
		require.Empty(t, d.run("find /etc/systemd/system -name 'trivet*'"))
		require.Equal(t, "750 root:trivet", d.mode("/etc/trivet"))
		require.Equal(t, "640 root:trivet", d.mode("/etc/trivet/controlplane.yaml"))
		require.Equal(t, "600 root:root", d.mode("/etc/trivet/nodeagent.yaml"))
	})
	part("programs, documentation and units", d.checkContents)
	part("upgrade", func(t *testing.T) {
		d.run("echo '# mine' >>/etc/trivet/controlplane.yaml; echo '# mine' >>/etc/trivet/nodeagent.yaml")
		d.run("echo secret >/etc/trivet/join.token; echo secret >/etc/trivet/cluster.key; mkdir -p /var/lib/trivet /var/lib/trivet-agent/vms")
		d.run("ln -s /usr/lib/systemd/system/trivet-nodeagent.service /etc/systemd/system/multi-user.target.wants/")
		d.copyIn(newer)
		d.run("dpkg -i /packages/*.deb")
		require.Equal(t, "0.9.1~rc1+3.g01234567", d.run("dpkg-query -W -f '${Version}' trivet-controlplane"))
		require.Equal(t, "2\n", d.run("cat /etc/trivet/*.yaml | grep -c '# mine'"))
		require.Equal(t, "600 trivet:trivet", d.mode("/etc/trivet/cluster.key"))
		require.Equal(t, "600 root:root", d.mode("/etc/trivet/join.token"))
		calls := strings.Split(strings.TrimSpace(d.calls()), "\n")
		slices.Sort(calls)
		require.Equal(t, []string{
			"--system daemon-reload", "try-restart trivet-controlplane.service", "try-restart trivet-nodeagent.service",
		}, slices.Compact(calls), "no call may concern trivet-guests.service")
	})
	part("no removal of the agent while a guest runs", func(t *testing.T) {
		const groups = "/sys/fs/cgroup/trivet.slice/trivet-guests.service/"
		d.run("mkdir -p " + groups + "_holder " + groups + "vm1; echo 7 >" + groups + "_holder/cgroup.procs; echo 8 >" + groups + "vm1/cgroup.procs")
		out, err := d.try("dpkg -r trivet-nodeagent")
		require.Error(t, err)
		require.Contains(t, out, "VMs run on this host")
		require.Contains(t, d.run("dpkg-query -W -f '${Status}' trivet-nodeagent"), "installed")
		require.NotContains(t, d.calls(), "stop")
		d.run("rm " + groups + "vm1/cgroup.procs")

		d.run("echo 'echo 8 >" + groups + "vm1/cgroup.procs' >/run/at-stop")
		out, err = d.try("dpkg -r trivet-nodeagent")
		require.Error(t, err)
		require.Contains(t, out, "VMs run on this host")
		require.Contains(t, d.calls(), "stop trivet-nodeagent.service\nstart trivet-nodeagent.service\n", "the agent runs again")
		d.run("rm /run/at-stop " + groups + "vm1/cgroup.procs; rmdir " + groups + "vm1")
	})
	part("remove", func(t *testing.T) {
		d.run("dpkg -r $(dpkg-query -W -f '${Package} ' 'trivet*')")
		calls := d.calls()
		for _, want := range []string{"stop trivet-controlplane.service\n", "stop trivet-nodeagent.service\n", "--system kill trivet-guests.service\n"} {
			require.Contains(t, calls, want)
		}
		require.Empty(t, d.run("find /usr -name '*trivet*'"))
		d.run("grep -q '# mine' /etc/trivet/controlplane.yaml; test -e /etc/trivet/cluster.key; test -d /var/lib/trivet-agent/vms")
	})
	part("purge", func(t *testing.T) {
		d.run("dpkg -P trivet trivet-controlplane trivet-nodeagent; if dpkg -s trivet-rbd >/dev/null 2>&1; then dpkg -P trivet-rbd; fi")
		d.run("test ! -e /etc/trivet; test ! -e /var/lib/trivet; test ! -e /var/lib/trivet-agent")
		require.Empty(t, d.remains())
	})
}

// changedByOthers matches the files that dpkg, systemd-sysusers and man-db change, and those of this test.
var changedByOthers = regexp.MustCompile(`^(etc/(passwd|group|shadow|gshadow)-?|etc/\.pwd\.lock|var/lib/dpkg/.*|var/log/.*|var/cache/man/.*|var/cache/ldconfig/.*|` +
	`etc/ld\.so\.cache|run/.*|sys/.*|packages/.*|usr/bin/systemctl|usr/sbin/policy-rc\.d|root/\..*|tmp/.*)$`)

// remains returns the files of the copy that the packages have added or changed.
func (d *debian) remains() (files []string) {
	d.t.Helper()
	out, err := d.outside("find", d.upper, "-mindepth", "1", "!", "-type", "d", "-printf", `%P\n`).CombinedOutput()
	require.NoError(d.t, err, "%s", out)
	for file := range strings.Lines(string(out)) {
		if file = strings.TrimSuffix(file, "\n"); !changedByOthers.MatchString(file) {
			files = append(files, file)
		}
	}
	return files
}

// checkContents checks that the programs run, that the manual pages and completions can be used, and that systemd
// accepts the units.
func (d *debian) checkContents(t *testing.T) {
	require.Regexp(t, `^trivet-controlplane \S+ \(go`, d.run("trivet-controlplane version"))
	require.Regexp(t, `^trivet-nodeagent \S+ \(go`, d.run("trivet-nodeagent --version"))
	require.Regexp(t, `client +trivet +\S+`, d.run("HOME=/root trivet version --client"))
	// Without a setting, the agent says what is missing.
	out, err := d.try("trivet-nodeagent --config /etc/trivet/nodeagent.yaml")
	require.Error(t, err)
	require.Contains(t, out, "controlplane")

	pages := strings.Fields(d.run("dpkg -L trivet trivet-controlplane trivet-nodeagent | grep /man/.*gz"))
	require.Greater(t, len(pages), 20)
	for _, page := range pages {
		require.Regexp(t, `: "(trivet\S*) - .{10,}"`, d.run("lexgrog "+page))
		// Long words, such as URLs, cannot be adjusted to the width.
		require.Empty(t, d.run("man --warnings -l "+page+" 2>&1 >/dev/null | grep -vE 'cannot (adjust|break) line' || true"))
	}
	require.Contains(t, d.run("MANWIDTH=80 man -l /usr/share/man/man1/trivet-vm.1.gz"), "TRIVET VM CREATE")
	require.Contains(t, d.run("source /usr/share/bash-completion/completions/trivet; complete -p trivet"), "trivet")
	require.Contains(t, d.run("head -n 1 /usr/share/zsh/vendor-completions/_trivet"), "#compdef trivet")
	require.Contains(t, d.run("cat /usr/share/fish/vendor_completions.d/trivet.fish"), "complete -c trivet")

	out, err = d.try("cd /usr/lib/systemd/system; systemd-analyze verify --man=no trivet-controlplane.service trivet-nodeagent.service trivet-guests.service trivet.slice 2>&1")
	require.NoError(t, err, "%s", out)
	for line := range strings.Lines(out) {
		if strings.Contains(line, "trivet") {
			require.Contains(t, line, "legacy cgroups", "only the host may be reported") // a host with cgroup v1
		}
	}
}

// TestProgramsAreStatic checks that the programs need no libraries of the host, and that the package trivet-rbd names
// the packages of those that trivet-rbd needs.
func TestProgramsAreStatic(t *testing.T) {
	dir := binaries(t)
	libraries := func(program string) []string {
		f, err := elf.Open(filepath.Join(dir, program))
		require.NoError(t, err)
		defer f.Close()
		names, err := f.ImportedLibraries()
		require.NoError(t, err)
		return names
	}
	for _, program := range []string{"trivet", "trivet-controlplane", "trivet-nodeagent"} {
		require.Empty(t, libraries(program), program)
	}
	if _, err := os.Stat(filepath.Join(dir, "trivet-rbd")); err != nil {
		return
	}
	config, err := os.ReadFile("trivet-rbd.yaml")
	require.NoError(t, err)
	packages := map[string]string{"libc.so.6": "libc6", "ld-linux-x86-64.so.2": "libc6", "librbd.so.1": "librbd1", "librados.so.2": "librados2"}
	for _, library := range libraries("trivet-rbd") {
		require.Contains(t, packages, library)
		require.Contains(t, string(config), packages[library])
	}
}
