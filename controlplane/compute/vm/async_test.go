package vm

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestRespondAsync makes each call that waits for a host, with the preference for a response before the host has acted.
// The host reports nothing. The calls must store the change and return at once, and refused calls must return their
// errors.
func TestRespondAsync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.poolHost("h1", 1000)
		ctx, body := metadata.NewIncomingContext(w.as(acme, ""), metadata.Pairs("prefer", "respond-async")), [32]byte{}
		volume := w.volume("data")
		for _, c := range []struct {
			name string
			from cloud.State
			call func(cloud.VMID) (PowerResult, error)
			to   cloud.State
		}{
			{"start", cloud.Stopped, func(id cloud.VMID) (PowerResult, error) { return w.vms.Start(ctx, acme, id, body) }, cloud.Starting},
			{"stop", cloud.Running, func(id cloud.VMID) (PowerResult, error) {
				return w.vms.Stop(ctx, acme, id, time.Minute, body)
			}, cloud.Stopping},
			{"reboot", cloud.Running, func(id cloud.VMID) (PowerResult, error) { return w.vms.Reboot(ctx, acme, id, body) }, cloud.Running},
			{"reset", cloud.Running, func(id cloud.VMID) (PowerResult, error) { return w.vms.Reset(ctx, acme, id, body) }, cloud.Running},
			{"attach", cloud.Running, func(id cloud.VMID) (PowerResult, error) {
				return w.vms.AttachDisk(ctx, acme, id, cloud.Disk{ID: "data", Volume: volume}, body)
			}, cloud.Running},
			{"delete", cloud.Running, func(id cloud.VMID) (PowerResult, error) {
				_, err := w.vms.Delete(ctx, acme, id, true, body)
				return PowerResult{VM: &cloud.VM{State: cloud.Deleted}}, err
			}, cloud.Deleted},
		} {
			vm := w.createInState(c.from, c.name)
			began := time.Now()
			out, err := c.call(vm.ID)
			require.NoError(t, err, c.name)
			require.Zero(t, time.Since(began), c.name)
			require.Equal(t, c.to, out.VM.State, c.name)
			if c.to == cloud.Deleted {
				_, err := w.vms.Get(ctx, acme, vm.ID)
				require.True(t, fault.Is(err, fault.NotFound), "%v", err)
				continue
			}
			now := w.get(vm.ID)
			require.Equal(t, now, out.VM, c.name)
			require.Greater(t, now.Generation, vm.Generation, "%s: the host must get the change", c.name)
		}
		stopped := w.createInState(cloud.Stopped, "off")
		_, err := w.vms.Reboot(ctx, acme, stopped.ID, body)
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	})
}
