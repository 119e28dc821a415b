package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

// made creates a VM. If run is true, it starts the VM, waits for its guest, and returns the PID of its QEMU. Otherwise
// it waits until the VM is built.
func made(ctx context.Context, t *testing.T, w *world, ada *lab.REST, name, image string, run bool) (id string, pid uint32) {
	var vm lab.VM
	require.NoError(t, ada.Call(ctx, "POST", "/api/v1/vms", body(name, image), &vm))
	if !run {
		eventually(ctx, t, w.admin, vm.ID, "the VM is built", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED })
		return vm.ID, 0
	}
	return vm.ID, started(ctx, t, w, ada, vm.ID)
}

// started starts a VM, waits until its guest prints that it is ready, and returns the PID of its QEMU.
func started(ctx context.Context, t *testing.T, w *world, ada *lab.REST, id string) (pid uint32) {
	require.NoError(t, ada.Call(ctx, "POST", "/api/v1/vms/"+id+"/start", nil, nil))
	require.NoError(t, consoleSays(ctx, w, id, banner, 1))
	vm := eventually(ctx, t, w.admin, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool { return vm.GetStatus().GetHostPid() != 0 })
	return vm.GetStatus().GetHostPid()
}

// The method only checks that exactly one process runs a VM, and that its PID is pid.
func (w *world) only(id string, pid uint32) {
	w.t.Helper()
	tree, err := cgroup.Open(w.agent.Cgroup)
	require.NoError(w.t, err)
	procs, err := tree.Procs(id)
	require.NoError(w.t, err)
	require.Equal(w.t, []int{int(pid)}, procs)
}

// agentSays waits until one line of the agent's log contains all texts, and returns the length of the log. It reads the
// log from the offset in the parameter from.
func (w *world) agentSays(ctx context.Context, from int, texts ...string) int {
	w.t.Helper()
	var log []byte
	require.NoError(w.t, lab.Until(ctx, "the agent says "+texts[0], func(context.Context) (err error) {
		if log, err = os.ReadFile(w.dir.LogFile(w.agent.Name)); err != nil {
			return err
		}
		for line := range strings.Lines(string(log[from:])) {
			all := true
			for _, text := range texts {
				all = all && strings.Contains(line, text)
			}
			if all {
				return nil
			}
		}
		return errors.New("not yet")
	}))
	return len(log)
}

// rejoin moves the host to the cluster of g as an operator would, and waits until it is READY under its old node ID. It
// checks that the host moves only with a token and the setting leave_cluster. old is the ID of the host's old cluster.
func (w *world) rejoin(ctx context.Context, g *lab.GRPC, old string, node string) {
	t := w.t
	now, err := g.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	said := w.agentSays(ctx, 0, "--leave-cluster "+old, "trivet host token", "this is a member of cluster "+now.GetCluster())
	require.NotZero(t, w.dir.Running(w.agent.Name))

	// With a token alone, the host must not leave its cluster.
	token, err := g.NodeToken(ctx)
	require.NoError(t, err)
	credential, err := os.ReadFile(filepath.Join(w.agent.DataDir(), "identity", "credential.pb"))
	require.NoError(t, err)
	require.NoError(t, w.dir.Stop(w.agent.Name, 12*time.Second))
	require.NoError(t, w.agent.Start(token))
	said = w.agentSays(ctx, said, "--leave-cluster "+old)
	still, err := os.ReadFile(filepath.Join(w.agent.DataDir(), "identity", "credential.pb"))
	require.NoError(t, err)
	require.Equal(t, credential, still)

	// With leave_cluster, the host must leave its cluster, and must still work if it starts again with that setting.
	w.agent.Leave = old
	for range 2 {
		require.NoError(t, w.dir.Stop(w.agent.Name, 12*time.Second))
		require.NoError(t, w.agent.Start(""))
		said = w.agentSays(ctx, said, "msg=connected", "node="+node)
	}
	_, err = g.AwaitNode(ctx, w.agent.Name)
	require.NoError(t, err)
	nodes, err := g.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
	require.NoError(t, err)
	require.Len(t, nodes.GetNodes(), 1)
	require.Equal(t, node, nodes.GetNodes()[0].GetId())
}

