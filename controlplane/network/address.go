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
)

const (
	// RestTime is how long a released address is not assigned again.
	RestTime = time.Minute
	// FreeEvery is the time between two runs of FreeRested.
	FreeEvery = 5 * time.Second
	// freeBatch is the maximum number of addresses that FreeRested frees in one transaction.
	freeBatch = 500
)

// rested is an address that was released and is not free yet. Prefix is that of its subnet.
type rested struct {
	Subnet  cloud.SubnetID
	Prefix  netip.Prefix
	Address netip.Addr
}

var (
	// bitmaps has the bitmaps of assigned IPv4 addresses, at ipam/<subnet>/<level>-<index>.
	bitmaps = store.NewTable[ipam.Node]("ipam")
	// assigned has the number of assigned IPv4 addresses of a subnet, at ipam-assigned/<subnet>.
	assigned = store.NewTable[uint64]("ipam-assigned")
	// resting has the released addresses, at ipam-resting/<time of release>/<subnet>-<address>.
	resting = store.NewTable[rested]("ipam-resting")
	// addresses6 has the port of each assigned IPv6 address, at address6/<subnet>/<address>.
	addresses6 = store.NewTable[cloud.PortID]("address6")
)

// nodes stores the bitmaps of a subnet. It implements ipam.Nodes.
type nodes struct {
	tx     *store.Tx
	subnet cloud.SubnetID
}

func (n nodes) path(id ipam.NodeID) []string {
	return []string{string(n.subnet), strconv.Itoa(int(id.Level)) + "-" + strconv.Itoa(int(id.Index))}
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

// assignAddress assigns an IPv4 address of a subnet. It returns AlreadyExists if it is assigned or rests.
func assignAddress(tx *store.Tx, s *cloud.Subnet, a netip.Addr) error {
	r, err := ipam.RangeOf(s.CIDR)
	if err != nil {
		return err
	}
	err = r.Assign(nodes{tx, s.ID}, a)
	if errors.Is(err, ipam.ErrAssigned) {
		return fault.New(fault.AlreadyExists, "address %s of subnet %s is in use, or was released less than %s ago", a, s.ID, RestTime).
			WithReason("ADDRESS_IN_USE").With("field", "ip_address")
	}
	if err != nil {
		return fmt.Errorf("assign %s of subnet %s: %w", a, s.ID, err)
	}
	return addAssigned(tx, s.ID, 1)
}

// assignLowestAddress assigns the lowest free IPv4 address of a subnet. It returns ResourceExhausted if there is none.
func assignLowestAddress(tx *store.Tx, s *cloud.Subnet) (netip.Addr, error) {
	r, err := ipam.RangeOf(s.CIDR)
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := r.AssignLowest(nodes{tx, s.ID})
	if errors.Is(err, ipam.ErrFull) {
		return a, fault.New(fault.ResourceExhausted, "no address of subnet %s (%s) is free", s.ID, s.CIDR).WithReason("SUBNET_FULL")
	}
	if err != nil {
		return a, fmt.Errorf("assign an address of subnet %s: %w", s.ID, err)
	}
	return a, addAssigned(tx, s.ID, 1)
}

func addAssigned(tx *store.Tx, subnet cloud.SubnetID, delta int64) error {
	n, err := assigned.Get(tx, string(subnet))
	if err != nil {
		return err
	}
	if n == nil {
		n = new(uint64)
	}
	*n = uint64(int64(*n) + delta)
	assigned.Put(tx, n, string(subnet))
	return nil
}

// availableAddresses returns the number of free IPv4 addresses of a subnet.
func availableAddresses(r store.Reader, s *cloud.Subnet) (uint64, error) {
	all, err := ipam.RangeOf(s.CIDR)
	if err != nil {
		return 0, err
	}
	n, err := assigned.Get(r, string(s.ID))
	if err != nil || n == nil {
		return all.Size(), err
	}
	return all.Size() - *n, nil
}

// releaseAddress lets an address of a subnet rest. FreeRested makes it available after RestTime.
func releaseAddress(tx *store.Tx, s *cloud.Subnet, a netip.Addr) {
	resting.Put(tx, &rested{s.ID, s.CIDR, a}, fmt.Sprintf("%016x", int64(tx.Now())), string(s.ID)+"-"+a.String())
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
		if tx.Now()-cloud.Time(at) < cloud.Time(RestTime.Milliseconds()) {
			return false, nil
		}
		resting.Delete(tx, o.Path...)
		if err := freeAddress(tx, o.Value); err != nil {
			return false, err
		}
	}
	return more, nil
}

// freeAddress marks a rested address as free, unless its subnet was deleted meanwhile.
func freeAddress(tx *store.Tx, a *rested) error {
	there, err := assigned.Has(tx, string(a.Subnet))
	if err != nil || !there {
		return err
	}
	r, err := ipam.RangeOf(a.Prefix)
	if err != nil {
		return err
	}
	if err := r.Release(nodes{tx, a.Subnet}, a.Address); err != nil {
		return fmt.Errorf("free %s of subnet %s: %w", a.Address, a.Subnet, err)
	}
	return addAssigned(tx, a.Subnet, -1)
}

// forgetAddresses deletes the bitmaps of a subnet that is deleted.
func forgetAddresses(tx *store.Tx, subnet cloud.SubnetID) error {
	all, _, err := bitmaps.List(tx, 0, string(subnet))
	if err != nil {
		return err
	}
	for _, b := range all {
		bitmaps.Delete(tx, b.Path...)
	}
	assigned.Delete(tx, string(subnet))
	return nil
}
