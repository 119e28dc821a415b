// Package e2e tests the real programs together: three members, a node agent, QEMU and the clients. The tests must run
// as root. They run in their own network, mount and PID namespace, so that they work beside a running cloud, and remove all
// that they create. If the tests are killed, the kernel kills the processes of the PID namespace.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/cgroup/cgrouptest"
)

const (
	// binEnv and guestEnv are the environment variables for the directories of the built programs and of the small
	// guest. The Makefile sets them.
	binEnv   = "TRIVET_BIN"
	guestEnv = "TRIVET_GUEST_DIR"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("the tests of e2e need root: run them with sudo, or leave out this package")
		os.Exit(1)
	}
	if !lab.Inside() {
		removeLeft() // of earlier runs that were killed
		code := lab.Again(unix.CLONE_NEWNS | unix.CLONE_NEWPID)
		removeLeft()
		os.Exit(code)
	}
	if lab.IsInit() {
		os.Exit(lab.Init())
	}
	if err := errors.Join(lab.Loopback(), lab.PrivateMounts(), lab.PrivateNetns()); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// removeLeft removes the control groups of this run and of others that were killed.
func removeLeft() {
	if err := errors.Join(cgrouptest.RemoveLeft("trivet-e2e"), cgrouptest.RemoveLeft("trivet-e2e-up")); err != nil {
		fmt.Println(err)
	}
}

// binaries returns the programs in the directory of the environment variable binEnv. If it is not set, binaries builds
// the programs.
func binaries(t *testing.T) lab.Binaries {
	t.Helper()
	if dir := os.Getenv(binEnv); dir != "" {
		return lab.In(dir)
	}
	dir, err := filepath.Abs("../.build/e2e")
	require.NoError(t, err)
	for name, pkg := range map[string]string{"trivet-controlplane": "../controlplane", "trivet-nodeagent": "../nodeagent", "trivet": "../cli"} {
		cmd := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, name), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	return lab.In(dir)
}

// faulty builds the control plane with the tag mutant, so that a test can switch on mutants (deliberate faults) and set
// a member's clock, and returns the programs.
func faulty(t *testing.T) lab.Binaries {
	t.Helper()
	bin := binaries(t).Faulty()
	cmd := exec.Command("go", "build", "-trimpath", "-tags", "mutant", "-o", bin.ControlPlane, "../controlplane")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin
}

// guest returns the directory with the files of the small guest, which it builds if they are missing or out of date.
func guest(t *testing.T) string {
	t.Helper()
	dir := os.Getenv(guestEnv)
	if dir == "" {
		dir = "../.build/guest"
	}
	out, err := exec.Command("../images/guest/build", dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

// world is the cloud of one test: three members, perhaps a node agent, and clients.
type world struct {
	t     *testing.T
	dir   lab.Dir
	trio  *lab.Trio
	agent *lab.Agent
	// admin calls member 1 with the administrator's token, adminToken.
	admin      *lab.GRPC
	adminToken string
	// tenantToken is the token that the last call of tenant returned.
	tenantToken string
	// https is the HTTP client for REST calls if the members use TLS; nil for plaintext.
	https *http.Client
	// check is the function lab.REST.Check of the REST clients that are created from now on. It is nil for none.
	check func(port int, method, path string, body []byte, a *lab.Answer) error
}

// newWorld starts three members that run until the test ends. It calls the functions in the parameter before when the
// members' directories exist and no member runs, so that these functions can change the configuration.
func newWorld(t *testing.T, before ...func(*world)) *world {
	t.Helper()
	dir := lab.Dir(t.TempDir())
	require.NoError(t, os.Chmod(string(dir), 0o755))
	w := &world{t: t, dir: dir, trio: lab.NewTrio(dir, binaries(t))}
	require.NoError(t, w.trio.Prepare())
	for _, f := range before {
		f(w)
	}
	t.Cleanup(func() {
		if t.Failed() {
			w.showLogs()
		}
		for id := range w.trio.Members {
			w.dir.Signal(w.trio.Name(id), syscall.SIGCONT)
		}
		require.NoError(t, w.trio.StopAll())
	})
	require.NoError(t, w.trio.StartAll())
	w.ready()
	token, err := w.trio.AdminToken()
	require.NoError(t, err)
	w.adminToken = token
	w.admin = w.dial(1, token)
	return w
}

func (w *world) showLogs() {
	logs, _ := filepath.Glob(w.dir.Path("log", "*"))
	for _, path := range logs {
		text, _ := os.ReadFile(path)
		if len(text) > 8000 {
			text = text[len(text)-8000:]
		}
		w.t.Logf("%s:\n%s", filepath.Base(path), text)
	}
}

// context returns a context that ends after d or with the test, so that no test waits forever.
func (w *world) context(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), d)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) ready() { require.NoError(w.t, w.trio.Ready(w.context(time.Minute))) }

