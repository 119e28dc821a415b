package cloud

import "strconv"

func itoa(i int) string { return strconv.Itoa(i) }

// NodeState is computed, not stored: from what the record says and when the host was last heard from.
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

// Capacity is an amount of what a host has.
type Capacity struct {
	VCPUs      uint32
	MemoryMiB  uint64
	StorageGiB uint64
}

// Plus adds two amounts.
func (c Capacity) Plus(d Capacity) Capacity {
	return Capacity{c.VCPUs + d.VCPUs, c.MemoryMiB + d.MemoryMiB, c.StorageGiB + d.StorageGiB}
}

// Minus takes d away, never below nothing.
func (c Capacity) Minus(d Capacity) Capacity {
	return Capacity{c.VCPUs - min(c.VCPUs, d.VCPUs), c.MemoryMiB - min(c.MemoryMiB, d.MemoryMiB), c.StorageGiB - min(c.StorageGiB, d.StorageGiB)}
}

// Node is a hypervisor host as recorded. How alive it is stands in the leader's memory.
type Node struct {
	ID           NodeID
	Name         string
	Cordoned     bool
	Capacity     Capacity
	Allocatable  Capacity
	Allocated    Capacity
	Hypervisors  []Hypervisor
	Labels       map[string]string
	AgentVersion string
	// Declared is what the agent says of itself: READY, or NOT_READY when it could not run a guest.
	Declared NodeState
	// CPUModels are the names that a spec may ask for on this host.
	CPUModels       []string
	Architecture    Architecture
	QEMUVersion     string
	VolumeDrivers   []VolumeDriver
	StorageClasses  []string
	SharedMigration bool
	CreatedAt       Time
	UpdatedAt       Time
}

// HeartbeatLost is how long a silence makes a host NOT_READY (milliseconds).
const HeartbeatLost = 15_000

// State is the node's state at now, when it was last heard from at lastSeen (0: not yet).
func (n *Node) State(now, lastSeen Time) NodeState {
	switch {
	case lastSeen == 0 || now-lastSeen > HeartbeatLost || n.Declared == NodeNotReady:
		return NodeNotReady
	case n.Cordoned:
		return NodeCordoned
	}
	return NodeReady
}
