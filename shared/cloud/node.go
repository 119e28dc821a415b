package cloud

import (
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

func itoa(i int) string { return strconv.Itoa(i) }

// NodeState is the state of a host. It is not stored, but computed from the host's record and the time of its last
// heartbeat.
type NodeState uint8

const (
	NodeUnspecified NodeState = iota
	NodeReady
	NodeNotReady
	NodeCordoned
	NodeDraining
	NodeMaintenance
)

func (s NodeState) String() string {
	return [...]string{"UNSPECIFIED", "READY", "NOT_READY", "CORDONED", "DRAINING", "MAINTENANCE"}[min(s, NodeMaintenance)]
}

// Capacity is an amount of each resource of a host. It is used for the resources that a host has, offers to VMs or has
// allocated to VMs.
type Capacity struct {
	VCPUs      uint32
	MemoryMiB  uint64 // without HugepagesMiB
	StorageGiB uint64
	// HugepagesMiB is memory in huge pages of 2 MiB. A host reserves them at its boot, and they cannot be used as other
	// memory.
	HugepagesMiB uint64 `cbor:",omitempty"`
	// DedicatedVCPUs are vCPUs that share their CPU of the host with nothing. They are not part of VCPUs.
	DedicatedVCPUs uint32 `cbor:",omitempty"`
}

// Plus returns c + d, field by field.
func (c Capacity) Plus(d Capacity) Capacity {
	return Capacity{c.VCPUs + d.VCPUs, c.MemoryMiB + d.MemoryMiB, c.StorageGiB + d.StorageGiB, c.HugepagesMiB + d.HugepagesMiB,
		c.DedicatedVCPUs + d.DedicatedVCPUs}
}

// Minus returns c − d, field by field, with 0 in place of negative results.
func (c Capacity) Minus(d Capacity) Capacity {
	return Capacity{
		c.VCPUs - min(c.VCPUs, d.VCPUs), c.MemoryMiB - min(c.MemoryMiB, d.MemoryMiB), c.StorageGiB - min(c.StorageGiB, d.StorageGiB),
		c.HugepagesMiB - min(c.HugepagesMiB, d.HugepagesMiB), c.DedicatedVCPUs - min(c.DedicatedVCPUs, d.DedicatedVCPUs),
	}
}

// AllVCPUs returns the vCPUs with and without dedicated CPUs.
func (c Capacity) AllVCPUs() uint64 { return uint64(c.VCPUs) + uint64(c.DedicatedVCPUs) }

// AllMemoryMiB returns the memory in pages of every size.
func (c Capacity) AllMemoryMiB() uint64 { return c.MemoryMiB + c.HugepagesMiB }

// Free returns the resources of the host that are not allocated.
func (n *Node) Free() Capacity {
	return n.AllAllocatable().Minus(n.Allocated)
}

// AllAllocatable returns Allocatable with the huge pages and the dedicated CPUs of the host.
func (n *Node) AllAllocatable() Capacity {
	all := n.Allocatable
	all.HugepagesMiB, all.DedicatedVCPUs = n.HugepagesMiB, n.DedicatedCPUs
	return all
}

// Node is the record of a hypervisor host. The time of its last heartbeat is only in the leader's memory.
type Node struct {
	ID          NodeID
	Name        string
	Cordoned    bool
	Capacity    Capacity
	Allocatable Capacity // without HugepagesMiB and DedicatedVCPUs, because heartbeats do not contain them
	Allocated   Capacity
	// HugepagesMiB is the memory that the host has reserved as huge pages of 2 MiB. DedicatedCPUs is the number of CPUs
	// that VMs with dedicated CPUs can use.
	HugepagesMiB  uint64 `cbor:",omitempty"`
	DedicatedCPUs uint32 `cbor:",omitempty"`
	Hypervisors   []Hypervisor
	Labels        map[string]string
	AgentVersion  string
	// MetricsURL is the URL at which Prometheus reaches the agent's metrics, without a path, or empty if it cannot.
	MetricsURL string `cbor:",omitempty"`
	// BootID is the boot ID of the host's kernel, or empty if the agent has not reported it.
	BootID string `cbor:",omitempty"`
	// Declared is the state that the agent reports: READY, or NOT_READY if it cannot run guests.
	Declared NodeState
	// CPUModels are the CPU models that a VM on this host may have.
	CPUModels      []string
	Architecture   Architecture
	QEMUVersion    string
	VolumeDrivers  []VolumeDriver
	StorageClasses []string
	// StoragePools are the pools for volumes that the host serves.
	StoragePools []StoragePool `cbor:",omitempty"`
	// PoolAllocated is the total size in GiB of the volumes that are bound to the host, by pool. It does not include
	// volumes of shared pools (see volume.SharedPool).
	PoolAllocated map[string]uint64 `cbor:",omitempty"`
	// RBD is true if guests of the host can use RBD images. RBDProblem is the reason if RBD is false.
	RBD             bool   `cbor:",omitempty"`
	RBDProblem      string `cbor:",omitempty"`
	RBDEncryption   bool   `cbor:",omitempty"` // the host can make and open encrypted RBD volumes
	LiveMigration   bool   `cbor:",omitempty"` // the host's agent can take part in live migrations
	SharedMigration bool
	// Features has the features of virtual machines that the agent knows, such as FeatureUEFI. The value is the reason why
	// the host does not support the feature, or empty if the host supports it.
	Features map[string]string `cbor:",omitempty"`
	// Drain is the last drain of the host, or nil if there was none since the host was uncordoned. A host with a drain is
	// also Cordoned.
	Drain     *Drain `cbor:",omitempty"`
	CreatedAt Time
	UpdatedAt Time
}

// PoolShortage returns a text that says why volumes of another gib GiB do not fit in a pool of the host. It returns ""
// if they fit. allocated is the size in GiB that is allocated in the pool: for a shared pool by all hosts together, and
// otherwise PoolAllocated.
func (n *Node) PoolShortage(pool string, gib, allocated uint64) string {
	p := n.storagePool(pool)
	if p == nil {
		return "does not serve the storage pool " + pool
	}
	if free := p.AllocatableGiB - min(p.AllocatableGiB, allocated); gib > free {
		return fmt.Sprintf("has %d GiB free in the storage pool %s, %d needed", free, pool, gib)
	}
	return ""
}

// LacksEncryption returns the reason why the host cannot encrypt volumes in a pool, or "" if it can. The text is the
// predicate of a sentence whose subject is the host. LacksEncryption also returns "" if the host has no such pool.
func (n *Node) LacksEncryption(pool string) string {
	if p := n.storagePool(pool); p != nil && !p.Encryption {
		return "cannot encrypt volumes in the storage pool " + pool + ": its agent is too old"
	}
	return ""
}

// RBDShortage returns the reason why the host cannot use RBD volumes, or RBD volumes of an encrypted class if encrypted
// is true. It returns "" if the host can. The text is the predicate of a sentence whose subject is the host.
func (n *Node) RBDShortage(encrypted bool) string {
	switch {
	case n.RBD && encrypted && !n.RBDEncryption:
		return "cannot encrypt RBD volumes: its agent is too old"
	case n.RBD:
		return ""
	case n.RBDProblem == "":
		return "does not serve RBD volumes"
	}
	return "does not serve RBD volumes: " + n.RBDProblem
}

// AllocatePool adds gib GiB, which may be negative, to the allocated space of a pool of the host.
func (n *Node) AllocatePool(pool string, gib int64) {
	all := maps.Clone(n.PoolAllocated)
	if all == nil {
		all = map[string]uint64{}
	}
	if left := int64(all[pool]) + gib; left > 0 {
		all[pool] = uint64(left)
	} else {
		delete(all, pool)
	}
	n.PoolAllocated = all
}

// HeartbeatTimeout is the time, in milliseconds, after which a host without a heartbeat is NOT_READY.
const HeartbeatTimeout = 15_000

// AddressLease is how long a host answers for addresses that another host can take over, counted from the time at which
// it sent the last heartbeat that a member has acknowledged. Such addresses are those of NAT gateways that are on one
// host, and the floating IPs of service IPs. The leader gives such an address to another host only HeartbeatTimeout
// after the last heartbeat has arrived, so the host has three seconds to withdraw the address.
const AddressLease = (HeartbeatTimeout - 3_000) * time.Millisecond

// State returns the node's state at the time now. lastSeen is the time of the node's last heartbeat, or 0 if there was
// none. A host that sends no heartbeats is NOT_READY, also while it is drained or in maintenance. If it sends heartbeats,
// DRAINING and MAINTENANCE take precedence over the state that its agent declares.
func (n *Node) State(now, lastSeen Time) NodeState {
	switch {
	case lastSeen == 0 || now-lastSeen > HeartbeatTimeout:
		return NodeNotReady
	case n.Draining() && !mutant.On(mutant.PlaceOnDraining):
		return NodeDraining
	case n.InMaintenance():
		return NodeMaintenance
	case n.Declared == NodeNotReady:
		return NodeNotReady
	case n.Cordoned && !mutant.On(mutant.PlaceOnDraining):
		return NodeCordoned
	}
	return NodeReady
}
