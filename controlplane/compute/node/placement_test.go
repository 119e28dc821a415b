package node

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestHeartbeatsDoNotWaitForSearches blocks a search for a host. Heartbeats with and without changes must be
// acknowledged meanwhile, and the next search must see the changes.
func TestHeartbeatsDoNotWaitForSearches(t *testing.T) {
	w := newWorld(t)
	a, b := w.host(1, 1), w.host(1, 2)
	w.follow(1)
	ctx, s := limited(t), w.members[1]
	_, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.Place(&schedule.Request{VM: testVM(1)}).Node == a.id }, 10*time.Second, time.Millisecond)

	var once sync.Once
	searching, release, placed := make(chan struct{}), make(chan struct{}), make(chan schedule.Decision, 1)
	go func() {
		placed <- s.Place(&schedule.Request{VM: testVM(1), Check: func(*cloud.Node) string {
			once.Do(func() { close(searching); <-release })
			return ""
		}})
	}()
	<-searching
	w.pass(time.Duration(minUpdateInterval) * time.Millisecond)
	_, err = b.HeartbeatNode(ctx, sendHeartbeat(b))
	require.NoError(t, err)
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a, func(r *vmv1.HeartbeatNodeRequest) { r.Labels["rack"] = "2" }))
	require.NoError(t, err)
	close(release)
	require.Equal(t, a.id, (<-placed).Node)
	require.Eventually(t, func() bool {
		onB := s.Place(&schedule.Request{VM: testVM(1), On: b.id})
		onRack := s.Place(&schedule.Request{VM: testVM(1), Selector: map[string]string{"rack": "2"}})
		return onB.Node == b.id && onRack.Node == a.id
	}, 10*time.Second, time.Millisecond)
}
