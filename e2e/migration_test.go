package e2e

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// migrate moves a running guest to another host, while a user has its serial console open. Then it moves the guest back,
// and upgrades the agents of both hosts meanwhile. The guest must keep its memory, and another guest must reach it at the
// same address. The console must continue on the other host.
func (c *networkCloud) migrate(m, peer *machine, host int) {
	home := m.host
	_, err := c.vms.UpdateVm(c.context(time.Minute), &vmv1.UpdateVmRequest{
		VmId: m.vm.GetId(), Labels: map[string]string{"trivet/node-selector": ""}, // which boot has set
	})
	require.NoError(c.t, err)
	ip := m.nic.Address.Addr().String()
	// Until the end of the first move, the other guest sends numbers on a connection and pings.
	m.run("sleep 300 2>/dev/null </dev/null | timeout 300 nc -l -p 5000 >/tmp/received 2>/dev/null &")
	peer.run("(i=0; while [ ! -e /tmp/moved ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo end) 2>/dev/null </dev/null | " +
		"timeout 300 nc " + ip + " 5000 >/dev/null 2>&1 &\nping -i 0.2 " + ip + " >/tmp/pings 2>&1 </dev/null & echo $! >/tmp/ping")
	m.eventually("the connection is open", "grep -q 3 /tmp/received")
	peer.eventually("the ping is answered", "grep -q ' seq=3 ' /tmp/pings")
	boot := m.run("echo kept >/tmp/mark && cat /proc/sys/kernel/random/boot_id")
	console := c.startCommand(c.context(5*time.Minute), "vm", "console", m.vm.GetName())
	console.types("run echo out-$((40+2))")
	console.prints(c.context(time.Minute), "OUT out-42")
	for _, to := range []int{host, home} {
		ctx := c.context(3 * time.Minute)
		_, err := c.vms.MigrateVm(ctx, &vmv1.MigrateVmRequest{VmId: m.vm.GetId(), DestinationNodeId: c.ids[to]})
		require.NoError(c.t, err)
		if to == home {
			c.upgradeAgents(ctx, m, to)
		}
		require.NoError(c.t, lab.Until(ctx, "the VM runs on the other host", func(ctx context.Context) error {
			vm, err := c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: m.vm.GetId()})
			if err == nil && (vm.GetState() != vmv1.VmState_VM_STATE_RUNNING || vm.GetNodeId() != c.ids[to]) {
				err = fmt.Errorf("it is %v on %s: %s", vm.GetState(), vm.GetNodeId(), vm.GetStatus().GetLastError())
			}
			return err
		}))
		m.host = to
		m.eventually("the guest has kept its memory", "grep -q kept /tmp/mark")
		require.Equal(c.t, boot, m.run("cat /proc/sys/kernel/random/boot_id"), "the guest did not boot again")
		if to == host {
			answered := peer.run("grep -c ' seq=' /tmp/pings")
			peer.eventually("the ping goes on", "[ $(grep -c ' seq=' /tmp/pings) -gt "+answered+" ]")
			peer.run("touch /tmp/moved")
			m.eventually("the connection goes on", "grep -q end /tmp/received")
			// The lines are 0, 1, 2 and so on, and end.
			m.run("awk '$1 != NR-1 && $1 != \"end\" {exit 1}' /tmp/received")
			console.prints(ctx, "connected again")
			console.types("run echo out-$((40+3))")
			console.prints(ctx, "OUT out-43")
			require.NoError(c.t, console.in.Close())
			console.finish(ctx)
			require.Contains(c.t, console.errs.String(), "has moved to another host")
			require.Equal(c.t, 1, strings.Count(console.out.String(), "OUT out-42"), "no output is shown twice")
			c.t.Log(peer.run("kill -INT $(cat /tmp/ping); sleep 1; tail -n 3 /tmp/pings"))
		}
		peer.eventually("another guest reaches it", "ping -c 1 -W 2 "+ip)
	}
}

// types sends a line to the command.
func (c *runningCommand) types(line string) {
	c.w.t.Helper()
	_, err := io.WriteString(c.in, line+"\n")
	require.NoError(c.w.t, err)
}

// upgradeAgents kills the agents of the first two hosts as soon as the source of a migration has paused the guest, and
// starts another binary for each. The migration cannot end while no agent runs. The new agents must complete it.
func (c *networkCloud) upgradeAgents(ctx context.Context, m *machine, target int) {
	binary, err := os.ReadFile(c.hosts[target].Bin.NodeAgent)
	require.NoError(c.t, err)
	next := c.dir.Path("trivet-nodeagent-next")
	// Bytes after the end of an ELF file are ignored.
	require.NoError(c.t, os.WriteFile(next, append(binary, "another binary"...), 0o755))
	for missing := true; missing; {
		require.NoError(c.t, ctx.Err(), "the source does not pause the guest")
		time.Sleep(2 * time.Millisecond)
		_, err := os.Stat(filepath.Join(c.hosts[1-target].DataDir(), "vms", m.vm.GetId(), "migrating"))
		missing = err != nil
	}
	for _, h := range []int{target, 1 - target} {
		c.dir.Signal(c.hosts[h].Name, syscall.SIGKILL)
	}
	for _, h := range []int{target, 1 - target} {
		require.NoError(c.t, c.dir.Kill(c.hosts[h].Name))
	}
	vm, err := c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: m.vm.GetId()})
	require.NoError(c.t, err)
	require.Equal(c.t, vmv1.VmState_VM_STATE_MIGRATING, vm.GetState())
	for _, h := range []int{target, 1 - target} {
		c.hosts[h].Bin.NodeAgent = next
		require.NoError(c.t, c.hosts[h].Start(""))
	}
}

// TestMigration moves a guest with a network interface between two hosts, and drains its host: see migrate and drain.
// Then it moves a guest with a disk with some of the failures of TestMigrationFaults.
func TestMigration(t *testing.T) {
	c := newNetworkCloud(t, 2)
	_, subnets := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24")
	subnet := subnets[0]
	a := c.boot("a", 0, &vmv1.NetworkSpec{SubnetId: subnet})
	b := c.boot("b", 1, &vmv1.NetworkSpec{SubnetId: subnet})
	c.migrate(a, b, 1)
	c.drain(a, b, 1)
	g := c.newFaultyGuest("faulty", subnet, localDisk)
	for _, x := range []cell{cellOf("target QEMU", "commit"), cellOf("source agent", "switch"), cellOf("leader", "transfer")} {
		c.run(x.String(), func(*testing.T) { g.strike(x) })
	}
}