func (w *world) dial(member int, token string) *lab.GRPC {
	g, err := lab.DialTLS(w.trio.Members[member], token, w.trio.TLS)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { g.Close() })
	return g
}

func (w *world) rest(member int, token string) *lab.REST {
	return &lab.REST{Host: w.trio.Members[member], Token: token, HTTP: w.https, Secure: w.https != nil, Check: w.check}
}

// tenant creates a user with a role in a project, and the org and project if they do not exist, and returns a token of
// the user.
func (w *world) tenant(name, org, project, role string) string {
	ctx := w.context(30 * time.Second)
	binding := &identityv1.Binding{Role: role, OrgId: org, ProjectId: project}
	require.NoError(w.t, w.admin.EnsureUser(ctx, name, "correct horse", binding))
	token, err := w.rest(1, "").IssueToken(ctx, name, "correct horse", nil)
	require.NoError(w.t, err)
	w.tenantToken = token
	return token
}

// uids returns a range of 1000 uids for guests that depends on lab.RunID, so that the ranges of concurrent
// runs on this host are different with high probability.
func uids() string {
	first := 640_000 + lab.RunID()%1000*1000
	return fmt.Sprintf("%d-%d", first, first+999)
}

// startAgent starts a node agent that runs until the test ends, and waits until its host is READY.
func (w *world) startAgent() {
	ctx := w.context(time.Minute)
	w.agent = &lab.Agent{
		Dir: w.dir, Bin: w.trio.Bin, Name: "host-1", Members: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"},
		Cgroup: fmt.Sprintf("trivet-e2e-%d", lab.RunID()), UIDRange: uids(), Metrics: "127.0.0.1:7444",
	}
	token, err := w.admin.NodeToken(ctx)
	require.NoError(w.t, err)
	w.t.Cleanup(func() {
		if w.dir.Running(w.agent.Name) != 0 {
			require.NoError(w.t, w.dir.Stop(w.agent.Name, 12*time.Second))
		}
		// A new context, because the test's has ended when this cleanup runs.
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_, err := w.agent.EndGuests(ctx)
		require.NoError(w.t, err)
	})
	require.NoError(w.t, w.agent.Start(token))
	require.NoError(w.t, w.agent.Healthy(ctx))
	_, err = w.admin.AwaitNode(ctx, w.agent.Name)
	require.NoError(w.t, err)
}

// leader waits until the member with the id via reports a leader of the raft group system, which holds the control
// plane's records, and returns that leader's id.
func (w *world) leader(via int) int {
	g := w.dial(via, w.adminToken)
	var leader int
	require.NoError(w.t, lab.Until(w.context(30*time.Second), "a leader is known", func(ctx context.Context) error {
		s, err := g.Operator.ClusterStatus(ctx, nil)
		if err != nil {
			return err
		}
		if leader = int(s.GetGroups()[0].GetLeaderId()); leader == 0 {
			return errors.New("no leader yet")
		}
		return nil
	}))
	return leader
}
