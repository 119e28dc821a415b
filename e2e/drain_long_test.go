//go:build long

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// parallelMoves is the number of VMs that leave a drained host at a time: drain.Parallel.
const parallelMoves = 2

// TestDrainOfManyVMs drains a host with 20 running VMs while a tenant creates and deletes VMs. A quarter of the VMs have
// a volume in a Ceph cluster. All calls must succeed. The VMs must move, at most parallelMoves at a time, and keep their
// memory and their data. The reported progress must only increase. One more VM, which may run only on the drained host,
// must be named with the reason and stay RUNNING.
func TestDrainOfManyVMs(t *testing.T) {
	const count = 20
	c, ceph := newCephCloud(t)
	_, subnets := c.vpc("prod", "10.0.0.0/16", "10.0.1.0/24")
	nic := func() *vmv1.NetworkSpec { return &vmv1.NetworkSpec{SubnetId: subnets[0]} }
	peer, fixed := c.boot("peer", 1, nic()), c.boot("fixed", 0, nic())
	var guests []*machine
	for i := range count {
		name := fmt.Sprintf("guest-%02d", i)
		guests = append(guests, c.begin(name, 0, func(r *vmv1.CreateVmRequest) {
			if i%4 == 0 {
				r.Spec.Disks = []*vmv1.DiskSpec{ceph.create(name)}
			}
		}, nic()))
	}
	boots := map[*machine]string{}
	for _, m := range guests {
		m.waitForBoot()
		_, err := c.vms.UpdateVm(c.context(time.Minute), &vmv1.UpdateVmRequest{
			VmId: m.vm.GetId(), Labels: map[string]string{"trivet/node-selector": ""}, // which boot has set
		})
		require.NoError(t, err)
		boots[m] = m.run("echo " + m.vm.GetName() + " >/tmp/mark && cat /proc/sys/kernel/random/boot_id")
		if len(m.vm.GetSpec().GetDisks()) > 0 {
			m.run("echo " + m.vm.GetName() + " | dd of=/dev/vda bs=512 conv=sync,fsync")
		}
	}

	ctx := c.context(20 * time.Minute)
	stopLoad := c.createAndDelete(ctx, c.ids[1], false)
	_, err := c.admin.Nodes.DrainNode(ctx, &vmv1.DrainNodeRequest{NodeId: c.ids[0]})
	require.NoError(t, err)
	began := time.Now()
	c.followDrain(ctx, count)
	t.Logf("%d VMs have left the host after %v", count, time.Since(began).Round(100*time.Millisecond))
	stopLoad()
	for _, m := range guests {
		m.host = 1
		name := m.vm.GetName()
		m.eventually(name+" has kept its memory", "grep -q "+name+" /tmp/mark")
		require.Equal(t, boots[m], m.run("cat /proc/sys/kernel/random/boot_id"), "%s did not boot again", name)
		if len(m.vm.GetSpec().GetDisks()) > 0 {
			m.run("dd if=/dev/vda bs=512 count=1 iflag=direct | grep -q " + name)
			m.run("echo again | dd of=/dev/vda bs=512 conv=sync,fsync")
		}
		peer.eventually("another guest reaches "+name, "ping -c 1 -W 2 "+m.nic.Address.Addr().String())
	}
	fixed.run("true")
	_, err = c.admin.Operator.CancelDrain(ctx, &operatorv1.CancelDrainRequest{NodeId: c.ids[0]})
	require.NoError(t, err)
}

// followDrain waits until count VMs have left the first host, and the VM "fixed" is named with the reason for which it
// cannot move. It checks each report on the way: every VM is listed, no VM that has moved is listed as not moved, and
// at most parallelMoves VMs move. It also checks that each VM is RUNNING or MIGRATING.
func (c *networkCloud) followDrain(ctx context.Context, count int) {
	c.t.Helper()
	moved, most := map[string]bool{}, 0
	require.NoError(c.t, lab.Until(ctx, "the VMs have left the host", func(ctx context.Context) error {
		out, err := c.admin.Operator.GetDrain(ctx, &operatorv1.GetDrainRequest{NodeId: c.ids[0]})
		require.NoError(c.t, err)
		vms := out.GetDrain().GetVms()
		require.Len(c.t, vms, count+1)
		moving, reason := 0, ""
		for _, vm := range vms {
			name, state := vm.GetName(), vm.GetStatus()
			switch {
			case name == "fixed":
				reason = vm.GetReason()
			case state == "MOVED":
				require.Equal(c.t, c.hosts[1].Name, vm.GetTo(), name)
				moved[name] = true
			default:
				require.False(c.t, moved[name], "%s is %s after it was MOVED", name, state)
				require.Contains(c.t, []string{"WAITING", "MOVING"}, state, "%s: %s", name, vm.GetReason())
				require.LessOrEqual(c.t, vm.GetSentBytes(), vm.GetTotalBytes(), name)
			}
			if state == "MOVING" {
				moving++
			}
		}
		require.LessOrEqual(c.t, moving, parallelMoves)
		most = max(most, moving)
		list, err := c.vms.ListVms(ctx, &vmv1.ListVmsRequest{PageSize: 100})
		require.NoError(c.t, err)
		for _, vm := range list.GetVms() {
			if !strings.HasPrefix(vm.GetName(), "load-") {
				require.Contains(c.t, []vmv1.VmState{vmv1.VmState_VM_STATE_RUNNING, vmv1.VmState_VM_STATE_MIGRATING}, vm.GetState(), vm.GetName())
			}
		}
		if len(moved) < count || !strings.Contains(reason, "no host fits") {
			return fmt.Errorf("%d of %d VMs have moved; fixed: %q", len(moved), count, reason)
		}
		return nil
	}))
	require.Equal(c.t, parallelMoves, most, "VMs move side by side")
}
