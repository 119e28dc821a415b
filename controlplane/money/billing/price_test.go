package billing

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func changeTo(vcpus uint32, mib uint64) vm.Change {
	return vm.Change{CPU: &cloud.CPU{VCPUs: vcpus}, Memory: &cloud.Memory{SizeMiB: mib}}
}

func TestPrices(t *testing.T) {
	for _, c := range []struct {
		prices Prices
		use    Use
		want   int64
	}{
		{Prices{}, Use{2, 1024, 10, 0}, 0},
		{Prices{10, 4, 1, 0}, Use{}, 0},
		{Prices{10, 4, 1, 0}, Use{2, 512, 5, 0}, 27},
		{Prices{10, 4, 1, 0}, Use{0, 0, 5, 0}, 5},
		{Prices{0, 1, 0, 0}, Use{1, 64, 0, 0}, 1},   // a sixteenth is rounded up to 1
		{Prices{0, 1, 0, 0}, Use{1, 1024, 0, 0}, 1}, // exactly 1
		{Prices{0, 1, 0, 0}, Use{1, 1025, 0, 0}, 2}, // 1/1024 more is rounded up to 2
		{Prices{0, 100, 0, 0}, Use{1, 1536, 0, 0}, 150},
		{Prices{0, 1000, 0, 0}, Use{1, 1, 0, 0}, 1},
		{Prices{10, 4, 1, 3}, Use{0, 0, 0, 7}, 21},
		{Prices{0, 0, 0, MaxPrice}, Use{VolumeGiB: cloud.MaxDiskGiB}, cloud.MaxDiskGiB * MaxPrice},
		{Prices{MaxPrice, MaxPrice, MaxPrice, 0}, Use{cloud.MaxVCPUs, cloud.MaxMemoryMiB, cloud.MaxDisks * cloud.MaxDiskGiB, 0},
			(cloud.MaxVCPUs + cloud.MaxMemoryMiB/1024 + cloud.MaxDisks*cloud.MaxDiskGiB) * MaxPrice},
	} {
		require.Equal(t, c.want, c.prices.Hour(c.use), "%+v of %+v", c.use, c.prices)
	}
}

// TestUseOfEveryState checks for which resources a VM is charged in every state.
func TestUseOfEveryState(t *testing.T) {
	want := map[cloud.State]Use{
		cloud.Running: {2, 512, 5, 0}, cloud.Migrating: {2, 512, 5, 0},
		cloud.Stopped: {DiskGiB: 5}, cloud.Starting: {DiskGiB: 5}, cloud.Stopping: {DiskGiB: 5}, cloud.Error: {DiskGiB: 5},
	}
	for s := cloud.Unspecified; s <= cloud.Deleted; s++ {
		require.Equal(t, want[s], UseOf(&cloud.VM{State: s, Spec: small("x").Spec}), s)
	}
}

func TestRules(t *testing.T) {
	for says, r := range map[string]Rules{
		"without any price":                {Enabled: true},
		"disk_gib_hour must be 0 to":       {Prices: Prices{DiskGiBHour: MaxPrice + 1}},
		"volume_gib_hour must be 0 to":     {Prices: Prices{VolumeGiBHour: -1}},
		"memory_gib_hour must be 0 to":     {Prices: Prices{MemoryGiBHour: -1}},
		`on_empty must be keep or stop`:    {OnEmpty: "kill"},
		"must be 1s to 1h, got 1ms":        {Hour: time.Millisecond},
		"must be 1s to 1h, got 2h0m0s":     {Hour: 2 * time.Hour},
		"must be 1s to 1h, got 1.0000001s": {Hour: time.Second + 100},
	} {
		require.ErrorContains(t, r.Check(), says)
	}
	for _, r := range []Rules{{}, on, strict, {OnEmpty: Keep, Hour: time.Second}} {
		require.NoError(t, r.Check())
	}
}
