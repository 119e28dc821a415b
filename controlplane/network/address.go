package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/network/ipam"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// RestTime is how long a released address is not assigned again.
	RestTime = time.Minute
	// FreeEvery is the time between two runs of FreeRested.
	FreeEvery = 5 * time.Second
	// freeBatch is the maximum number of addresses that FreeRested frees in one transaction.
	freeBatch = 500
)

// space is a range of IPv4 addresses that are assigned: those of a subnet, or of a pool of an external network.
type space struct {
	// Owner identifies the space. It is the ID of the subnet, or the name of the external network with a prefix.
	Owner       string
	First, Last netip.Addr
}

// rested is an address of a space that was released and is not free yet. For an IPv6 address, only the owner of the
// space is used.
type rested struct {
	Space   space
	Address netip.Addr
}

var (
	// bitmaps has the bitmaps of assigned IPv4 addresses, at ipam/<owner>/<first address>-<level>-<index>.
	bitmaps = store.NewTable[ipam.Node]("ipam")
	// assigned has the number of assigned and resting IPv4 addresses, at ipam-assigned/<owner>.
	assigned = store.NewTable[uint64]("ipam-assigned")
	// resting has the released addresses, at ipam-resting/<time of release>/<owner>-<address>.
	resting = store.NewTable[rested]("ipam-resting")
	// addresses6 has the port of each assigned or resting IPv6 address, at address6/<subnet>/<address>.
	addresses6 = store.NewTable[cloud.PortID]("address6")
)

// spaceOf returns the addresses of a subnet.
func spaceOf(s *cloud.Subnet) space {
	return space{string(s.ID), s.CIDR.Masked().Addr(), cloud.Last(s.CIDR)}
}

// nodes stores the bitmaps of a space. It implements ipam.Nodes.
type nodes struct {
	tx *store.Tx
	space
}

func (n nodes) path(id ipam.NodeID) []string {
	return []string{n.Owner, fmt.Sprintf("%s-%d-%d", n.First, id.Level, id.Index)}
}

func (n nodes) Get(id ipam.NodeID) (ipam.Node, error) {
	node, err := bitmaps.Get(n.tx, n.path(id)...)
	if err != nil || node == nil {
		return ipam.Node{}, err
	}
	return *node, nil
}

func (n nodes) Set(id ipam.NodeID, node ipam.Node) error {
	bitmaps.Put(n.tx, &node, n.path(id)...)
	return nil
}

// assign marks an address of the space as assigned. It returns ipam.ErrAssigned if it is assigned or rests.
func (s space) assign(tx *store.Tx, a netip.Addr) error {
	r, err := ipam.NewRange(s.First, s.Last)
	if err != nil {
		return err
	}
	if err := r.Assign(nodes{tx, s}, a); err != nil {
		return err
	}
	return addAssigned(tx, s.Owner, 1)
}

// assignLowest assigns the lowest free address of the space. It returns ipam.ErrFull if there is none.
func (s space) assignLowest(tx *store.Tx) (netip.Addr, error) {
	r, err := ipam.NewRange(s.First, s.Last)
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := r.AssignLowest(nodes{tx, s})
	if err != nil {
		return a, err
	}
	return a, addAssigned(tx, s.Owner, 1)
}

// release lets an address of the space rest. FreeRested makes it available after RestTime.
func (s space) release(tx *store.Tx, a netip.Addr) {
	resting.Put(tx, &rested{s, a}, fmt.Sprintf("%016x", int64(tx.Now())), s.Owner+"-"+a.String())
}

func addAssigned(tx *store.Tx, owner string, delta int64) error {
	n, err := assigned.Get(tx, owner)
	if err != nil {
		return err
	}
	if n == nil {
		n = new(uint64)
	}
	*n = uint64(int64(*n) + delta)
	assigned.Put(tx, n, owner)
	return nil
}

// available returns the number of free addresses among the given number of addresses that an owner has.
func available(r store.Reader, owner string, size uint64) (uint64, error) {
	n, err := assigned.Get(r, owner)
	if err != nil || n == nil {
		return size, err
	}
	return size - min(*n, size), nil
}

// reservedFor returns what an address of a subnet is reserved for, or "" if a port can have it.
func reservedFor(s *cloud.Subnet, a netip.Addr) string {
	switch a {
	case s.Gateway:
		return "gateway"
	case s.CIDR.Masked().Addr():
		return "network address"
	case cloud.Last(s.CIDR):
		return "broadcast address"
	}
	return ""
}

