package cloud

import (
	"github.com/trivet-cloud/trivet/shared/fault"
)

// LocalClass is the name of the storage class that exists from the bootstrap of a cluster. It is also the name of the
// class's storage pool.
const LocalClass = "local"

// StorageClass is the record of a storage class. Each volume belongs to one class. After the creation of a class, only
// the field Default changes.
type StorageClass struct {
	Name   string
	Driver VolumeDriver
	// Default is true for the class that volumes get if their creation names no class. It is true for at most one
	// class.
	Default bool
	// Pool is the name of the storage pool in which hosts store the volumes. It is set for the driver MANAGED.
	Pool   string
	Limits Limits
	// Encrypted is true if the volumes of the class are encrypted. It is possible only for the driver MANAGED.
	Encrypted bool `cbor:",omitempty"`
	CreatedAt Time
	UpdatedAt Time
}

// Check returns an InvalidArgument fault if a field that a caller may set is invalid, and FailedPrecondition for a
// driver that this version does not support.
func (c *StorageClass) Check() error {
	if err := CheckName("name", c.Name); err != nil {
		return err
	}
	switch c.Driver {
	case DriverManaged:
	case DriverRBD:
		f := fault.New(fault.FailedPrecondition, "driver: RBD is not supported yet, only MANAGED")
		f.Field = "driver"
		return f
	default:
		return fault.Invalid("driver", "must be MANAGED")
	}
	if c.Encrypted && c.Driver != DriverManaged {
		return fault.Invalid("encrypted", "must be false for this driver: only volumes of the driver MANAGED can be encrypted")
	}
	if err := CheckName("pool", c.Pool); err != nil {
		return err
	}
	for _, l := range []struct {
		field string
		value uint64
	}{{"max_iops", c.Limits.IOPS}, {"max_bytes_per_second", c.Limits.BytesPerSecond}} {
		if l.value > MaxLimit {
			return fault.Invalid(l.field, "must be at most %d, got %d", uint64(MaxLimit), l.value)
		}
	}
	return nil
}

// StoragePool is a directory of a host in which the host stores volumes.
type StoragePool struct {
	Name string
	// AllocatableGiB is the maximum total size of the volumes in the pool.
	AllocatableGiB uint64
	// Encryption is true if the host can make and open encrypted volumes in the pool.
	Encryption bool `cbor:",omitempty"`
}
