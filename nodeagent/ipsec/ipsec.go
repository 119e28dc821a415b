// Package ipsec encrypts the VXLAN packets between this host and other hosts with the kernel's IPsec (XFRM): ESP in
// transport mode (RFC 4303) with AES-256-GCM (RFC 4106). [IPsec] compares the kernel's policies and states with the
// wanted ones and writes the differences. The control plane derives the keys.
//
// # How it works
//
// Two policies apply to all packets from and to the host's underlay address with UDP port 4789 as the destination:
// such a packet must be sent and received in ESP with a state of this package. Other packets are not affected. For
// each peer, the host has one state for packets to it, and usually three for packets from it: the keys of the
// previous, the present and the next epoch.
//
// # Decisions
//
//   - The policies name no peer. A packet to or from a host without states is dropped, so a missing key never results
//     in a packet that is not encrypted. For the same reason the policies are installed before the states.
//   - Policies for a former address of the host stay until Remove, because VXLAN devices can have the address until
//     their VPCs are applied again. They select nothing else.
//   - States for received packets are added before the state for sent packets, and deleted after it. The peer has the
//     states of the next epoch for a whole epoch before this host sends with it. So a rotation loses no packet.
//   - The policies and states of this package have [ReqID]. All others are left alone.
//   - The package stores no policies and states: it reads them from the kernel. A restarted agent that finds the wanted
//     ones writes nothing.
//   - Sequence numbers have 64 bits (ESN), so they do not run out between two rotations. The receiver accepts a
//     sequence number only once, and only within a window of 4096 packets.
//   - A state that another program has deleted is added again with the same key. The peer drops packets with sequence
//     numbers that it has already received. So each Set reads the sequence numbers, and the new state for sent packets
//     begins 2^30 numbers above the last number that Set has read. If the state was deleted while the agent did not
//     run, the numbers are unknown, and the peer drops packets until the keys are rotated. The kernel combines the
//     sequence number with a random number for each new state, so the initialization vectors of two states with the
//     same key differ.
//   - The peer's states with a changed key and the same SPI are deleted before the new ones are added. Keys change in
//     this way only after one of the hosts was restarted, and its own states are then gone anyway.
//
// The package does not know VPCs, and does not choose or store keys. Keys are not part of errors and descriptions.
package ipsec

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// ReqID marks the policies and states of this package in the kernel.
	ReqID = 0x54524956
	// Port is the UDP port of VXLAN (RFC 7348).
	Port = 4789
)

const (
	// requestTimeout limits the wait for the kernel's answer to one request.
	requestTimeout = 10 * time.Second
	// skippedNumbers is added to the last known sequence number when a lost state for sent packets is added again. A
	// receiver accepts distances below 2^32.
	skippedNumbers = 1 << 30
)

// Options are the parameters of New.
type Options struct {
	// VTEP is the host's address on the underlay. Required.
	VTEP netip.Addr
	// Namespace is the path of the network namespace with the underlay. The default is that of the calling thread.
	Namespace string
}

// IPsec makes the kernel's policies and states those that the control plane wants. Its methods must not be called
// concurrently.
type IPsec struct {
	vtep   netip.Addr
	kernel *kernel
	// numbers has, by key, the last sequence number of each state that Set has read from the kernel.
	numbers map[cloud.ESPKey]uint64
}

// New returns an IPsec. New itself changes nothing in the kernel. The caller calls Close.
func New(o Options) (*IPsec, error) {
	if !o.VTEP.IsValid() || o.VTEP.IsUnspecified() || o.VTEP.IsMulticast() || o.VTEP.Zone() != "" {
		return nil, fmt.Errorf("encrypt VXLAN: %q is not the underlay address of a host", o.VTEP)
	}
	k, err := openKernel(o.Namespace)
	if err != nil {
		return nil, fmt.Errorf("encrypt VXLAN: %w", err)
	}
	return &IPsec{vtep: o.VTEP, kernel: k, numbers: map[cloud.ESPKey]uint64{}}, nil
}

// Close releases what New opened. Policies and states stay in the kernel, so packets are still encrypted.
func (i *IPsec) Close() { i.kernel.close() }

// Protect installs the policies and leaves the states as they are: from now on the host neither sends nor accepts VXLAN
// packets that are not encrypted. It returns the changes that it made.
func (i *IPsec) Protect(ctx context.Context) (writes []string, err error) {
	return i.reconcile(ctx, "install policies", func(have state) (changes, error) {
		return planPolicies(i.vtep, have), nil
	})
}

// Set makes the kernel's policies and states those of peers, and returns the changes that it made. It can be repeated
// after an error. If peers are invalid, Set returns an error and changes nothing.
func (i *IPsec) Set(ctx context.Context, peers []cloud.EncryptedPeer) (writes []string, err error) {
	return i.reconcile(ctx, "encrypt VXLAN", func(have state) (changes, error) {
		want, err := wantedStates(i.vtep, peers)
		if err != nil {
			return nil, err
		}
		i.remember(want, have)
		return append(planPolicies(i.vtep, have), planStates(i.vtep, want, have, i.numbers)...), nil
	})
}

// Remove deletes all policies and states of this package in the network namespace at a path, "" for that of the calling
// thread, and returns the changes that it made. It succeeds if the kernel has no IPsec.
func Remove(ctx context.Context, namespace string) (writes []string, err error) {
	k, err := openKernel(namespace)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("stop the encryption of VXLAN: %w", err)
	}
	defer k.close()
	i := &IPsec{kernel: k}
	return i.reconcile(ctx, "stop the encryption of VXLAN", func(have state) (changes, error) {
		return planRemoval(have), nil
	})
}

// reconcile reads the kernel's state and makes the changes that plan returns for it.
func (i *IPsec) reconcile(ctx context.Context, act string, plan func(state) (changes, error)) (writes []string, err error) {
	have, err := i.kernel.read(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", act, err)
	}
	all, err := plan(have)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", act, err)
	}
	for _, c := range all {
		if err := ctx.Err(); err != nil {
			return writes, fmt.Errorf("%s: %w", act, err)
		}
		if err := c.apply(i.kernel); err != nil {
			return writes, fmt.Errorf("%s: %s: %w", act, c, err)
		}
		writes = append(writes, c.String())
	}
	return writes, nil
}

// remember updates the sequence numbers that wanted states have reached, and forgets those of other states.
func (i *IPsec) remember(want map[stateID]wantedState, have state) {
	kept := make(map[cloud.ESPKey]uint64, len(want))
	for id, w := range want {
		number, known := i.numbers[w.key]
		if h, exists := have.states[id]; exists && h.key == w.key {
			number, known = max(number, h.number), true
		}
		if known {
			kept[w.key] = number
		}
	}
	i.numbers = kept
}

var errNoPeerAddress = errors.New("the address of the peer is not that of another host with the same IP version")
