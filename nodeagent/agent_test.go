package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// asAgent is the environment variable that makes the test program run as the agent.
const asAgent = "TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if _, yes := os.LookupEnv(asAgent); yes || len(os.Args) > 1 && (os.Args[1] == launchGuest || os.Args[1] == guardLease) {
		main()
	}
	os.Exit(m.Run())
}

// rig is a host with a fake control plane, on which a test starts and stops the agent's program.
type rig struct {
	*testing.T
	*controlPlane
	dir, cgroup, metrics string
	tree                 *cgroup.Tree
	process              *exec.Cmd
	// namespace is the name of the network namespace of the agent and the control plane. If it is empty, they are in
	// the namespace of the test.
	namespace string
	program   string   // of the agent; the test program by default
	flags     []string // of the agent, besides those that all tests need
}

func newRig(t *testing.T) *rig { return newRigIn(t, "") }

// newRigIn returns a rig whose agent is in the network namespace with a name, or in the namespace of the test if the
// name is empty.
func newRigIn(t *testing.T, namespace string) *rig {
	testenv.NeedRoot(t)
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		testenv.Skip(t, err.Error())
	}
	sector, err := os.ReadFile("qemu/testdata/guest.bin")
	require.NoError(t, err)
	r := &rig{
		T: t, dir: t.TempDir(), cgroup: fmt.Sprintf("trivet-test-agent-%d", os.Getpid()), namespace: namespace, program: os.Args[0],
	}
	var listener net.Listener
	require.NoError(t, r.in(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		r.metrics = freeAddr(t)
		return err
	}))
	r.controlPlane = newControlPlane(t, append(sector, make([]byte, 1<<20-len(sector))...), listener)
	r.tree, err = cgroup.Open(r.cgroup)
	require.NoError(t, err)
	t.Cleanup(func() {
		if r.process != nil {
			r.kill(syscall.SIGKILL)
		}
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		names, err := r.tree.List()
		require.NoError(t, err)
		for _, name := range names {
			require.NoError(t, r.tree.Kill(ctx, name))
			require.NoError(t, r.tree.Remove(ctx, name))
		}
		require.NoError(t, r.tree.Close())
	})
	return r
}

// in calls f in the network namespace of the agent.
func (r *rig) in(f func() error) error {
	if r.namespace == "" {
		return f()
	}
	return nsthread.InNamed(r.namespace, f)
}

func freeAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// command returns the command that starts an agent on this host.
func (r *rig) command() *exec.Cmd {
	token := filepath.Join(r.dir, "token")
	require.NoError(r, os.WriteFile(token, []byte(r.token()+"\n"), 0o600))
	cmd := exec.Command(r.program, append([]string{"--controlplane", r.addr, "--data-dir", filepath.Join(r.dir, "agent"), "--join-token", token,
		"--cgroup", r.cgroup, "--accel", "tcg", "--allow-tcg", "--name", "host1", "--metrics-listen", r.metrics}, r.flags...)...)
	cmd.Env = append(os.Environ(), asAgent+"=1")
	return cmd
}

func (r *rig) start() {
	r.process = r.command()
	r.process.Stderr = os.Stderr
	if !testing.Verbose() {
		r.process.Stderr = nil
	}
	require.NoError(r, r.in(r.process.Start))
}

// kill sends a signal to the agent, waits until it has ended, and returns the error of its Wait.
func (r *rig) kill(signal syscall.Signal) error {
	_ = r.process.Process.Signal(signal)
	err := r.process.Wait()
	r.process = nil
	return err
}

