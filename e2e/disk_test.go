package e2e

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestBootFromEveryBus checks that a VM boots by BIOS from a disk on each bus and with each cache mode. The small
// guest's kernel has no AHCI driver, so for SATA only the firmware reads the disk.
func TestBootFromEveryBus(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(4 * time.Minute)
	var wg sync.WaitGroup
	for bus, cache := range map[string]string{"virtio": "none", "scsi": "writethrough", "ide": "writeback", "sata": "writeback"} {
		wg.Go(func() {
			b := body("boots-"+bus, images.Disk)
			d := b["disks"].([]any)[0].(map[string]any)
			d["bus"], d["cache"] = bus, cache
			// The VM must not boot from this blank disk, although it is the first in the list.
			b["disks"] = []any{map[string]any{"id": "data", "source": map[string]any{"type": "blank"}, "size_gib": 1, "boot_index": 7}, d}
			var vm lab.VM
			if err := ada.Call(ctx, "POST", "/api/v1/vms", b, &vm); err != nil {
				t.Error(bus, err)
				return
			}
			if err := ada.Call(ctx, "POST", "/api/v1/vms/"+vm.ID+"/start", nil, nil); err != nil {
				t.Error(bus, err)
				return
			}
			line, err := w.admin.Console(ctx, vm.ID, banner, 1)
			if err != nil {
				t.Error(bus, err)
			}
			t.Logf("%s: %s", bus, line)
		})
	}
	wg.Wait()
	require.False(t, t.Failed())
}