// assignAddress assigns an IPv4 address of a subnet. It returns InvalidArgument for the gateway, the network address
// and the broadcast address, and AlreadyExists if the address is assigned or was released less than RestTime ago.
func assignAddress(tx *store.Tx, s *cloud.Subnet, a netip.Addr) error {
	err := spaceOf(s).assign(tx, a)
	if errors.Is(err, ipam.ErrAssigned) {
		if reserved := reservedFor(s, a); reserved != "" {
			return fault.Invalid("ip_address", "%s is the %s of %s", a, reserved, label(kindSubnet, s.Name, string(s.ID))).
				With("constraint", "host_address")
		}
		return fault.New(fault.AlreadyExists, "address %s of %s is in use, or was released less than %s ago", a,
			label(kindSubnet, s.Name, string(s.ID)), RestTime).
			WithReason("ADDRESS_IN_USE").With("field", "ip_address")
	}
	if err != nil {
		return fmt.Errorf("assign %s of subnet %s: %w", a, s.ID, err)
	}
	return nil
}

// assignLowestAddress assigns the lowest free IPv4 address of a subnet. It returns ResourceExhausted if there is none.
func assignLowestAddress(tx *store.Tx, s *cloud.Subnet) (netip.Addr, error) {
	a, err := spaceOf(s).assignLowest(tx)
	if errors.Is(err, ipam.ErrFull) {
		return a, fault.New(
			fault.ResourceExhausted, "no address of %s with the prefix %s is free",
			label(kindSubnet, s.Name, string(s.ID)),
			s.CIDR,
		).WithReason("SUBNET_FULL")
	}
	if err != nil {
		return a, fmt.Errorf("assign an address of subnet %s: %w", s.ID, err)
	}
	return a, nil
}

// availableAddresses returns the number of free IPv4 addresses of a subnet.
func availableAddresses(r store.Reader, s *cloud.Subnet) (uint64, error) {
	return available(r, string(s.ID), 1<<(32-s.CIDR.Bits()))
}

// FreeRested makes the addresses available that were released at least RestTime ago. The leader runs it every
// FreeEvery.
func (s *Service) FreeRested(ctx context.Context) error {
	for {
		more := false
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
			more, err = freeRested(tx)
			return err
		})
		if err != nil || !more {
			return err
		}
	}
}

// freeRested frees up to freeBatch addresses. more reports whether there may be more to free.
func freeRested(tx *store.Tx) (more bool, err error) {
	old, more, err := resting.List(tx.Unguarded(), freeBatch)
	if err != nil {
		return false, err
	}
	for _, o := range old {
		at, err := strconv.ParseInt(o.Path[0], 16, 64)
		if err != nil {
			return false, fmt.Errorf("time of a released address: %w", err)
		}
		if tx.Now()-cloud.Time(at) < cloud.Time(RestTime.Milliseconds()) && !mutant.On(mutant.ReuseAddress) {
			return false, nil
		}
		if err := freeAddress(tx, o); err != nil {
			return false, err
		}
	}
	return more, nil
}

// freeAddress marks a rested address as free. It does nothing if its subnet was deleted, which also deleted the
// bitmaps.
func freeAddress(tx *store.Tx, o store.Record[rested]) error {
	// Read the record again with a guard, because setPools may change it at the same time.
	still, err := resting.Get(tx, o.Path...)
	if err != nil || still == nil {
		return err
	}
	o.Value = still
	resting.Delete(tx, o.Path...)
	if o.Value.Address.Is6() {
		addresses6.Delete(tx, o.Value.Space.Owner, o.Value.Address.String())
		return nil
	}
	r, err := ipam.NewRange(o.Value.Space.First, o.Value.Space.Last)
	if err != nil {
		return err
	}
	err = r.Release(nodes{tx, o.Value.Space}, o.Value.Address)
	if errors.Is(err, ipam.ErrUnassigned) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("free %s of %s: %w", o.Value.Address, o.Value.Space.Owner, err)
	}
	return addAssigned(tx, o.Value.Space.Owner, -1)
}

// forgetAddresses deletes the bitmaps of an owner, and the count of its assigned addresses. The records of resting
// addresses remain: freeAddress ignores those without a bitmap.
func forgetAddresses(tx *store.Tx, owner string) error {
	all, _, err := bitmaps.List(tx, 0, owner)
	if err != nil {
		return err
	}
	for _, b := range all {
		bitmaps.Delete(tx, b.Path...)
	}
	assigned.Delete(tx, owner)
	return nil
}

// release6 lets an IPv6 address of a subnet rest. FreeRested makes it available after RestTime.
func release6(tx *store.Tx, s *cloud.Subnet, a netip.Addr) { spaceOf(s).release(tx, a) }

// forgetAddresses6 deletes the records of a subnet's IPv6 addresses.
func forgetAddresses6(tx *store.Tx, s *cloud.Subnet) error {
	all, _, err := addresses6.List(tx, 0, string(s.ID))
	for _, a := range all {
		addresses6.Delete(tx, a.Path...)
	}
	return err
}