// TestRestoreWithAHost stops the control plane while a host runs guests, and restores it from a backup. It checks that
// the guests continue to run, that the agent's log names the remedy, and that the host then joins the new cluster with
// its old node ID and its guests. Guests that were started or created after the backup must be reported and continue to
// run.
func TestRestoreWithAHost(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(6 * time.Minute)
	kept, keptPID := made(ctx, t, w, ada, "kept", images.Disk, true)
	late, _ := made(ctx, t, w, ada, "late", images.Disk, false)
	node, err := w.admin.AwaitNode(ctx, w.agent.Name)
	require.NoError(t, err)
	was, err := w.admin.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	home := t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	file := filepath.Join(home, "cloud.backup")
	_, errs, code := w.trivet(ctx, home, "--token-file", token, "cluster", "backup", file)
	require.Zero(t, code, errs)
	latePID := started(ctx, t, w, ada, late)
	young, youngPID := made(ctx, t, w, ada, "young", images.Disk, true)

	require.NoError(t, w.trio.StopAll())
	w.renewKey("new.key")
	out, err := w.controlplane("restore", "--from", file, "--cluster-key", "new.key", "--data-dir", "restored", "--listen", "127.0.0.1")
	require.NoError(t, err, out)
	require.Contains(t, out, "--leave-cluster "+was.GetCluster())
	// Copy the images' data, which a backup does not contain.
	require.NoError(t, os.CopyFS(w.dir.Path("restored", "images"), os.DirFS(filepath.Join(w.trio.DataDir(1), "images"))))
	w.own(w.dir.Path("restored"))
	w.startWith("restored", "127.0.0.1", "restored")
	g := w.token("127.0.0.1", "restored")
	w.rejoin(ctx, g, was.GetCluster(), node.GetId())

	vm := eventually(ctx, t, g, kept, "the VM runs", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetStatus().GetActualState() == vmv1.VmState_VM_STATE_RUNNING
	})
	require.Equal(t, keptPID, vm.GetStatus().GetHostPid())
	require.Empty(t, vm.GetStatus().GetLastError())

	ref := func(id string) (string, string, string) { return "default", "default", id }
	org, project, id := ref(late)
	vm = eventually(ctx, t, g, late, "the record says that it runs", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetStatus().GetActualState() == vmv1.VmState_VM_STATE_RUNNING
	})
	require.Equal(t, vmv1.VmState_VM_STATE_STOPPED, vm.GetState())
	require.Contains(t, vm.GetStatus().GetLastError(), "restored backup says it is stopped")
	vm, err = g.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	require.Equal(t, vmv1.VmState_VM_STATE_RUNNING, vm.GetState())
	require.Equal(t, latePID, vm.GetStatus().GetHostPid())
	require.Empty(t, vm.GetStatus().GetLastError())

	_, err = g.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: org, ProjectId: project, VmId: young})
	require.Equal(t, codes.NotFound, status.Code(err))
	w.agentSays(ctx, 0, "no record of this VM", "vm="+young, fmt.Sprint("pid=", youngPID))
	log, err := os.ReadFile(w.dir.LogFile("restored"))
	require.NoError(t, err)
	require.Contains(t, string(log), young, "the control plane's log must name the VM without a record")

	// Each VM must have exactly one QEMU, and no guest must have booted a second time.
	for id, pid := range map[string]uint32{kept: keptPID, late: latePID, young: youngPID} {
		w.only(id, pid)
	}
	for _, id := range []string{kept, late} {
		text, err := g.ReadConsole(ctx, id)
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(text, banner))
	}

	// Both VMs must accept commands and start again, although the restored records count fewer starts than the host.
	for id, pid := range map[string]uint32{kept: keptPID, late: latePID} {
		vm, err = g.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: org, ProjectId: project, VmId: id, Force: true})
		require.NoError(t, err)
		require.Equal(t, vmv1.VmState_VM_STATE_STOPPED, vm.GetState())
		vm, err = g.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: project, VmId: id})
		require.NoError(t, err)
		require.Equal(t, vmv1.VmState_VM_STATE_RUNNING, vm.GetState())
		require.NotEqual(t, pid, vm.GetStatus().GetHostPid())
		w.only(id, vm.GetStatus().GetHostPid())
	}

	// When the guest of the VM without a record ends, the agent must not delete its disks.
	require.NoError(t, syscall.Kill(int(youngPID), syscall.SIGKILL))
	w.agentSays(ctx, 0, "step=\"record exit\"", "vm="+young)
	require.DirExists(t, filepath.Join(w.agent.DataDir(), "vms", young))
	w.tenantOf(ctx, t, g, images)
}

// tenantOf checks that a tenant of a restored cloud can log in and create a VM from an image of the backup.
func (w *world) tenantOf(ctx context.Context, t *testing.T, g *lab.GRPC, images lab.GuestImages) {
	ada := &lab.REST{Host: "127.0.0.1"}
	token, err := ada.IssueToken(ctx, "ada", "correct horse", nil)
	require.NoError(t, err)
	ada.Token = token
	answer, err := ada.Do(ctx, 8084, http.MethodPost, "/api/v1/vms", body("next", images.Disk))
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, answer.Status, answer.Raw)
	var vm lab.VM
	require.NoError(t, json.Unmarshal(answer.Data, &vm))
	eventually(ctx, t, g, vm.ID, "the VM is built", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED })
}

// TestForceNewClusterWithAHost kills all members and makes a new cluster from the third with --force-new-cluster. It
// checks that the host can join the new cluster with its old node ID, and that its guest continues to run.
func TestForceNewClusterWithAHost(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(5 * time.Minute)
	id, pid := made(ctx, t, w, ada, "kept", images.Disk, true)
	node, err := w.admin.AwaitNode(ctx, w.agent.Name)
	require.NoError(t, err)
	was, err := w.admin.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	for member := range w.trio.Members {
		require.NoError(t, w.dir.Kill(w.trio.Name(member)))
	}
	w.renewKey("new.key")
	w.startWith("survivor", "127.0.0.3", w.trio.Name(3), "--node-id", "3", "--cluster-key", "new.key", "--force-new-cluster")
	g := w.token("127.0.0.3", w.trio.Name(3))
	log, err := os.ReadFile(w.dir.LogFile("survivor"))
	require.NoError(t, err)
	require.Contains(t, string(log), "--leave-cluster "+was.GetCluster())
	w.rejoin(ctx, g, was.GetCluster(), node.GetId())
	vm := eventually(ctx, t, g, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetStatus().GetActualState() == vmv1.VmState_VM_STATE_RUNNING
	})
	require.Equal(t, pid, vm.GetStatus().GetHostPid())
	w.only(id, pid)
}
