//go:build long

package e2e

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestLostHosts loses hosts of a cloud with ten VMs on RBD volumes. First the host with all VMs is switched off. Then a
// host is cut off from the control plane. In both parts, the VMs must run on other hosts with all acknowledged writes, no
// VM may have processes on two hosts, and a host that comes back must remove the VMs that it lost.
func TestLostHosts(t *testing.T) {
	const count = 10
	c := newRBDCloud(t, func(n int, agent *lab.Agent, helper string) {
		agent.RBDHelper, agent.GID = helper, 599_000+n
	})
	ctx := c.context(40 * time.Minute)
	c.createClass(ctx, "ceph")
	s := c.newLostStory(ctx, 1, count, 128)
	s.write(s.vms)
	s.switchOff(1)
	s.write(s.vms)
	s.cutOff(2)
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
