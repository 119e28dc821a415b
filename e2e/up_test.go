package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// upCloud is a cloud that a test runs with `make up`, with its files beneath a directory of the test.
type upCloud struct {
	t *testing.T
	// root is the root of the repository. work is a directory of the test that contains bin/ and .trivet/, like the
	// root of the repository after `make up`.
	root, work string
	// cgroup is the name of the guests' cgroup tree. firstUID and lastUID are the limits of the guests' uids.
	cgroup            string
	firstUID, lastUID int
	// before holds the processes that ran before the first `make up`, by pid. The method processes leaves them out.
	before map[int]string
}

func newUpCloud(t *testing.T) *upCloud {
	t.Helper()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	c := &upCloud{t: t, root: root, work: t.TempDir(), cgroup: fmt.Sprintf("trivet-e2e-up-%d", lab.RunID())}
	require.NoError(t, os.Chmod(c.work, 0o755))
	require.NoError(t, os.Symlink(filepath.Join(root, "bin"), filepath.Join(c.work, "bin")))
	_, err = fmt.Sscanf(uids(), "%d-%d", &c.firstUID, &c.lastUID)
	require.NoError(t, err)
	c.before = c.processes()
	t.Cleanup(func() {
		if t.Failed() {
			(&world{t: t, dir: c.dir()}).showLogs()
		}
		if _, err := os.Stat(string(c.dir())); err == nil {
			c.make("wipe")
		}
	})
	return c
}

func (c *upCloud) dir() lab.Dir { return lab.Dir(filepath.Join(c.work, ".trivet")) }

// home is the home directory of commands, which has the saved logins.
func (c *upCloud) home() string { return filepath.Join(c.work, "home") }

// make runs a target of the Makefile and returns its output.
func (c *upCloud) make(target string) string {
	c.t.Helper()
	flags := fmt.Sprintf("UP_FLAGS=-cgroup %s -uid-range %d-%d", c.cgroup, c.firstUID, c.lastUID)
	args := []string{target, "DIR=" + string(c.dir()), flags}
	if guest := os.Getenv(guestEnv); guest != "" {
		args = append(args, "GUEST="+guest)
	}
	// A new context, because the test's has ended when a cleanup calls make.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "make", args...)
	cmd.Dir = c.root
	// Remove the flags that `make test` passes to every make that runs in it.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS=")
	}), "XDG_CONFIG_HOME="+c.home())
	out, err := cmd.CombinedOutput()
	require.NoError(c.t, err, "make %s:\n%s", target, out)
	return string(out)
}

// shell returns a command that runs a bash script in a directory, with a home directory of the test.
func (c *upCloud) shell(dir, script string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	c.t.Cleanup(cancel)
	home := c.home()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir, cmd.Env = dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "XDG_CONFIG_HOME=" + home}
	return cmd
}

// processes returns the command lines, by pid, of the cloud's processes: those in the test's network namespace, in the
// cloud's cgroups, or with one of the guests' uids. It leaves out the test's own process and those in before.
func (c *upCloud) processes() map[int]string {
	found := map[int]string{}
	own, err := os.Readlink("/proc/self/ns/net")
	require.NoError(c.t, err)
	dirs, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(c.t, err)
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		require.NoError(c.t, err)
		// Errors mean that the process has ended meanwhile.
		stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
		_, state, _ := strings.Cut(string(stat), ") ")
		if pid == os.Getpid() || state == "" || strings.HasPrefix(state, "Z") {
			continue
		}
		net, _ := os.Readlink(filepath.Join(dir, "ns/net"))
		groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		info, err := os.Stat(dir)
		if err != nil {
			continue
		}
		if net == own || strings.Contains(string(groups), c.cgroup) || c.isGuest(info) {
			line, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
			found[pid] = strings.ReplaceAll(string(line), "\x00", " ")
		}
	}
	for pid := range c.before {
		delete(found, pid)
	}
	return found
}

func (c *upCloud) isGuest(info fs.FileInfo) bool {
	uid := int(info.Sys().(*syscall.Stat_t).Uid)
	return c.firstUID <= uid && uid <= c.lastUID
}

