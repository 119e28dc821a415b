package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestEvictHost evicts and bans a host that runs a guest, and lets the host join again. It checks that the guest
// continues to run meanwhile, as one process that has booted once, and that a host without VMs is evicted for good.
func TestEvictHost(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(3 * time.Minute)
	home := t.TempDir()
	admin := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(admin, []byte(w.adminToken), 0o600))
	node := func(args ...string) (out, errs string, code int) {
		return w.trivet(ctx, home, append([]string{"--token-file", admin, "--endpoint", "127.0.0.2", "node"}, args...)...)
	}
	must := func(args ...string) string {
		t.Helper()
		out, errs, code := node(args...)
		require.Zero(t, code, out+errs)
		return out
	}
	tokenFile := w.dir.Path(w.agent.Name + ".join")
	writeToken := func() { require.NoError(t, os.WriteFile(tokenFile, []byte(must("token")), 0o600)) }
	id, pid := made(ctx, t, w, ada, "web", images.Disk, true)
	n, err := w.admin.AwaitNode(ctx, w.agent.Name)
	require.NoError(t, err)
	first := n.GetId()

	_, errs, code := node("evict", w.agent.Name)
	require.NotZero(t, code)
	require.Contains(t, errs, "1 VMs are placed on node "+first)
	require.Contains(t, errs, "/web. Move them", "the error must name the VM")

	// Evict the host. Its guest must continue to run, also after a restart of the agent, and the VM must stay placed on
	// the host.
	restart := func() (said int) {
		t.Helper()
		require.NoError(t, w.dir.Stop(w.agent.Name, 12*time.Second))
		log, err := os.ReadFile(w.dir.LogFile(w.agent.Name))
		require.NoError(t, err)
		require.NoError(t, w.agent.Start(""))
		return len(log)
	}
	must("evict", w.agent.Name, "--force")
	w.agentSays(ctx, 0, "evicted from its cluster")
	w.agentSays(ctx, 0, "the join token was refused")
	w.only(id, pid)
	said := restart()
	w.agentSays(ctx, said, "evicted from its cluster")
	said = w.agentSays(ctx, said, "the join token was refused")
	w.only(id, pid)
	vm, err := w.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", ProjectId: "default", VmId: id})
	require.NoError(t, err)
	require.Equal(t, first, vm.GetNodeId())

	// With a new token, the host must join under its old ID, with its guest.
	writeToken()
	said = w.agentSays(ctx, said, "msg=connected", "node="+first)
	eventually(ctx, t, w.admin, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetStatus().GetHostPid() == pid
	})
	w.only(id, pid)
	must("uncordon", first)

	// While the host is banned, it must not be able to join with any token. After the ban it must connect without one.
	require.Contains(t, must("ban", w.agent.Name, "--reason", "a test"), "a test")
	said = w.agentSays(ctx, said, "banned from its cluster")
	writeToken()
	w.agentSays(ctx, said, "the join token was refused", "banned")
	said = restart()
	w.agentSays(ctx, said, "banned from its cluster")
	w.only(id, pid)
	require.Contains(t, must("bans", "-o", "wide"), first)
	must("unban", first)
	said = restart()
	said = w.agentSays(ctx, said, "msg=connected", "node="+first)
	w.only(id, pid)
	text, err := w.admin.ReadConsole(ctx, id)
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(text, banner), "the guest must have booted once")

	// A host without VMs must be removed by an eviction. It then joins under a new ID, with the token that was refused
	// during the ban and is still valid.
	require.NoError(t, ada.Call(ctx, "POST", "/api/v1/vms/"+id+"/stop", nil, nil))
	// Try repeatedly: the member that has reported the VM as stopped may be ahead of the leader, which refuses to
	// delete a running VM.
	require.NoError(t, lab.Until(ctx, "the VM is deleted", func(ctx context.Context) error {
		return ada.Call(ctx, "DELETE", "/api/v1/vms/"+id, nil, nil)
	}))
	must("evict", first)
	w.agentSays(ctx, said, "evicted from its cluster")
	w.agentSays(ctx, said, "msg=connected")
	require.NotContains(t, must("list", "-o", "wide"), first)
	n, err = w.admin.AwaitNode(ctx, w.agent.Name)
	require.NoError(t, err)
	require.NotEqual(t, first, n.GetId())
}
