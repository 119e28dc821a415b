package network

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/network/ipam"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// externalAddress is an assigned address of an external network and the resource that has it, for error messages.
type externalAddress struct {
	Address netip.Addr
	// User names the resource, such as "floating IP 0192…".
	User string
}

// externalAddresses has the assigned addresses of external networks, at external-address/<network>/<address>.
var externalAddresses = store.NewTable[externalAddress]("external-address")

// poolOwner returns the owner of the bitmaps of an external network's pools. It differs from all IDs of subnets.
func poolOwner(network string) string { return "external-" + network }

func poolSpace(network string, p cloud.AddressRange) space {
	return space{poolOwner(network), p.First, p.Last}
}

// assignExternal assigns an address of an external network's pools to a resource: the requested one, or the lowest free
// one if requested is invalid. It returns ResourceExhausted if none is free, and AlreadyExists if the requested one is
// taken.
func assignExternal(tx *store.Tx, n *cloud.ExternalNetwork, requested netip.Addr, user string) (netip.Addr, error) {
	a, err := assignFromPools(tx, n, requested)
	if err != nil {
		return a, err
	}
	externalAddresses.Put(tx, &externalAddress{a, user}, n.Name, a.String())
	return a, nil
}

func assignFromPools(tx *store.Tx, n *cloud.ExternalNetwork, requested netip.Addr) (netip.Addr, error) {
	for _, p := range n.Pools {
		s := poolSpace(n.Name, p)
		if requested.IsValid() && !p.Contains(requested) {
			continue
		}
		if requested.IsValid() {
			err := s.assign(tx, requested)
			if errors.Is(err, ipam.ErrAssigned) {
				return requested, fault.New(
					fault.AlreadyExists, "address %s of %s is in use, or was released less than %s ago", requested,
					n.Name, RestTime,
				).
					WithReason("ADDRESS_IN_USE").With("field", "address")
			}
			return requested, err
		}
		if a, err := s.assignLowest(tx); !errors.Is(err, ipam.ErrFull) {
			return a, err
		}
	}
	if requested.IsValid() {
		return requested, fault.Invalid("address", "must be in a pool of %s, got %s", n.Name, requested).
			With("constraint", "within_pool")
	}
	return requested, fault.New(fault.ResourceExhausted, "no address of %s is free", n.Name).WithReason("POOL_EMPTY")
}

// releaseExternal lets an address of an external network rest.
func releaseExternal(tx *store.Tx, n *cloud.ExternalNetwork, a netip.Addr) {
	externalAddresses.Delete(tx, n.Name, a.String())
	for _, p := range n.Pools {
		if p.Contains(a) {
			poolSpace(n.Name, p).release(tx, a)
		}
	}
}

// setPools replaces the pools of an external network. It returns FailedPrecondition if an assigned address is in none
// of the new pools.
func setPools(tx *store.Tx, n *cloud.ExternalNetwork, pools []cloud.AddressRange) error {
	used, _, err := externalAddresses.List(tx, 0, n.Name)
	if err != nil {
		return err
	}
	rest, err := restingOf(tx, poolOwner(n.Name))
	if err != nil {
		return err
	}
	if err := forgetAddresses(tx, poolOwner(n.Name)); err != nil {
		return err
	}
	n.Pools = pools
	var outside []string
	for _, u := range used {
		_, err := assignFromPools(tx, n, u.Value.Address)
		if fault.Is(err, fault.InvalidArgument) {
			outside = append(outside, u.Value.User)
			continue
		}
		if err != nil {
			return fmt.Errorf("assign %s again: %w", u.Value.Address, err)
		}
	}
	if len(outside) > 0 {
		return inUse("an address outside of the new pools", outside)
	}
	for _, o := range rest {
		if err := restAgain(tx, n, o); err != nil {
			return err
		}
	}
	return nil
}

// restingOf returns the resting addresses of an owner. It reads those of all owners, so it is only for the rare changes
// of external networks.
func restingOf(tx *store.Tx, owner string) (out []store.Record[rested], err error) {
	all, _, err := resting.List(tx, 0)
	for _, o := range all {
		if o.Value.Space.Owner == owner {
			out = append(out, o)
		}
	}
	return out, err
}

// restAgain lets a resting address rest until its former time in the new pools of an external network, whose bitmaps
// were deleted. It forgets an address that is in no pool.
func restAgain(tx *store.Tx, n *cloud.ExternalNetwork, o store.Record[rested]) error {
	for _, p := range n.Pools {
		if !p.Contains(o.Value.Address) {
			continue
		}
		s := poolSpace(n.Name, p)
		if err := s.assign(tx, o.Value.Address); err != nil {
			return fmt.Errorf("let %s rest again: %w", o.Value.Address, err)
		}
		resting.Put(tx, &rested{s, o.Value.Address}, o.Path...)
		return nil
	}
	resting.Delete(tx, o.Path...)
	return nil
}

// poolSize returns the number of addresses in the pools of an external network.
func poolSize(n *cloud.ExternalNetwork) (sum uint64, err error) {
	for _, p := range n.Pools {
		r, err := ipam.NewRange(p.First, p.Last)
		if err != nil {
			return 0, err
		}
		sum += r.Size()
	}
	return sum, nil
}