// namespaces returns the namespaces of the given processes, except those in which the test itself is.
func (c *upCloud) namespaces(processes map[int]string) map[string]bool {
	found := map[string]bool{}
	for pid := range processes {
		links, err := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", pid))
		require.NoError(c.t, err)
		for _, link := range links {
			own, err := os.Readlink("/proc/self/ns/" + filepath.Base(link))
			require.NoError(c.t, err)
			if name, _ := os.Readlink(link); name != "" && name != own {
				found[name] = true
			}
		}
	}
	return found
}

// inNamespaces returns a line for each process of the host that is in one of the given namespaces.
func (c *upCloud) inNamespaces(namespaces map[string]bool) (links []string) {
	all, err := filepath.Glob("/proc/[0-9]*/ns/*")
	require.NoError(c.t, err)
	for _, link := range all {
		if name, _ := os.Readlink(link); namespaces[name] {
			links = append(links, link+" "+name)
		}
	}
	return links
}

// cgroups returns the directories of the cloud's cgroups, in all cgroup hierarchies.
func (c *upCloud) cgroups() (dirs []string) {
	// Errors are ignored: they are about cgroups of other programs, which may be removed meanwhile.
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(d.Name(), c.cgroup) {
			dirs = append(dirs, path)
		}
		return nil
	})
	return dirs
}

// mounts returns the mount table of the test's mount namespace, without network namespaces and the mount of their
// directory: tests of other packages make and remove namespaces at the same time.
func (c *upCloud) mounts() string {
	text, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(c.t, err)
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) < 5 || !strings.HasPrefix(fields[4], "/run/netns") {
			out.WriteString(line)
		}
	}
	return out.String()
}

// strayFiles returns the files outside the cloud's directory that a guest's uid or the control plane's uid owns, or
// whose name contains that of the cgroup tree. It searches only the top level of the usual directories.
func (c *upCloud) strayFiles() (paths []string) {
	for _, dir := range []string{"/tmp", "/var/tmp", "/run", "/dev/shm", "/var/lib", "/etc", c.root} {
		entries, err := os.ReadDir(dir)
		require.NoError(c.t, err)
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				continue
			}
			uid := int(info.Sys().(*syscall.Stat_t).Uid)
			if c.isGuest(info) || uid == lab.UID || strings.Contains(e.Name(), c.cgroup) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	return paths
}

// TestMakeUp checks that `make up` starts a complete cloud and repairs it, that `make down` ends it and keeps its data,
// that `make wipe` leaves nothing, and that the commands which `make up` and the README print work. The parts use the
// same cloud one after the other, and end with the first that fails.
func TestMakeUp(t *testing.T) {
	c := newUpCloud(t)
	mounts, stray := c.mounts(), c.strayFiles()
	out := c.make("up")
	for _, want := range []string{"three members agree", "host nodeagent is READY", "VM hello is created", "VM hello says: " + banner, "Your cloud runs"} {
		require.Contains(t, out, want)
	}
	running := c.processes()
	require.Len(t, running, 5, "the processes must be three members, the node agent and QEMU")
	part := func(name string, f func(*testing.T)) {
		if !t.Failed() {
			t.Run(name, f)
		}
	}
	part("up again changes nothing", func(t *testing.T) {
		again := c.make("up")
		require.Contains(t, again, "Your cloud runs")
		for _, change := range []string{"created", "started", "rebuilt"} {
			require.NotContains(t, again, change)
		}
		require.Equal(t, running, c.processes())
	})
	part("the commands that up prints", func(t *testing.T) { c.tryPrinted(t, out) })
	part("up starts the member that was killed", func(t *testing.T) {
		c.make("up")
		require.Equal(t, slices.Sorted(maps.Values(running)), slices.Sorted(maps.Values(c.processes())))
	})
	part("the tutorial", c.tutorial)
	part("the first tenant of the README", c.firstTenant)
	part("down ends all processes and keeps the data", func(t *testing.T) {
		namespaces := c.namespaces(c.processes())
		require.NotEmpty(t, namespaces, "the guest must have namespaces of its own")
		require.NotEmpty(t, c.cgroups())
		require.Contains(t, c.make("down"), "the guests (1)")
		contexts, err := c.shell(c.root, "bin/trivet context list -o name").CombinedOutput()
		require.NoError(t, err)
		require.NotContains(t, string(contexts), "make-up")
		assert.Empty(t, c.processes())
		assert.Empty(t, c.inNamespaces(namespaces))
		assert.Empty(t, c.cgroups())
		assert.Equal(t, mounts, c.mounts())
		assert.Equal(t, stray, c.strayFiles())
		require.Contains(t, c.make("down"), "the guests (0)")
		again := c.make("up")
		require.Contains(t, again, "VM hello is started")
		require.NotContains(t, again, "created")
		require.Contains(t, again, "The current context of trivet is make-up", "the tutorial has logged out of its context")
	})
	part("wipe leaves nothing", func(t *testing.T) {
		namespaces := c.namespaces(c.processes())
		require.NotEmpty(t, namespaces, "the guest must have namespaces of its own")
		c.make("wipe")
		assert.Empty(t, c.processes())
		assert.Empty(t, c.inNamespaces(namespaces))
		assert.Empty(t, c.cgroups())
		assert.Equal(t, mounts, c.mounts())
		assert.Equal(t, stray, c.strayFiles())
		assert.NoDirExists(t, string(c.dir()))
		left, err := filepath.Glob("/run/netns/trivet-*")
		require.NoError(t, err)
		assert.Empty(t, left)
		devices, err := filepath.Glob("/sys/class/net/trivet-*")
		require.NoError(t, err)
		assert.Empty(t, devices)
	})
}