func (r *rig) get(path string) string {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = r.in(func() error { conn, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
		return conn, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	answer, err := client.Get("http://" + r.metrics + path)
	require.NoError(r, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(r, err)
	require.Equal(r, 200, answer.StatusCode)
	return string(body)
}

func vm(n int, image string, size int) *agentv1.AssignedVm {
	w := &agentv1.AssignedVm{
		VmId: fmt.Sprintf("00000000-0000-4000-8000-%012d", n), Generation: 1, Power: agentv1.Power_POWER_OFF, Vcpus: 1, Sockets: 1,
		CoresPerSocket: 1, MemoryMib: 64,
		Disks: []*agentv1.AssignedDisk{{
			Id: "root", SizeBytes: 1 << 30, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO, Cache: vmv1.DiskCache_DISK_CACHE_WRITEBACK,
		}},
	}
	if image != "" {
		w.Disks[0].Image = &agentv1.AssignedImage{
			ImageId: "i", Sha256: image, SizeBytes: uint64(size), Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW,
		}
	}
	return w
}

func next(w *agentv1.AssignedVm, change func(*agentv1.AssignedVm)) *agentv1.AssignedVm {
	n := proto.Clone(w).(*agentv1.AssignedVm)
	n.Generation++
	change(n)
	return n
}

func started(w *agentv1.AssignedVm) *agentv1.AssignedVm {
	return next(w, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_ON; w.Starts++ })
}

// alive reports whether the process pid exists and is not a zombie.
func alive(pid uint32) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// TestAgent runs the agent's program with a fake control plane and real QEMU: the agent joins, builds two VMs, starts
// them and destroys them. It checks that guests survive a kill -9 and a regular stop of the agent, and that the end of
// a QEMU is reported.
func TestAgent(t *testing.T) {
	r := newRig(t)
	r.start()
	r.until("a heartbeat", func() bool { return r.beat != nil && r.facts != nil })
	require.Equal(t, vmv1.NodeState_NODE_STATE_READY, r.beat.GetState())
	require.Equal(t, "host1", r.beat.GetName())
	require.Equal(t, "n1", r.beat.GetNodeId())
	require.Equal(t, "tcg", r.beat.GetLabels()["trivet/accel"])
	require.Positive(t, r.beat.GetAllocatable().GetVcpus())
	require.NotEmpty(t, r.facts.GetCpuModels())

	a, b := vm(1, "", 0), vm(2, r.sum(), len(r.image))
	r.assign(a)
	r.assign(b)
	r.sees(a, agentv1.Observed_OBSERVED_BUILT)
	a, b = started(a), started(b)
	r.assign(a)
	r.assign(b)
	pidA := r.sees(a, agentv1.Observed_OBSERVED_RUNNING).GetPid()
	pidB := r.sees(b, agentv1.Observed_OBSERVED_RUNNING).GetPid()
	r.change(func() {
		r.tell(&agentv1.WatchResponse{ConsoleRequests: []*agentv1.ConsoleRequest{{RequestId: "c", VmId: b.GetVmId(), Follow: true}}})
	})
	r.until("the guest's console output", func() bool { return strings.Contains(r.console.String(), "GUEST UP") })
	require.Contains(t, r.get("/health"), "healthy")
	metrics := r.get("/metrics")
	require.Contains(t, metrics, `trivet_agent_vms{observed="running"} 2`)
	require.Contains(t, metrics, `trivet_agent_uplink_connected 1`)

	// A second agent on the same data directory is refused.
	out, err := r.command().CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "another agent")

	// The guests survive kill -9 of the agent, and the next agent has adopted them before it sends its first message.
	r.kill(syscall.SIGKILL)
	require.True(t, alive(pidA))
	r.change(func() { clear(r.seen); r.present = nil })
	r.start()
	require.Equal(t, pidA, r.sees(a, agentv1.Observed_OBSERVED_RUNNING).GetPid())
	require.Equal(t, pidB, r.sees(b, agentv1.Observed_OBSERVED_RUNNING).GetPid())
	require.Equal(t, []string{a.GetVmId(), b.GetVmId()}, r.present)
	require.Contains(t, r.get("/metrics"), `trivet_agent_launches_total{result="ok"} 0`)

	// A kill -9 of a QEMU is reported as failed, although this agent is not its parent.
	require.NoError(t, syscall.Kill(int(pidA), syscall.SIGKILL))
	o := r.sees(a, agentv1.Observed_OBSERVED_ENDED)
	require.Equal(t, agentv1.Exit_EXIT_FAILED, o.GetExit())
	require.NotEmpty(t, o.GetLastError())
	a = next(a, func(w *agentv1.AssignedVm) { w.Starts++ })
	r.assign(a)
	require.NotEqual(t, pidA, r.sees(a, agentv1.Observed_OBSERVED_RUNNING).GetPid())

	// A regular stop leaves guests running. While no agent runs, the desired state of one becomes DESTROYED; the next
	// agent destroys it.
	require.NoError(t, r.kill(syscall.SIGTERM))
	require.True(t, alive(pidB))
	b = next(b, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_DESTROYED })
	r.change(func() { r.revision++; r.vms[b.GetVmId()] = b })
	r.start()
	r.sees(b, agentv1.Observed_OBSERVED_ABSENT)
	require.False(t, alive(pidB))
	a = next(a, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_OFF })
	r.assign(a)
	r.sees(a, agentv1.Observed_OBSERVED_BUILT)
	a = next(a, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_DESTROYED })
	r.assign(a)
	r.sees(a, agentv1.Observed_OBSERVED_ABSENT)
	r.change(func() {
		r.revision++
		clear(r.vms)
		r.tell(&agentv1.WatchResponse{ReleasedVms: []string{a.GetVmId(), b.GetVmId()}})
	})
	require.Eventually(t, func() bool { return !strings.Contains(r.get("/metrics"), `{observed="absent"} 2`) }, within, 10*time.Millisecond)
	for _, dir := range []string{"vms", "records"} {
		left, err := os.ReadDir(filepath.Join(r.dir, "agent", dir))
		require.NoError(t, err)
		require.Empty(t, left)
	}
	require.NoError(t, r.kill(syscall.SIGTERM))
}

// TestRefusals checks that the agent with invalid arguments ends at once with exit code 2 and an error on its standard
// error.
func TestRefusals(t *testing.T) {
	for _, args := range [][]string{{}, {"--controlplane", "a", "--accel", "fast"}, {"--config", "/nowhere"}} {
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(os.Environ(), asAgent+"=1")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Equal(t, 2, cmd.ProcessState.ExitCode(), "%s", out)
		require.True(t, strings.HasPrefix(string(out), "trivet-nodeagent: "), "%s", out)
	}
}

// TestFormat checks that claim refuses a data directory of another format version, and one that another agent uses.
func TestFormat(t *testing.T) {
	dir := t.TempDir()
	release, err := claim(dir, 0)
	require.NoError(t, err)
	_, err = claim(dir, 0)
	require.ErrorContains(t, err, "another agent")
	time.AfterFunc(100*time.Millisecond, release)
	release, err = claim(dir, time.Minute)
	require.NoError(t, err, "the other agent ends meanwhile")
	release()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "format"), []byte("2\n"), 0o600))
	_, err = claim(dir, 0)
	require.ErrorContains(t, err, "format")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "format"), []byte(formatVersion+"\n"), 0o600))
	release, err = claim(dir, 0)
	require.NoError(t, err)
	release()
}
