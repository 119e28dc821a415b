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

// TestVolumesAreReported checks that each change of a volume is reported once, and all volumes again at the beginning
// of a stream.
func TestVolumesAreReported(t *testing.T) {
	wake := make(chan struct{}, 1)
	l := newVolumeObservations(wake)
	a, b := cloud.VolumeObservation{Volume: "a", Generation: 1, Present: true}, cloud.VolumeObservation{Volume: "b", Error: strings.Repeat("x", 2000)}
	l.observe(a)
	l.observe(b)
	<-wake
	batch := l.nextBatch()
	require.Len(t, batch, 2)
	require.True(t, batch[0].GetPresent())
	require.Len(t, batch[1].GetError(), 1024)
	l.observe(a)
	require.Empty(t, l.nextBatch(), "the state is the same")
	require.Empty(t, wake)
	l.forget("b")
	l.queueAll()
	require.Len(t, l.nextBatch(), 1)
}