// commandsOf returns the commands that a program has printed below the line "Try:", each indented by two spaces.
func commandsOf(t *testing.T, out string) (commands []string) {
	t.Helper()
	_, text, found := strings.Cut(out, "\nTry:\n")
	require.True(t, found, "%s", out)
	for line := range strings.Lines(text) {
		if command, printed := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "  "); printed {
			commands = append(commands, command)
		}
	}
	return commands
}

// tryPrinted runs the commands that `make up` has printed in out, and checks the effect of each. A command without a check,
// or a check without a command, fails the test.
func (c *upCloud) tryPrinted(t *testing.T, out string) {
	require.Contains(t, out, "The current context of trivet is make-up")
	checks := []struct {
		name  string
		check func(out string)
	}{
		{" vm list", func(out string) { require.Regexp(t, `(?m)^hello .*RUNNING`, out) }},
		{" vm log -f hello", nil}, // followed below, because it does not end
		{" host list", func(out string) { require.Contains(t, out, "nodeagent") }},
		{"curl -s http://", func(out string) { require.Equal(t, "hello\n", out) }},
		{"curl -s -H 'Trivet-Strict", func(out string) { require.Contains(t, out, `"name":"hello"`) }},
		{"kill -9", func(out string) {
			require.Regexp(t, `(?m)^hello .*RUNNING`, out)
			require.Zero(t, c.dir().Running("controlplane-1"))
		}},
		{"trivet login --context make-up", func(out string) { require.Contains(t, out, "demo") }},
	}
	commands := commandsOf(t, out)
	require.Len(t, commands, len(checks))
	for i, command := range commands {
		require.Contains(t, command, checks[i].name)
		if checks[i].check == nil {
			c.followLog(t, command)
			continue
		}
		text, err := c.shell(c.root, command).CombinedOutput()
		require.NoError(t, err, "%s:\n%s", command, text)
		checks[i].check(string(text))
	}
}

// followLog runs a command that follows the log of the VM, and kills it when it has printed the banner.
func (c *upCloud) followLog(t *testing.T, command string) {
	log := c.shell(c.root, "exec "+command)
	lines, err := log.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, log.Start())
	seen := false
	for s := bufio.NewScanner(lines); !seen && s.Scan(); {
		seen = strings.Contains(s.Text(), banner)
	}
	require.NoError(t, log.Process.Kill())
	require.Error(t, log.Wait())
	require.True(t, seen, "%s printed no %q", command, banner)
}

// readmeBlock returns the lines of the first code block beneath a heading of README.md.
func (c *upCloud) readmeBlock(heading string) []string {
	text, err := os.ReadFile(filepath.Join(c.root, "README.md"))
	require.NoError(c.t, err)
	_, section, found := strings.Cut(string(text), "\n"+heading+"\n")
	require.True(c.t, found, "README.md has no %q", heading)
	_, block, found := strings.Cut(section, "\n```\n")
	require.True(c.t, found)
	block, _, found = strings.Cut(block, "\n```\n")
	require.True(c.t, found)
	return strings.Split(block, "\n")
}

