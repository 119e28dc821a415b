package ipsec

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// direction is the direction of the packets to which a policy applies, from the host's view.
type direction uint8

const (
	in direction = iota
	out
)

func (d direction) String() string {
	if d == in {
		return "in"
	}
	return "out"
}

// policy is a policy with a template for ESP in transport mode.
type policy struct {
	direction direction
	// vtep is the address of this host: the destination of received packets, and the source of sent packets.
	vtep netip.Addr
	// optional is true if packets that are not encrypted pass the policy.
	optional bool
}

// stateID identifies a state in the kernel.
type stateID struct {
	destination netip.Addr
	spi         uint32
}

// wantedState is a state that the kernel must have.
type wantedState struct {
	source netip.Addr
	key    cloud.ESPKey
	out    bool
}

// presentState is a state that the kernel has.
type presentState struct {
	source netip.Addr
	key    cloud.ESPKey // the zero value if the state has another algorithm or another mode
	number uint64       // the number of packets
}

// state has the kernel's policies and states with ReqID.
type state struct {
	policies []presentPolicy
	states   map[stateID]presentState
}

// presentPolicy is a policy that the kernel has.
type presentPolicy struct {
	policy
	index int // identifies the policy
	// selects is true if the policy applies to the packets to which a policy of this package for vtep applies.
	selects bool
	// differs is true if the kernel's policy has another effect than the embedded policy.
	differs bool
}

// change is a change of the kernel's state. Its String is for operators, and does not contain keys.
type change interface {
	fmt.Stringer
	apply(*kernel) error
}

type changes []change

// wantedStates returns the states of this host for its peers. It returns an error if a peer has no valid address, or
// two states have the same destination and SPI.
func wantedStates(vtep netip.Addr, peers []cloud.EncryptedPeer) (map[stateID]wantedState, error) {
	want := map[stateID]wantedState{}
	add := func(id stateID, s wantedState) error {
		if _, twice := want[id]; twice {
			return fmt.Errorf("two states to %s have the SPI %#x", id.destination, id.spi)
		}
		if id.spi < 256 || s.key == (cloud.ESPKey{}) {
			return fmt.Errorf("a state from %s to %s has no key, or the reserved SPI %#x", s.source, id.destination, id.spi)
		}
		want[id] = s
		return nil
	}
	for _, p := range peers {
		if !p.VTEP.IsValid() || p.VTEP.Is4() != vtep.Is4() || p.VTEP == vtep || p.VTEP.IsMulticast() || p.VTEP.IsUnspecified() {
			return nil, fmt.Errorf("peer %s of %s: %w", p.VTEP, vtep, errNoPeerAddress)
		}
		if err := add(stateID{p.VTEP, p.Send.SPI}, wantedState{source: vtep, key: p.Send.Key, out: true}); err != nil {
			return nil, err
		}
		for _, r := range p.Receive {
			if err := add(stateID{vtep, r.SPI}, wantedState{source: p.VTEP, key: r.Key}); err != nil {
				return nil, err
			}
		}
	}
	return want, nil
}

// planPolicies returns the changes after which the kernel has the policies of a host. Policies for former addresses of
// the host are kept, and all others are deleted. New policies are added before others are deleted, so that there is a
// policy for the packets at every moment.
func planPolicies(vtep netip.Addr, have state) (all changes) {
	for _, d := range []direction{in, out} {
		wanted := wantedPolicy(d, vtep)
		i := slices.IndexFunc(have.policies, func(p presentPolicy) bool {
			return p.selects && p.direction == d && p.vtep == vtep
		})
		switch {
		case i < 0:
			all = append(all, addPolicy{policy: wanted})
		case have.policies[i].differs || have.policies[i].policy != wanted:
			all = append(all, addPolicy{policy: wanted, replace: true})
		}
	}
	for _, p := range have.policies {
		if !p.selects {
			all = append(all, deletePolicy{p})
		}
	}
	return all
}

// wantedPolicy returns the policy of a host for one direction.
func wantedPolicy(d direction, vtep netip.Addr) policy {
	return policy{direction: d, vtep: vtep, optional: d == in && mutant.On(mutant.AcceptPlainVXLAN)}
}

// planStates returns the changes after which the kernel has exactly the wanted states. numbers has, by key, the last
// known sequence numbers. A state that is added again continues above its number.
func planStates(
	vtep netip.Addr, want map[stateID]wantedState, have state, numbers map[cloud.ESPKey]uint64,
) changes {
	var first, last changes
	for _, id := range sortedIDs(have.states) {
		h := have.states[id]
		w, wanted := want[id]
		switch {
		case wanted && w.key == h.key && w.source == h.source:
		case wanted:
			first = append(first, deleteState{id, h.source})
		default:
			last = append(last, deleteState{id, h.source})
		}
	}
	var sent changes
	for _, id := range sortedIDs(want) {
		w := want[id]
		if h, exists := have.states[id]; exists && w.key == h.key && w.source == h.source {
			continue
		}
		add := addState{id: id, source: w.source, key: w.key, out: w.out}
		if number, lost := numbers[w.key]; lost {
			add.number = number
			if w.out {
				add.number += skippedNumbers
			}
		}
		if w.out {
			sent = append(sent, add)
		} else {
			first = append(first, add)
		}
	}
	// States for received packets are deleted last.
	slices.SortStableFunc(last, func(a, b change) int {
		return cmp.Compare(a.(deleteState).direction(vtep), b.(deleteState).direction(vtep))
	})
	return slices.Concat(first, sent, last)
}

// planRemoval returns the changes after which the kernel has no policies and states of this package. The states are
// deleted first, so that no packet is sent without encryption to a host that expects it encrypted.
func planRemoval(have state) (all changes) {
	for _, id := range sortedIDs(have.states) {
		all = append(all, deleteState{id, have.states[id].source})
	}
	for _, p := range have.policies {
		all = append(all, deletePolicy{p})
	}
	return all
}

func sortedIDs[V any](m map[stateID]V) []stateID {
	return slices.SortedFunc(maps.Keys(m), func(a, b stateID) int {
		return cmp.Or(a.destination.Compare(b.destination), cmp.Compare(a.spi, b.spi))
	})
}
