//go:build long

package e2e

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestLostHosts loses hosts of a cloud with ten VMs on RBD volumes. First the host with all VMs is switched off. Then a
// host is cut off from the control plane. Then two hosts are switched off at once, and the third one has room for only
// four of the VMs. In each part, VMs must run on other hosts with all acknowledged writes, no VM may have processes on
// two hosts, and a host that comes back must remove the VMs that it lost.
func TestLostHosts(t *testing.T) {
	const count, room = 10, 4
	c := newRBDCloud(t, func(n int, agent *lab.Agent, helper string) {
		agent.RBDHelper, agent.GID = helper, 599_000+n
	})
	ctx := c.context(60 * time.Minute)
	c.createClass(ctx, "ceph")
	s := c.newLostStory(ctx, 1, count, 128)
	s.write(s.vms)
	s.switchOff(1)
	s.write(s.vms)
	s.cutOff(2)
	s.limit(2, room)
	s.write(s.vms)
	s.loseTwo(1, 3, 2, room)
	s.end()
}

// switchOff switches off a host, and switches it on when its VMs run elsewhere.
func (s *lostStory) switchOff(host int) {
	vms := s.at(host)
	began := time.Now()
	require.NoError(s.t, s.hosts[host-1].PowerOff(s.ctx))
	s.stopped(vms)
	s.elsewhere(vms, began, host)
	s.kept(vms)
	s.t.Logf("all guests have booted %v after the loss", time.Since(began).Round(100*time.Millisecond))
	require.NoError(s.t, s.hosts[host-1].Start(""))
	s.back(host)
}

// cutOff drops all packets of a host to members. The host must end its VMs before they start elsewhere.
func (s *lostStory) cutOff(host int) {
	vms := s.at(host)
	require.NotEmpty(s.t, vms)
	began := time.Now()
	heal, err := s.hosts[host-1].Cut()
	require.NoError(s.t, err)
	require.NoError(s.t, lab.Until(s.ctx, "the host has ended its VMs", func(context.Context) error {
		for _, vm := range vms {
			if s.hosts[host-1].Guest(vm.id) != 0 {
				return errors.New(vm.name + " has a process")
			}
		}
		return nil
	}))
	s.stopped(vms)
	s.elsewhere(vms, began, host)
	s.t.Logf("the host has ended its %d VMs %v after it was cut off", len(vms), s.runners.lastEnd(host, vms).Sub(began).Round(100*time.Millisecond))
	s.kept(vms)
	require.NoError(s.t, heal())
	s.back(host)
}

// limit starts the agent of a host without VMs again, so that the host has room for only so many VMs.
func (s *lostStory) limit(host, room int) {
	agent := s.hosts[host-1]
	require.Empty(s.t, s.at(host))
	require.NoError(s.t, s.dir.Stop(agent.Name, 12*time.Second))
	list, err := s.admin.Nodes.ListNodes(s.ctx, &vmv1.ListNodesRequest{})
	require.NoError(s.t, err)
	for _, n := range list.GetNodes() {
		if s.nodes[n.GetId()] == host {
			agent.VCPUs = float64(room) / float64(n.GetCapacity().GetVcpus())
		}
	}
	require.NoError(s.t, agent.Start(""))
	require.NoError(s.t, agent.Healthy(s.ctx))
}

// loseTwo switches off two hosts at once. Of their VMs, only those with the highest priorities find room on the host
// left. The others must wait, and say why. When one of the hosts is back, they must run again.
func (s *lostStory) loseTwo(one, two, left, room int) {
	var all []*lostVM // those of both hosts in turn
	for a, b := s.at(one), s.at(two); len(a)+len(b) > 0; a, b = b, a {
		if len(a) > 0 {
			all, a = append(all, a[0]), a[1:]
		}
	}
	high, low := all[:room], all[room:]
	for _, vm := range all {
		priority := "10"
		if slices.Contains(high, vm) {
			priority = "90"
		}
		s.update(vm, nil, map[string]string{"trivet/ha": "restart", "trivet/ha-priority": priority})
	}
	began := time.Now()
	for _, host := range []int{one, two} {
		require.NoError(s.t, s.hosts[host-1].PowerOff(s.ctx))
	}
	s.stopped(s.vms)
	s.elsewhere(high, began, one, two)
	s.t.Logf("high priority: %s; low priority: %s", names(high), names(low))
	for _, vm := range low {
		// The VM first waits until another host has ended the attachments of its volumes.
		now := eventually(s.ctx, s.t, s.admin, vm.id, vm.name+" waits for a host", func(now *vmv1.VirtualMachine) bool {
			return now.GetState() == vmv1.VmState_VM_STATE_PENDING && strings.Contains(now.GetStatus().GetLastError(), "waits for a host: no host fits")
		})
		s.t.Logf("%s: %s", vm.name, now.GetStatus().GetLastError())
	}
	s.kept(high)
	require.NoError(s.t, s.hosts[one-1].Start(""))
	s.elsewhere(low, began)
	s.kept(low)
	require.NoError(s.t, s.hosts[two-1].Start(""))
	s.back(two)
}
