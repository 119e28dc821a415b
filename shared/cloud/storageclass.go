package cloud

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"net/netip"
	"regexp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// LocalClass is the name of the storage class that exists from the bootstrap of a cluster. It is also the name of the
// class's storage pool.
const LocalClass = "local"

// StorageClass is the record of a storage class. Each volume belongs to one class. The fields Name, Driver, Pool and
// Encrypted, and the cluster and the pool in RBD, never change.
type StorageClass struct {
	Name        string
	Description string `cbor:",omitempty"`
	Driver      VolumeDriver
	// Default is true for the class that volumes get if their creation names no class. It is true for at most one
	// class.
	Default bool
	// Pool is the name of the storage pool in which hosts store the volumes. It is set for the driver MANAGED.
	Pool string
	// RBD is the Ceph pool in which hosts store the volumes. It is set for the driver RBD.
	RBD    *RBDPool `cbor:",omitempty"`
	Limits Limits
	// Encrypted is true if the volumes of the class are encrypted.
	Encrypted bool `cbor:",omitempty"`
	CreatedAt Time
	UpdatedAt Time
	// Changes counts the changes of Limits and RBD. Applied is the number of these changes that the leader has applied
	// to the volumes of the class.
	Changes uint64 `cbor:",omitempty"`
	Applied uint64 `cbor:",omitempty"`
}

// Check returns an InvalidArgument fault if a field that a caller may set is invalid.
func (c *StorageClass) Check() error {
	if err := CheckName("name", c.Name); err != nil {
		return err
	}
	switch c.Driver {
	case DriverManaged:
		if c.RBD != nil {
			return fault.Invalid("rbd", "must not be set for the driver MANAGED")
		}
		if err := CheckName("pool", c.Pool); err != nil {
			return err
		}
	case DriverRBD:
		if c.Pool != "" {
			return fault.Invalid("pool", "must not be set for the driver RBD: rbd.pool names the Ceph pool")
		}
		if err := c.RBD.check(); err != nil {
			return err
		}
	default:
		return fault.Invalid("driver", "must be MANAGED or RBD")
	}
	if err := CheckDescription(c.Description); err != nil {
		return err
	}
	return c.Limits.check()
}

// ClassUpdate is a change of a storage class. A field that is nil or empty changes nothing.
type ClassUpdate struct {
	Default        *bool
	Description    *string
	IOPS           *uint64 // 0 removes the limit
	BytesPerSecond *uint64 // 0 removes the limit
	// Monitors, User and SealedKey replace those of RBD. They must be empty for the driver MANAGED.
	Monitors  []string
	User      string
	SealedKey []byte // encrypted with the cluster key, as in RBDPool
}

// changesRBD reports whether u changes how hosts connect to the Ceph cluster.
func (u *ClassUpdate) changesRBD() bool {
	return len(u.Monitors) > 0 || u.User != "" || len(u.SealedKey) > 0
}

// Update applies a change to the class, and reports whether the class changed. It returns InvalidArgument if a field of
// the change is invalid. After an error, the caller must not store the class. A key counts as a change even if it
// equals the present key, because encrypted keys cannot be compared.
func (c *StorageClass) Update(u ClassUpdate) (changed bool, err error) {
	before := *c
	if u.Default != nil {
		c.Default = *u.Default
	}
	if u.Description != nil {
		c.Description = *u.Description
	}
	if u.IOPS != nil {
		c.Limits.IOPS = *u.IOPS
	}
	if u.BytesPerSecond != nil {
		c.Limits.BytesPerSecond = *u.BytesPerSecond
	}
	if u.changesRBD() {
		if c.RBD == nil {
			return false, fault.Invalid("rbd", "must not be set: storage class %s has the driver %s", c.Name, c.Driver.Variant())
		}
		p := *c.RBD
		p.Monitors, p.User = slices.Clone(p.Monitors), cmp.Or(u.User, p.User)
		if len(u.Monitors) > 0 {
			p.Monitors = slices.Clone(u.Monitors)
		}
		if len(u.SealedKey) > 0 {
			p.SealedKey = u.SealedKey
		} else if p.User != before.RBD.User {
			return false, fault.Invalid("rbd.key", "is required with another rbd.user")
		}
		c.RBD = &p
	}
	if err := c.Check(); err != nil {
		return false, err
	}
	if c.Limits != before.Limits || c.RBD != nil && !c.RBD.equal(before.RBD) {
		c.Changes++
	}
	return c.Changes != before.Changes || c.Default != before.Default || c.Description != before.Description, nil
}

// equal reports whether the fields of p and q are equal.
func (p *RBDPool) equal(q *RBDPool) bool {
	return p.FSID == q.FSID && p.Pool == q.Pool && p.User == q.User && slices.Equal(p.Monitors, q.Monitors) &&
		bytes.Equal(p.SealedKey, q.SealedKey)
}

// RBDPool names a pool of a Ceph cluster, and the Ceph user with which hosts connect to the cluster.
type RBDPool struct {
	FSID     string   // ID of the cluster, a UUID
	Monitors []string // each an IP address and a port
	Pool     string
	User     string // without "client."
	// SealedKey is the key of the user, encrypted with the cluster key.
	SealedKey []byte
}

const (
	// maxMonitors is the maximum number of monitors of a Ceph cluster.
	maxMonitors = 16
	// monitorPort is the default port of a monitor: the port of version 2 of Ceph's protocol.
	monitorPort = 3300
)

var cephName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}$`)

// check returns an InvalidArgument fault if a field is invalid or p is nil. It adds monitorPort to the addresses of
// monitors that have no port.
func (p *RBDPool) check() error {
	if p == nil {
		return fault.Invalid("rbd", "is required for the driver RBD")
	}
	if err := CheckUUID("rbd.fsid", p.FSID); err != nil {
		return err
	}
	if len(p.Monitors) == 0 || len(p.Monitors) > maxMonitors {
		return fault.Invalid("rbd.monitors", "1 to %d addresses, got %d", maxMonitors, len(p.Monitors))
	}
	for i, text := range p.Monitors {
		if addr, err := netip.ParseAddr(text); err == nil {
			p.Monitors[i] = netip.AddrPortFrom(addr, monitorPort).String()
		} else if at, err := netip.ParseAddrPort(text); err != nil || at.Port() == 0 {
			return fault.Invalid("rbd.monitors", "%.100q is not an IP address with or without a port, such as 192.0.2.1 or 192.0.2.1:3300", text)
		}
	}
	for field, name := range map[string]string{"rbd.pool": p.Pool, "rbd.user": p.User} {
		if !cephName.MatchString(name) {
			return fault.Invalid(field, "must be 1 to 96 characters of A-Z a-z 0-9 . _ - and not begin with .")
		}
	}
	return nil
}

// CheckCephKey returns an InvalidArgument fault if text cannot be the key of a Ceph user. The text of the fault does
// not contain the key.
func CheckCephKey(text string) error {
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw) < 16 || len(raw) > 256 {
		return fault.Invalid("rbd.key", "is not the key of a Ceph user, as `ceph auth get-key` prints it")
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
	// ID is the random ID that is stored in the directory. Two hosts have the same directory if the IDs are equal. ID
	// is empty if the agent is of a version that does not report it.
	ID string `cbor:",omitempty"`
	// Shared is true if other hosts use the directory too.
	Shared bool `cbor:",omitempty"`
}
