package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// trivet runs the program trivet with a home directory and arguments, and returns its standard output, standard error
// and exit code.
func (w *world) trivet(ctx context.Context, home string, args ...string) (out, errs string, code int) {
	cmd := exec.CommandContext(ctx, w.trio.Bin.CLI, args...)
	cmd.Env = []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home}
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, ended := err.(*exec.ExitError); err != nil && !ended {
		require.NoError(w.t, err)
	}
	return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
}

// adminCommand runs the command line as the administrator, in the project default.
func (w *world) adminCommand(ctx context.Context, args ...string) (out, errs string, code int) {
	w.t.Helper()
	return w.trivet(ctx, w.t.TempDir(), w.asAdmin(args...)...)
}

// asAdmin returns the arguments of the command line for a command of the administrator in the project default.
func (w *world) asAdmin(args ...string) []string {
	w.t.Helper()
	token := filepath.Join(w.t.TempDir(), "admin.token")
	require.NoError(w.t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	return append([]string{"--endpoint", "127.0.0.1", "--token-file", token, "--org", "default", "--project", "default"}, args...)
}

// runningCommand is a command of the administrator that runs while the test goes on.
type runningCommand struct {
	w         *world
	in        io.WriteCloser
	out, errs output
	ended     chan struct{} // is closed when the command has ended with the error err
	err       error
}

// output is a buffer that can be read while a command writes to it.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// startCommand starts a command of the administrator, which ends when ctx ends.
func (w *world) startCommand(ctx context.Context, args ...string) *runningCommand {
	w.t.Helper()
	cmd := exec.CommandContext(ctx, w.trio.Bin.CLI, w.asAdmin(args...)...)
	home := w.t.TempDir()
	cmd.Env = []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home, "PATH=" + os.Getenv("PATH")}
	c := &runningCommand{w: w, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &c.out, &c.errs
	var err error
	c.in, err = cmd.StdinPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, cmd.Start())
	go func() {
		defer close(c.ended)
		c.err = cmd.Wait()
	}()
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill() // An error means that the command has ended already.
		<-c.ended
	})
	return c
}

// prints waits until the command has printed a text to its standard output or to its standard error.
func (c *runningCommand) prints(ctx context.Context, text string) {
	c.w.t.Helper()
	require.NoError(c.w.t, lab.Until(ctx, "the command prints "+text, func(context.Context) error {
		if strings.Contains(c.out.String(), text) || strings.Contains(c.errs.String(), text) {
			return nil
		}
		return fmt.Errorf("%s%s", c.out.String(), c.errs.String())
	}))
}

// finish waits until the command has ended without an error.
func (c *runningCommand) finish(ctx context.Context) {
	c.w.t.Helper()
	select {
	case <-c.ended:
		require.NoError(c.w.t, c.err, "%s%s", c.out.String(), c.errs.String())
	case <-ctx.Done():
		require.Fail(c.w.t, "the command does not end", "%s%s", c.out.String(), c.errs.String())
	}
}

// followedList is a running `trivet vm list --watch`.
type followedList struct {
	w     *world
	cmd   *exec.Cmd
	lines *bufio.Scanner
	seen  strings.Builder
}

// followList starts `trivet vm list --watch`. The command ends when ctx ends.
func (w *world) followList(ctx context.Context, home string) *followedList {
	cmd := exec.CommandContext(ctx, w.trio.Bin.CLI, "vm", "list", "--watch")
	cmd.Env = []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home}
	out, err := cmd.StdoutPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, cmd.Start())
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill() // An error means that the command has ended already.
		_ = cmd.Wait()
	})
	return &followedList{w: w, cmd: cmd, lines: bufio.NewScanner(out)}
}

// await reads lines until one matches a pattern.
func (f *followedList) await(pattern string) {
	f.w.t.Helper()
	want := regexp.MustCompile(pattern)
	for f.lines.Scan() {
		f.seen.WriteString(f.lines.Text() + "\n")
		if want.MatchString(f.lines.Text()) {
			return
		}
	}
	f.w.t.Fatalf("the list ended without %q:\n%s", pattern, f.seen.String())
}