// firstTenant runs the commands of the README's section "The first tenant" in one shell, and checks the effect of each.
// A command without a check, or a check without a command, fails the test.
func (c *upCloud) firstTenant(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	token, err := os.ReadFile(c.dir().Path("admin.token"))
	require.NoError(t, err)
	g, err := lab.Dial("127.0.0.1", strings.TrimSpace(string(token)))
	require.NoError(t, err)
	defer g.Close()
	user := func() *identityv1.User {
		u, err := g.Identity.GetUser(ctx, &identityv1.GetUserRequest{Id: "ada"})
		require.NoError(t, err)
		return u
	}
	// checks maps the beginning of each command to a function that checks the command's effect.
	checks := map[string]func(out string){
		"export PATH=": func(string) {},
		"trivet org create": func(string) {
			o, err := g.Identity.GetOrg(ctx, &identityv1.GetOrgRequest{Id: "acme"})
			require.NoError(t, err)
			require.Equal(t, "Acme Corp.", o.GetName())
		},
		"trivet project create": func(string) {
			q, err := g.Identity.GetQuota(ctx, &identityv1.GetQuotaRequest{OrgId: "acme", ProjectId: "web"})
			require.NoError(t, err)
			require.EqualValues(t, 16, q.GetQuota().GetVcpus())
			require.EqualValues(t, 64<<10, q.GetQuota().GetMemoryMib())
		},
		"trivet user create":   func(string) { require.Equal(t, "Ada Lovelace", user().GetName()) },
		"(umask 077; openssl":  func(string) {},
		"trivet user password": func(string) { require.True(t, user().GetHasPassword()) },
		"trivet binding create": func(string) {
			require.Len(t, user().GetBindings(), 1)
			b := user().GetBindings()[0]
			require.Equal(t, []string{"project:member", "acme", "web"}, []string{b.GetRole(), b.GetOrgId(), b.GetProjectId()})
		},
		"export TRIVET_TOKEN_FILE=": func(string) {},
		"unset TRIVET_TOKEN_FILE":   func(string) {},
		"trivet login":              func(out string) { require.Contains(t, out, "ada") },
		"trivet whoami": func(out string) {
			for _, want := range []string{"ada", "project:member", "acme", "web"} {
				require.Contains(t, out, want)
			}
		},
		"trivet quota show": func(out string) { require.Regexp(t, `(?s)vcpus.*16.*64`, strings.ToLower(out)) },
		"trivet logout":     func(string) {},
		"rm ada.password": func(out string) {
			require.Regexp(t, `^600 2\d\n`, out, "mode and size of the password file")
			require.NoFileExists(t, filepath.Join(c.work, "ada.password"))
		},
	}
	commands := c.readmeBlock("## The first tenant")
	const marker = "--- exit code of command"
	var script strings.Builder
	for i, command := range commands {
		if strings.HasPrefix(command, "rm ") {
			script.WriteString("stat -c '%a %s' ada.password\n")
		}
		fmt.Fprintf(&script, "%s\ncode=$?; echo; echo '%s' %d: $code\n", command, marker, i)
	}
	// After the logout, `trivet whoami` must fail.
	script.WriteString("! trivet whoami\n")
	out, err := c.shell(c.work, script.String()).CombinedOutput()
	require.NoError(t, err, "%s", out)
	rest := string(out)
	for i, command := range commands {
		printed, after, found := strings.Cut(rest, fmt.Sprintf("\n%s %d: ", marker, i))
		require.True(t, found, "%s:\n%s", command, rest)
		code, after, _ := strings.Cut(after, "\n")
		require.Equal(t, "0", code, "%s:\n%s", command, printed)
		rest = after
		known := false
		for prefix, check := range checks {
			if strings.HasPrefix(command, prefix) {
				known = true
				check(printed)
				delete(checks, prefix)
				break
			}
		}
		require.True(t, known, "this test does not know the effect of: %s", command)
	}
	require.Empty(t, slices.Collect(maps.Keys(checks)), "the README does not have these commands")
}
