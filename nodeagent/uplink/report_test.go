package uplink

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestManyVMsFitTheMessages checks that 5000 VMs with long errors are each reported once, in messages that a member
// accepts: at most 1000 observations and 1 MiB.
func TestManyVMsFitTheMessages(t *testing.T) {
	const vms = 5000
	l := newObservations()
	for n := range vms {
		l.observe(cloud.Observation{
			VM: cloud.VMID(fmt.Sprintf("00000000-0000-7000-b000-%012d", n)), Observed: cloud.ObservedEnded,
			LastError: strings.Repeat("QEMU ended – ", 2000), Addresses: []string{"10.0.0.1"},
		})
	}
	reported := map[string]bool{}
	for batch := l.nextBatch(); batch != nil; batch = l.nextBatch() {
		require.LessOrEqual(t, len(batch), 1000)
		require.Less(t, proto.Size(&agentv1.ReportRequest{Vms: batch}), 1<<20)
		for _, o := range batch {
			require.False(t, reported[o.GetVmId()])
			reported[o.GetVmId()] = true
		}
	}
	require.Len(t, reported, vms)
}