// stop interrupts the command. The command must then exit with code 130.
func (f *followedList) stop() {
	require.NoError(f.w.t, f.cmd.Process.Signal(os.Interrupt))
	for f.lines.Scan() {
	}
	_ = f.cmd.Wait() // its error is the exit code
	require.Equal(f.w.t, 130, f.cmd.ProcessState.ExitCode())
}

// filtersAndMistakes lists the VM web of TestCommandLine by several fields, and checks that a list with a typing error is
// an error and not an empty list. ada and admin are home directories, and token is the file with the administrator's
// token.
func (w *world) filtersAndMistakes(ctx context.Context, ada, admin, token string) {
	t := w.t
	for filter, want := range map[string]string{
		`memory = 192 AND name : we`: "web\n", `memory >= "1GiB"`: "", `name = "w*" AND created_at > "2020-01-01"`: "web\n",
		`vcpus > 1 OR disk > 1`: "web\n", `ip_addresses : "10.*"`: "",
	} {
		out, errs, code := w.trivet(ctx, ada, "vm", "list", "--filter", filter, "-l", "env=test", "-o", "name")
		require.Zero(t, code, "%s: %s", filter, errs)
		require.Equal(t, want, out, filter)
	}
	for _, tc := range []struct {
		code int
		text string
		args []string
	}{
		{2, "unknown field memmory", []string{"vm", "list", "--filter", "memmory > 1"}},
		{2, "state = RUNING", []string{"vm", "list", "--filter", "state = RUNING"}},
		{3, "nosuch", []string{"vm", "list", "--project", "nosuch"}},
		{3, "nosuch", []string{"volume", "list", "--project", "nosuch"}},
		{2, "BAD", []string{"audit", "list", "--outcome", "BAD"}},
		{2, "Nope", []string{"audit", "list", "--method", "Nope"}},
	} {
		args := append([]string{"--token-file", token, "--org", "default", "--project", "default"}, tc.args...)
		out, errs, code := w.trivet(ctx, admin, args...)
		require.Equal(t, tc.code, code, "%v: %s", tc.args, errs)
		require.Empty(t, out)
		require.Contains(t, errs, tc.text)
	}
}

