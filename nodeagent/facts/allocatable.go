package facts

import (
	"fmt"
	"math"
)

// Overcommit holds the factors by which placement may exceed the host's resources. 0 means 1: no overcommit. With a
// factor below 1, a part of the resources is never used.
type Overcommit struct {
	VCPUs   float64
	Memory  float64
	Storage float64
}

// MaxOvercommit is the largest factor that [Overcommit.Validate] accepts.
const MaxOvercommit = 1000

// Validate returns an error for factors that are negative, not numbers, or above [MaxOvercommit].
func (o Overcommit) Validate() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"vcpus", o.VCPUs}, {"memory", o.Memory}, {"storage", o.Storage}} {
		if !(f.value >= 0 && f.value <= MaxOvercommit) { // so NaN is an error too
			return fmt.Errorf("overcommit.%s is %v, want 0 (not at all) to %d", f.name, f.value, MaxOvercommit)
		}
	}
	return nil
}

// Allocatable returns the resources that may be placed on a host: (capacity − reserve) × overcommit for each resource,
// rounded down. If the reserve exceeds the capacity, the result is 0. A factor that [Overcommit.Validate] rejects
// counts as 1.
func Allocatable(capacity, reserve Resources, over Overcommit) Resources {
	return Resources{
		VCPUs:      uint32(min(math.MaxUint32, allocatable(uint64(capacity.VCPUs), uint64(reserve.VCPUs), over.VCPUs))),
		MemoryMiB:  allocatable(capacity.MemoryMiB, reserve.MemoryMiB, over.Memory),
		StorageGiB: allocatable(capacity.StorageGiB, reserve.StorageGiB, over.Storage),
	}
}

func allocatable(have, reserve uint64, factor float64) uint64 {
	if have <= reserve {
		return 0
	}
	left := have - reserve
	if factor == 1 || !(factor > 0 && factor <= MaxOvercommit) {
		return left
	}
	// rounding compensates for binary fractions: 100 × 1.15 is 114.99999999999999, but a user who configures 1.15
	// expects 115.
	const rounding = 1 + 1e-12
	product := float64(left) * factor * rounding
	if product >= math.MaxUint64 {
		return math.MaxUint64
	}
	return uint64(product)
}
