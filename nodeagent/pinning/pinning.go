// Package pinning chooses the host CPUs of VMs with dedicated CPUs. The operator lists the CPUs that are dedicated in the
// configuration of a host. Each of them runs at most one vCPU, and no other thread of a VM. The CPUs of a VM are on one
// NUMA node if possible, because a vCPU accesses the memory of its own node faster.
//
// Package pinning only assigns CPU numbers to VMs. Package qemu sets the affinities of threads.
package pinning

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Highest CPU numbers: of a CPU on which a thread can be fixed (unix.CPUSet), and of a CPU in a list of the kernel.
const (
	maxCPU       = 1023
	maxKernelCPU = 65535
)

// ParseList returns the CPUs in a list such as "2-5,8", sorted, with numbers up to maxCPU. The empty list has no CPUs.
func ParseList(list string) ([]int, error) {
	if list == "" {
		return nil, nil
	}
	return parse(list, maxCPU)
}

// ParseKernelList returns the CPUs in the text of a file of the kernel such as /sys/devices/system/cpu/online, sorted. It
// returns an error if the list is empty.
func ParseKernelList(text string) ([]int, error) { return parse(strings.TrimSpace(text), maxKernelCPU) }

// parse returns the CPUs in a list that is not empty, sorted, with numbers up to highest.
func parse(list string, highest uint64) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.ParseUint(from, 10, 16)
		last, err2 := strconv.ParseUint(to, 10, 16)
		if err != nil || err2 != nil || last < first || last > highest {
			return nil, fmt.Errorf("%q is not a list of CPUs such as 2-5,8 with numbers up to %d", list, highest)
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus), nil
}

// Node is a NUMA node of the host and its CPUs.
type Node struct {
	ID   int
	CPUs []int
}

// ReadNodes returns the NUMA nodes below dir, which is /sys/devices/system/node on a running host, sorted by their IDs.
// It returns none if the kernel does not support NUMA.
func ReadNodes(dir string) ([]Node, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read NUMA nodes: %w", err)
	}
	var nodes []Node
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "node")
		id, err := strconv.Atoi(number)
		if !ok || err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name(), "cpulist"))
		if err != nil {
			return nil, fmt.Errorf("read NUMA nodes: %w", err)
		}
		cpus, err := ParseList(strings.TrimSpace(string(text)))
		if err != nil {
			return nil, fmt.Errorf("read NUMA nodes: %w", err)
		}
		nodes = append(nodes, Node{id, cpus})
	}
	slices.SortFunc(nodes, func(a, b Node) int { return a.ID - b.ID })
	return nodes, nil
}

// NoNode means that the CPUs of a VM are on several NUMA nodes, or that the nodes are unknown.
const NoNode = -1

// choose returns n of the free CPUs, and the NUMA node on which all of them are, or NoNode. It prefers the node on which
// the fewest CPUs stay free, so that other nodes keep room for larger VMs. If no node has n free CPUs, it takes CPUs of
// the nodes with the most free CPUs. It returns no CPUs if fewer than n are free.
func choose(nodes []Node, free []int, n int) (cpus []int, node int) {
	if len(free) < n || n == 0 {
		return nil, NoNode
	}
	var groups []Node
	placed := map[int]bool{}
	for _, node := range nodes {
		group := Node{ID: node.ID}
		for _, cpu := range node.CPUs {
			if slices.Contains(free, cpu) && !placed[cpu] {
				group.CPUs, placed[cpu] = append(group.CPUs, cpu), true
			}
		}
		groups = append(groups, group)
	}
	rest := Node{ID: NoNode} // CPUs without a node
	for _, cpu := range free {
		if !placed[cpu] {
			rest.CPUs = append(rest.CPUs, cpu)
		}
	}
	groups = append(groups, rest)
	slices.SortStableFunc(groups, func(a, b Node) int { return len(a.CPUs) - len(b.CPUs) })
	for _, g := range groups {
		if len(g.CPUs) >= n {
			return slices.Clone(g.CPUs[:n]), g.ID
		}
	}
	slices.Reverse(groups)
	for _, g := range groups {
		cpus = append(cpus, g.CPUs[:min(len(g.CPUs), n-len(cpus))]...)
	}
	slices.Sort(cpus)
	return cpus, NoNode
}

// Pool holds the dedicated CPUs of a host, and which VM uses each of them. Its methods may be called by several
// goroutines. A nil Pool has no CPUs.
type Pool struct {
	nodes []Node
	cpus  []int

	mu   sync.Mutex
	used map[string][]int // by the ID of the VM
}

// NewPool returns a Pool of these CPUs, which no VM uses.
func NewPool(nodes []Node, cpus []int) *Pool {
	return &Pool{nodes: nodes, cpus: cpus, used: map[string][]int{}}
}

// Take assigns n CPUs to a VM, which releases its present ones. It returns the CPUs and their NUMA node, or NoNode if the
// CPUs are on several nodes.
func (p *Pool) Take(vm string, n int) (cpus []int, node int, err error) {
	if p == nil {
		return nil, NoNode, errors.New("the host has no dedicated CPUs")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, vm)
	busy := map[int]bool{}
	for _, cpus := range p.used {
		for _, cpu := range cpus {
			busy[cpu] = true
		}
	}
	var free []int
	for _, cpu := range p.cpus {
		if !busy[cpu] {
			free = append(free, cpu)
		}
	}
	if cpus, node = choose(p.nodes, free, n); cpus == nil {
		return nil, NoNode, fmt.Errorf("the host has %d free dedicated CPUs, %d needed", len(free), n)
	}
	p.used[vm] = cpus
	return slices.Clone(cpus), node, nil
}

// Use records that a running VM uses these CPUs, also if they are not in the pool any more.
func (p *Pool) Use(vm string, cpus []int) {
	if p == nil || len(cpus) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used[vm] = slices.Clone(cpus)
}

// Release records that a VM uses no CPUs.
func (p *Pool) Release(vm string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, vm)
}
