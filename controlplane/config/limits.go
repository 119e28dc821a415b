package config

import (
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/records/budget"
)

// Limits configures how much tenants may write. Use the same values on all members, because those of the leader apply.
// DiskReserve is an exception: each member applies its own value to its own disk.
type Limits struct {
	// Limits are the rate limits of each project: calls_per_second, calls_burst, bytes_per_second and bytes_burst.
	budget.Limits `yaml:",inline"`
	// DiskReserve is a number of bytes. If the file system of the data directory has less free space, tenants' changes
	// are refused. 0 means a twentieth of the file system, at least 512 MiB and at most 4 GiB, but never more than a
	// quarter of the file system. A negative value means no reserve.
	DiskReserve int64 `yaml:"disk_reserve"`
}

func (l *Limits) validate() error { return l.Limits.Validate() }

// flags adds the flags of the settings in Limits to f.
func (l *Limits) flags(f *pflag.FlagSet) {
	f.IntVar(&l.CallsPerSecond, "limits-calls-per-second", l.CallsPerSecond, "changes that a project may make in the long run; 0: no limit. An org has four times as many for all its projects together")
	f.IntVar(&l.CallsBurst, "limits-calls-burst", l.CallsBurst, "changes that a project may make at once after an idle time")
	f.IntVar(&l.BytesPerSecond, "limits-bytes-per-second", l.BytesPerSecond, "bytes of changes that a project may make in the long run; 0: no limit")
	f.IntVar(&l.BytesBurst, "limits-bytes-burst", l.BytesBurst, "bytes of changes that a project may make at once after an idle time")
	f.Int64Var(&l.DiskReserve, "limits-disk-reserve", l.DiskReserve, "free bytes on the data directory's disk below which tenants' changes are refused; 0: a twentieth of the disk, below 0: none")
}
