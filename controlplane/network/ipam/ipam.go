// Package ipam assigns the IPv4 addresses of a subnet or of an address pool, lowest free address first.
//
// A Range is stored as a tree of bitmaps with 256 bits per node. In a leaf, a bit is set if the address is assigned. In
// an inner node, a bit is set if the child has no free address. Assigning or releasing an address reads at most one
// node per level, which is 2 for a /16 and 3 for a /8, and writes an inner node only if a child becomes full or ceases
// to be full. The cost does not depend on how many addresses are assigned.
//
// The package does no I/O: the caller stores the nodes, in the same transaction as the record that uses the address.
// Network address, gateway and broadcast address are ordinary addresses here. The caller assigns them when it creates
// the subnet.
package ipam

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
)

// Errors of Assign, AssignLowest and Release. ErrOutside is a mistake of the caller, who must check addresses first.
var (
	ErrFull       = errors.New("no address is free")
	ErrAssigned   = errors.New("the address is already assigned")
	ErrUnassigned = errors.New("the address is not assigned")
	ErrOutside    = errors.New("the address is outside of the range")
)

// fanout is the number of bits in a node.
const fanout = 256

// Node is a bitmap of 256 bits.
type Node [fanout / 64]uint64

// NodeID identifies a node within its range. Level 0 has the leaves.
type NodeID struct {
	Level uint8
	Index uint32
}

// Nodes stores the nodes of one range. Get returns the zero Node for an ID that was never set.
type Nodes interface {
	Get(NodeID) (Node, error)
	Set(NodeID, Node) error
}

// Range is a contiguous range of IPv4 addresses.
type Range struct {
	first uint32
	size  uint64
}

// NewRange returns the range from first to last, both included. It returns an error unless both are IPv4 addresses in
// this order.
func NewRange(first, last netip.Addr) (Range, error) {
	if !first.Is4() || !last.Is4() || last.Less(first) {
		return Range{}, fmt.Errorf("%s to %s is not a range of IPv4 addresses", first, last)
	}
	return Range{first: number(first), size: uint64(number(last)-number(first)) + 1}, nil
}

// RangeOf returns all addresses of an IPv4 prefix.
func RangeOf(p netip.Prefix) (Range, error) {
	p = p.Masked()
	if !p.IsValid() || !p.Addr().Is4() {
		return Range{}, fmt.Errorf("%s is not an IPv4 prefix", p)
	}
	return Range{first: number(p.Addr()), size: 1 << (32 - p.Bits())}, nil
}

// Size returns the number of addresses in the range.
func (r Range) Size() uint64 { return r.size }

// Assign marks an address as assigned. It returns ErrAssigned or ErrOutside.
func (r Range) Assign(nodes Nodes, a netip.Addr) error {
	offset, err := r.offset(a)
	if err != nil {
		return err
	}
	return r.set(nodes, offset)
}

// AssignLowest assigns the lowest free address and returns it. It returns ErrFull if there is none.
func (r Range) AssignLowest(nodes Nodes) (netip.Addr, error) {
	index := uint32(0)
	for level := r.top(); ; level-- {
		n, err := nodes.Get(NodeID{level, index})
		if err != nil {
			return netip.Addr{}, err
		}
		bit, ok := n.lowestFree(r.children(level, index))
		switch {
		case !ok && level == r.top():
			return netip.Addr{}, ErrFull
		case !ok:
			return netip.Addr{}, fmt.Errorf("node %d of level %d is full, but its parent says that it is not", index, level)
		}
		index = index*fanout + bit
		if level == 0 {
			return address(r.first + index), r.set(nodes, index)
		}
	}
}

// Release marks an address as free. It returns ErrUnassigned or ErrOutside.
func (r Range) Release(nodes Nodes, a netip.Addr) error {
	offset, err := r.offset(a)
	if err != nil {
		return err
	}
	for level := uint8(0); level <= r.top(); level++ {
		id, bit := NodeID{level, offset / fanout}, offset%fanout
		n, err := nodes.Get(id)
		if err != nil {
			return err
		}
		if !n.has(bit) {
			if level == 0 {
				return ErrUnassigned
			}
			return nil // the child was not full, so its ancestors have free addresses already
		}
		n.clear(bit)
		if err := nodes.Set(id, n); err != nil {
			return err
		}
		offset = id.Index
	}
	return nil
}

// IsAssigned reports whether an address is assigned. It returns ErrOutside.
func (r Range) IsAssigned(nodes Nodes, a netip.Addr) (bool, error) {
	offset, err := r.offset(a)
	if err != nil {
		return false, err
	}
	n, err := nodes.Get(NodeID{0, offset / fanout})
	return n.has(offset % fanout), err
}

// set sets the bit of an address and those of the ancestors that become full.
func (r Range) set(nodes Nodes, offset uint32) error {
	for level := uint8(0); level <= r.top(); level++ {
		id, bit := NodeID{level, offset / fanout}, offset%fanout
		n, err := nodes.Get(id)
		if err != nil {
			return err
		}
		if n.has(bit) {
			return ErrAssigned
		}
		n.add(bit)
		if err := nodes.Set(id, n); err != nil {
			return err
		}
		if _, free := n.lowestFree(r.children(level, id.Index)); free {
			return nil
		}
		offset = id.Index
	}
	return nil
}

// top returns the level of the root.
func (r Range) top() (level uint8) {
	for n := r.size; n > fanout; n = (n + fanout - 1) / fanout {
		level++
	}
	return level
}

// children returns how many bits a node uses: fewer than 256 at the end of the range.
func (r Range) children(level uint8, index uint32) uint32 {
	count := r.size // of nodes or addresses one level below
	for range level {
		count = (count + fanout - 1) / fanout
	}
	return uint32(min(fanout, count-uint64(index)*fanout))
}

func (r Range) offset(a netip.Addr) (uint32, error) {
	if !a.Is4() || number(a) < r.first || uint64(number(a)-r.first) >= r.size {
		return 0, ErrOutside
	}
	return number(a) - r.first, nil
}

func (n *Node) has(bit uint32) bool { return n[bit/64]&(1<<(bit%64)) != 0 }
func (n *Node) add(bit uint32)      { n[bit/64] |= 1 << (bit % 64) }
func (n *Node) clear(bit uint32)    { n[bit/64] &^= 1 << (bit % 64) }

// lowestFree returns the lowest bit below count that is not set.
func (n *Node) lowestFree(count uint32) (uint32, bool) {
	for i, word := range n {
		if word != ^uint64(0) {
			bit := uint32(i)*64 + uint32(bits.TrailingZeros64(^word))
			return bit, bit < count
		}
	}
	return 0, false
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}
