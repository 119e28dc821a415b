package main

import (
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/budget"
)

// Limits bound what tenants may write. Give all members the same: the leader's count.
type Limits struct {
	// Limits are the budgets of each project: calls_per_second, calls_burst, bytes_per_second and bytes_burst.
	budget.Limits `yaml:",inline"`
	// DiskReserve is the free space in bytes of the data directory's file system below which tenants' changes are refused.
	// 0 is a twentieth of the file system, at least 512 MiB (but never more than a quarter) and at most 4 GiB; below 0 none.
	DiskReserve int64 `yaml:"disk_reserve"`
}

func (l *Limits) validate() error { return l.Limits.Validate() }

// flags binds the limits to flags.
func (l *Limits) flags(f *pflag.FlagSet) {
	f.IntVar(&l.CallsPerSecond, "limits-calls-per-second", l.CallsPerSecond, "changes that a project may make, for as long as it may be; 0: no limit. An org has four times as many for all its projects")
	f.IntVar(&l.CallsBurst, "limits-calls-burst", l.CallsBurst, "changes that a project may make at once after a quiet time")
	f.IntVar(&l.BytesPerSecond, "limits-bytes-per-second", l.BytesPerSecond, "bytes of changes that a project may make, for as long as it may be; 0: no limit")
	f.IntVar(&l.BytesBurst, "limits-bytes-burst", l.BytesBurst, "bytes of changes that a project may make at once after a quiet time")
	f.Int64Var(&l.DiskReserve, "limits-disk-reserve", l.DiskReserve, "free bytes on the data directory's disk below which tenants' changes are refused; 0: a twentieth of the disk, below 0: none")
}
