package facts

import (
	"fmt"
	"math"
)

// Overcommit is by how much more than it has a host may promise. A field left 0 means 1: not at all. Less than 1 keeps
// a part back.
type Overcommit struct {
	VCPUs   float64
	Memory  float64
	Storage float64
}

// MaxOvercommit is the largest factor taken for sane.
const MaxOvercommit = 1000

// Validate refuses factors that are negative, not numbers, or above [MaxOvercommit].
func (o Overcommit) Validate() error {
	for _, f := range []struct {
		name  string
		value float64
	}{{"vcpus", o.VCPUs}, {"memory", o.Memory}, {"storage", o.Storage}} {
		if !(f.value >= 0 && f.value <= MaxOvercommit) { // false for NaN too
			return fmt.Errorf("overcommit.%s is %v, want 0 (not at all) to %d", f.name, f.value, MaxOvercommit)
		}
	}
	return nil
}

// Allocatable is what may be placed on a host: (capacity − reserve) × overcommit, each resource by itself, rounded down.
// A reserve above the capacity leaves nothing. A factor that [Overcommit.Validate] refuses counts as 1.
func Allocatable(capacity, reserve Resources, over Overcommit) Resources {
	return Resources{
		VCPUs:      uint32(min(math.MaxUint32, promise(uint64(capacity.VCPUs), uint64(reserve.VCPUs), over.VCPUs))),
		MemoryMiB:  promise(capacity.MemoryMiB, reserve.MemoryMiB, over.Memory),
		StorageGiB: promise(capacity.StorageGiB, reserve.StorageGiB, over.Storage),
	}
}

func promise(have, reserve uint64, factor float64) uint64 {
	if have <= reserve {
		return 0
	}
	left := have - reserve
	if factor == 1 || !(factor > 0 && factor <= MaxOvercommit) {
		return left
	}
	// 100 × 1.15 is 114.99999999999999 in binary, and who wrote 1.15 expects 115.
	const rounding = 1 + 1e-12
	product := float64(left) * factor * rounding
	if product >= math.MaxUint64 {
		return math.MaxUint64
	}
	return uint64(product)
}
