package cloud

import (
	"strconv"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits are the maximum I/O operations and bytes per second of a volume. Reads and writes count together. 0 means no
// limit.
type Limits struct {
	IOPS           uint64
	BytesPerSecond uint64
}

// MaxLimit is the greatest allowed limit of I/O operations or bytes per second. It is the greatest limit that QEMU
// accepts.
const MaxLimit = 1_000_000_000_000_000

// check returns an InvalidArgument fault if a limit is above MaxLimit.
func (l Limits) check() error {
	for _, one := range []struct {
		field string
		value uint64
	}{{"max_iops", l.IOPS}, {"max_bytes_per_second", l.BytesPerSecond}} {
		if one.value > MaxLimit {
			return fault.Invalid(one.field, "must be at most %d, got %d", uint64(MaxLimit), one.value)
		}
	}
	return nil
}

// Limits returns the limits that apply to the volume. Each of them is the lower one of the class's limit and the limit
// in the volume's metadata.
func (v *Volume) Limits() Limits {
	return Limits{
		lower(v.ClassLimits.IOPS, v.Metadata[MaxIOPS]), lower(v.ClassLimits.BytesPerSecond, v.Metadata[MaxBytesPerSecond]),
	}
}

// lower returns the number in text if that number is lower than limit, and limit otherwise. 0 and "" mean no limit.
func lower(limit uint64, text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == 0 || limit != 0 && limit < n {
		return limit
	}
	return n
}

// SetClassLimits sets the limits of the volume's class, and reports whether they have changed. It increments the
// generation if the limits that apply to the volume have changed.
func (v *Volume) SetClassLimits(l Limits) (changed bool) {
	if v.ClassLimits == l {
		return false
	}
	before := v.Limits()
	v.ClassLimits = l
	if v.Limits() != before {
		v.Generation++
	}
	return true
}
