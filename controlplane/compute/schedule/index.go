package schedule

import (
	"cmp"
	"hash/fnv"
	"maps"
	"math/bits"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Index holds the hosts of the cloud for Place. Methods that change the index must not be called at the same time as
// other methods. Place changes nothing, and may be called concurrently.
type Index struct {
	hosts   map[cloud.NodeID]*host
	byClass map[classKey]*class
	classes []*class
	// labels has the hosts with each label, by key and value, sorted by ring position.
	labels map[string]map[string][]*host
}

// NewIndex returns an index without hosts.
func NewIndex() *Index {
	return &Index{hosts: map[cloud.NodeID]*host{}, byClass: map[classKey]*class{}, labels: map[string]map[string][]*host{}}
}

// host is a host of the index.
type host struct {
	node     cloud.Node
	lastSeen cloud.Time
	free     cloud.Capacity
	position uint64 // on the ring
	class    *class
	cell     *cell
}

// class is a set of hosts with the same classKey: hosts of about equal size, whose other fields of it are equal.
type class struct {
	classKey
	models []string
	cells  []classCell
	byFree map[[3]uint8]*cell
}

// classKey identifies a class. The sizes of its hosts are between least and most.
type classKey struct {
	least, most  cloud.Capacity
	architecture cloud.Architecture
	kvm          bool
	models       string // separated by commas
	// ready is true if the agents report that they can run VMs, and accelerated if they run VMs with KVM and not under
	// TCG. Only BaselineCPU uses them.
	ready, accelerated bool
}

// cell is the set of those hosts of a class that have the same parts free: the free twentieths of vCPUs, memory,
// storage.
type cell struct {
	free  [3]uint8
	hosts []*host // sorted by ring position
}

// classCell is a cell of a class, with a copy of its free parts, so that a search reads the cells of a class in order.
type classCell struct {
	free [3]uint8
	*cell
}

// levels is the number of parts into which the size of a resource is divided.
const levels = 20

// Put adds a host, or replaces it. lastSeen is the time of its last heartbeat, 0 if it has sent none.
func (ix *Index) Put(n *cloud.Node, lastSeen cloud.Time) {
	h := ix.hosts[n.ID]
	if h != nil {
		h.leaveCell()
		if !maps.Equal(h.node.Labels, n.Labels) {
			ix.removeLabels(h)
			h.node.Labels = n.Labels
			ix.addLabels(h)
		}
	} else {
		h = &host{position: ringPosition(string(n.ID))}
		h.node.ID, h.node.Labels = n.ID, n.Labels
		ix.hosts[n.ID] = h
		ix.addLabels(h)
	}
	sameModels := h.class != nil && slices.Equal(h.class.models, n.CPUModels)
	h.node, h.lastSeen = *n, lastSeen
	h.free = n.Free()
	key := classKey{
		architecture: n.Architecture, kvm: slices.Contains(n.Hypervisors, cloud.KVM), ready: n.Declared == cloud.NodeReady,
		accelerated: n.Labels[cloud.AcceleratorLabel] == cloud.AcceleratorKVM,
	}
	if sameModels {
		key.models = h.class.classKey.models
	} else {
		key.models = strings.Join(n.CPUModels, ",")
	}
	key.least, key.most = sizeRange(n.Allocatable)
	if h.class == nil || h.class.classKey != key {
		if h.class != nil {
			ix.dropClass(h.class)
		}
		h.class = ix.classOf(key, n.CPUModels)
	}
	h.enterCell()
}

// Seen sets the time of a host's last heartbeat. It does nothing if the index does not have the host.
func (ix *Index) Seen(id cloud.NodeID, at cloud.Time) {
	if h := ix.hosts[id]; h != nil {
		h.lastSeen = at
	}
}

// Allocate adds c to the allocated capacity of a host. It does nothing if the index does not have the host.
func (ix *Index) Allocate(id cloud.NodeID, c cloud.Capacity) {
	ix.allocated(id, cloud.Capacity.Plus, c)
}

// Free subtracts c from the allocated capacity of a host. It does nothing if the index does not have the host.
func (ix *Index) Free(id cloud.NodeID, c cloud.Capacity) { ix.allocated(id, cloud.Capacity.Minus, c) }

func (ix *Index) allocated(id cloud.NodeID, op func(a, b cloud.Capacity) cloud.Capacity, c cloud.Capacity) {
	h := ix.hosts[id]
	if h == nil {
		return
	}
	h.node.Allocated = op(h.node.Allocated, c)
	h.free = h.node.Free()
	if h.cell.free == h.freeParts() {
		return
	}
	h.leaveCell()
	h.enterCell()
}

// Remove removes a host, if the index has it.
func (ix *Index) Remove(id cloud.NodeID) {
	if h := ix.hosts[id]; h != nil {
		h.leaveCell()
		ix.dropClass(h.class)
		ix.removeLabels(h)
		delete(ix.hosts, id)
	}
}

// Clear removes all hosts.
func (ix *Index) Clear() { *ix = *NewIndex() }

// BaselineCPU returns the CPU model for VMs that request none: cloud.BaselineCPU of the hosts with the architecture arch,
// or of all hosts if arch is unspecified. Hosts that cannot run VMs according to their agents do not count. If there are
// hosts with KVM, hosts without KVM do not count either, because they offer other models.
func (ix *Index) BaselineCPU(arch cloud.Architecture) string {
	var offers, emulated [][]string
	for _, c := range ix.classes {
		switch {
		case !c.ready || c.otherArchitecture(&Request{Architecture: arch}):
		case c.accelerated:
			offers = append(offers, c.models)
		default:
			emulated = append(emulated, c.models)
		}
	}
	if len(offers) == 0 {
		offers = emulated
	}
	return cloud.BaselineCPU(offers)
}

// Len returns the number of hosts.
func (ix *Index) Len() int { return len(ix.hosts) }

func (ix *Index) addLabels(h *host) {
	for k, v := range h.node.Labels {
		if ix.labels[k] == nil {
			ix.labels[k] = map[string][]*host{}
		}
		ix.labels[k][v] = insert(ix.labels[k][v], h)
	}
}

func (ix *Index) removeLabels(h *host) {
	for k, v := range h.node.Labels {
		if left := remove(ix.labels[k][v], h); len(left) > 0 {
			ix.labels[k][v] = left
			continue
		}
		delete(ix.labels[k], v)
		if len(ix.labels[k]) == 0 {
			delete(ix.labels, k)
		}
	}
}

// classOf returns the class with this key, and creates it if needed.
func (ix *Index) classOf(key classKey, models []string) *class {
	c := ix.byClass[key]
	if c == nil {
		c = &class{classKey: key, models: slices.Clone(models), byFree: map[[3]uint8]*cell{}}
		ix.byClass[key] = c
		ix.classes = append(ix.classes, c)
	}
	return c
}

// dropClass removes a class if it has no hosts.
func (ix *Index) dropClass(c *class) {
	if len(c.cells) == 0 {
		delete(ix.byClass, c.classKey)
		ix.classes = slices.DeleteFunc(ix.classes, func(one *class) bool { return one == c })
	}
}

func (c *class) otherArchitecture(r *Request) bool {
	return r.Architecture != cloud.ArchUnspecified && c.architecture != r.Architecture
}

func (c *class) lacksModel(r *Request) bool {
	return r.CPUModel != "" && !slices.Contains(c.models, r.CPUModel)
}

// freeParts returns how many twentieths of each resource are free, rounded down. A resource that the host does not have
// counts as completely free, because only VMs that do not need this resource can be placed there.
func (h *host) freeParts() (parts [3]uint8) {
	all := h.node.Allocatable
	for i, r := range [3][2]uint64{
		{uint64(h.free.VCPUs), uint64(all.VCPUs)}, {h.free.MemoryMiB, all.MemoryMiB}, {h.free.StorageGiB, all.StorageGiB},
	} {
		if parts[i] = levels; r[1] > 0 {
			parts[i] = uint8(r[0] * levels / r[1])
		}
	}
	return parts
}

func (h *host) enterCell() {
	free := h.freeParts()
	in := h.class.byFree[free]
	if in == nil {
		in = &cell{free: free}
		h.class.byFree[free] = in
		h.class.cells = append(h.class.cells, classCell{free, in})
	}
	in.hosts = insert(in.hosts, h)
	h.cell = in
}

// leaveCell removes the host from its cell, and the cell from its class if the cell is empty.
func (h *host) leaveCell() {
	if mutant.On(mutant.KeepOldCell) && len(h.cell.hosts) > 1 {
		return
	}
	h.cell.hosts = remove(h.cell.hosts, h)
	if len(h.cell.hosts) > 0 {
		return
	}
	delete(h.class.byFree, h.cell.free)
	i := slices.IndexFunc(h.class.cells, func(c classCell) bool { return c.cell == h.cell })
	h.class.cells = slices.Delete(h.class.cells, i, i+1)
}

// classNeed holds the amounts of each resource that a VM needs on the hosts of one class.
type classNeed struct {
	// twentieths are the parts of each resource that the VM takes, rounded down.
	twentieths [3]uint8
	// least has the twentieths of each resource that must be free. A host with so much free can still have too little,
	// because the parts are rounded. 255 means that no host of the class has enough.
	least [3]uint8
}

func (c *class) need(need cloud.Capacity) (out classNeed) {
	for i, r := range [3][3]uint64{
		{uint64(need.VCPUs), uint64(c.least.VCPUs), uint64(c.most.VCPUs)},
		{need.MemoryMiB, c.least.MemoryMiB, c.most.MemoryMiB},
		{need.StorageGiB, c.least.StorageGiB, c.most.StorageGiB},
	} {
		want, least, most := r[0], r[1], r[2]
		if least > 0 {
			out.twentieths[i] = uint8(min(want*levels/least, levels))
		}
		switch {
		case want == 0:
		case want > most:
			out.least[i] = 255
		default:
			out.least[i] = uint8((want*levels+most-1)/most - 1)
		}
	}
	return out
}

// level returns how many twentieths of a host's scarcest resource stay free if the VM is placed on the host. The
// parameter free has the parts that are free now.
func (n *classNeed) level(free [3]uint8) int {
	left := levels
	for i := range free {
		left = min(left, int(free[i])-int(n.twentieths[i]))
	}
	return max(left, 0)
}

// mayCover reports whether a host with these parts free may have enough of each resource.
func (n *classNeed) mayCover(free [3]uint8) bool {
	return free[0] >= n.least[0] && free[1] >= n.least[1] && free[2] >= n.least[2]
}

// sizeRange returns the range of sizes of the class of hosts with the size c. In each resource the range has all sizes
// that are equal to c in their four most significant bits.
func sizeRange(c cloud.Capacity) (least, most cloud.Capacity) {
	round := func(v uint64) (uint64, uint64) {
		low := max(bits.Len64(v), 4) - 4
		return v >> low << low, v | (1<<low - 1)
	}
	vcpus, maxVCPUs := round(uint64(c.VCPUs))
	least.VCPUs, most.VCPUs = uint32(vcpus), uint32(maxVCPUs)
	least.MemoryMiB, most.MemoryMiB = round(c.MemoryMiB)
	least.StorageGiB, most.StorageGiB = round(c.StorageGiB)
	return least, most
}

// ringPosition returns the position of a host or VM on the ring.
func ringPosition(id string) uint64 {
	f := fnv.New64a()
	f.Write([]byte(id))
	// The finalizer of MurmurHash3. Without it, similar IDs have similar positions.
	x := f.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// insert adds a host to a slice that is sorted by position and ID.
func insert(hosts []*host, h *host) []*host {
	i, _ := slices.BinarySearchFunc(hosts, h, byPosition)
	return slices.Insert(hosts, i, h)
}

func remove(hosts []*host, h *host) []*host {
	if i, found := slices.BinarySearchFunc(hosts, h, byPosition); found {
		return slices.Delete(hosts, i, i+1)
	}
	return hosts
}

func byPosition(a, b *host) int {
	return cmp.Or(cmp.Compare(a.position, b.position), cmp.Compare(a.node.ID, b.node.ID))
}