// TestCommandLine checks that the program trivet works for an operator, who imports an image and lists hosts, and for a
// tenant, who logs in and runs a VM, also while the first of the tenant's endpoints is down.
func TestCommandLine(t *testing.T) {
	w := newWorld(t)
	w.startAgent()
	ctx := w.context(5 * time.Minute)
	admin, ada := t.TempDir(), t.TempDir()
	must := func(home string, args ...string) string {
		t.Helper()
		out, errs, code := w.trivet(ctx, home, args...)
		require.Zero(t, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
		return out
	}
	token := filepath.Join(admin, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	asAdmin := func(args ...string) []string {
		return append([]string{"--token-file", token, "--org", "default"}, args...)
	}

	disk, err := os.ReadFile(filepath.Join(guest(t), "disk.qcow2"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(w.trio.ImportDir(), "small.qcow2"), disk, 0o644))
	must(admin, asAdmin("image", "import", "small", filepath.Join(w.trio.ImportDir(), "small.qcow2"), "--public", "--format", "qcow2")...)
	tools := filepath.Join(w.trio.ImportDir(), "tools.raw")
	testenv.GuestAgentDisk(t, tools)
	require.NoError(t, os.Chmod(tools, 0o644))
	must(admin, asAdmin("image", "import", "tools", tools, "--public", "--format", "raw")...)
	require.Contains(t, must(admin, asAdmin("node", "list")...), w.agent.Name)
	require.Contains(t, must(admin, asAdmin("cluster", "status")...), "127.0.0.3")
	// Members and hosts have the version of the client, because all were built together.
	version := regexp.QuoteMeta(strings.TrimSpace(must(admin, "version", "-o", "name")))
	require.NotContains(t, version, "devel")
	require.Regexp(t, `(?m)(^member +\S+ +`+version+`\n){3}^host +`+w.agent.Name+` +`+version+`$`, must(admin, asAdmin("version")...))

	w.tenant("ada", "default", "default", "project:member")
	password := filepath.Join(ada, "password")
	require.NoError(t, os.WriteFile(password, []byte("correct horse\n"), 0o600))
	must(ada, "login", "--user", "ada", "--password-file", password, "--endpoint", "127.0.0.1,127.0.0.2,127.0.0.3")
	require.Contains(t, must(ada, "image", "list"), "small")
	list := w.followList(ctx, ada)
	list.await("TIME")
	file := filepath.Join(ada, "vm.yaml")
	require.NoError(t, os.WriteFile(file, []byte("name: web\nimage: small\nmemory: 1G\ndisks: [{size: 1}, {size: 1, image: tools}]\n"+
		"labels: {env: test}\nmetadata: {trivet/guest-exec: allowed}\nnetworks: none\n"), 0o600))
	must(ada, "vm", "create", "-f", file, "--memory", "192", "--start")
	list.await(`changed +web .* RUNNING`)
	var vm struct{ Name, State string }
	require.NoError(t, json.Unmarshal([]byte(must(ada, "vm", "show", "web", "-o", "json")), &vm))
	require.Equal(t, "RUNNING", vm.State)
	require.NoError(t, lab.Until(ctx, "the banner is in the log", func(context.Context) error {
		if out := must(ada, "vm", "log", "web"); !strings.Contains(out, banner) {
			return os.ErrNotExist
		}
		return nil
	}))

	w.guestCommands(ctx, ada, admin)
	require.Regexp(t, `State: +RUNNING: its process runs, (?s:.*)Placed: .*free capacity(?s:.*)STARTING +RUNNING`, must(ada, "vm", "show", "web"))
	require.Regexp(t, `default/default +web`, must(admin, asAdmin("vm", "list", "--all-projects")...))
	require.Regexp(t, `VM +TENANT(?s:.*)web +default/default`, must(admin, asAdmin("node", "show", w.agent.Name)...))
	w.filtersAndMistakes(ctx, ada, admin, token)

	require.NoError(t, lab.Until(ctx, "the guest's address is shown", func(context.Context) error {
		if out := must(ada, "vm", "show", "web"); !strings.Contains(out, "Reported by guest:") || !strings.Contains(out, "10.9.8.7") {
			return errors.New(out)
		}
		return nil
	}))

	w.installFromCD(ctx, func(args ...string) string {
		t.Helper()
		return must(ada, args...)
	})

	// The commands must use another endpoint if the first one is down. A watch must continue at another endpoint.
	require.NoError(t, w.dir.Kill(w.trio.Name(1)))
	must(ada, "vm", "reset", "web")
	require.Contains(t, must(ada, "vm", "label", "web", "team=shop", "env-"), "web")
	must(ada, "vm", "stop", "-l", "team=shop", "--yes", "--force")
	must(ada, "vm", "wait", "web", "--for", "STOPPED")
	require.Contains(t, must(ada, "vm", "list"), "STOPPED")
	_, errs, code := w.trivet(ctx, ada, "vm", "create", "web", "--image", "small", "--network", "none")
	require.Equal(t, 4, code, errs)
	require.Regexp(t, `^trivet: ALREADY_EXISTS: .* \(request [0-9a-f-]{36}\)\n$`, errs)
	_, errs, code = w.trivet(ctx, ada, "vm", "show", "nosuch", "-o", "json")
	require.Equal(t, 3, code, errs)
	require.Regexp(t, `^\{"error":\{"code":"NOT_FOUND",.*"request_id":"[0-9a-f-]{36}"\}\}\n$`, errs)
	_, errs, code = w.trivet(ctx, ada, "vm", "update", "web", "--memory", "1")
	require.Equal(t, 2, code, errs)
	require.Contains(t, errs, "--memory: must be")
	list.await(`changed +web .* STOPPED`)
	must(ada, "vm", "delete", "web")
	list.await(`removed +web`)
	list.stop()

	out, errs, code := w.trivet(ctx, ada, "vm", "show", "web")
	require.Equal(t, 3, code)
	require.Empty(t, out)
	require.Contains(t, errs, "web")
	_, errs, code = w.trivet(ctx, t.TempDir(), "vm", "list", "--endpoint", "127.0.0.2")
	require.Equal(t, 5, code)
	require.Contains(t, errs, "trivet login")
	_, _, code = w.trivet(ctx, ada, "vm", "fly", "web")
	require.Equal(t, 2, code)
}
