package machine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestDedicatedCPUs starts VMs with a dedicated CPU on a host that has one such CPU. Only one VM at a time may have it,
// also after the agent was restarted.
func TestDedicatedCPUs(t *testing.T) {
	l := newLab(t)
	l.stop()
	l.dedicated = []int{1}
	l.start()
	dedicated := func(n int) *agentv1.AssignedVm {
		want := on(l.vm(n))
		want.DedicatedCpus = true
		return want
	}
	first, second := dedicated(1), dedicated(2)
	l.assign(first)
	l.sees(first, cloud.ObservedRunning)
	l.stop()
	l.start()
	l.assign(first, second)
	o := l.sees(second, cloud.ObservedEnded)
	require.True(t, strings.Contains(o.LastError, "the host has 0 free dedicated CPUs, 1 needed"), o.LastError)

	first = off(first, 0)
	l.assign(first, second)
	l.sees(first, cloud.ObservedBuilt)
	second = on(second)
	l.assign(first, second)
	l.sees(second, cloud.ObservedRunning)
}
