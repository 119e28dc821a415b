// Package firewall enforces, on one host, which packets the ports of a VPC may send and receive: port security
// (anti-spoofing) and security groups. [Firewall.Set] takes the whole wanted state of a VPC and the network namespace
// that holds the VPC's bridges, compares the wanted state with the kernel's, and writes only the differences.
// [Firewall.Update] does the same without reading the kernel's state, if it remembers the state after the last call.
//
// # Parts
//
//   - One nftables table of family bridge drops forged frames (spoof.go renders it, bridge.go applies it).
//   - iptables chains for IPv4 and IPv6 implement the rules of security groups (groups.go and chains.go render them,
//     tables.go applies them). They also see frames between ports of one bridge, through br_netfilter.
//   - ipsets hold the addresses that the chains refer to (members.go), and assign addresses to lists of groups
//     (dispatch.go, lists.go).
//   - After each change that could forbid a connection, connections that the rules no longer permit are deleted
//     (conntrack.go).
//
// # Decisions
//
//   - The kernel has the state. Every Set reads it, so a restart of the agent needs no special case and manual changes
//     are repaired. Unchanged input causes no write; [Result.Writes] counts the writes.
//   - The package remembers the state after a successful call as a cache for Update (memory.go), because reading the
//     kernel's state takes much longer than most changes. The memory of a VPC is dropped before each write and kept
//     again only after the call has succeeded. So a failed call is followed by one that reads the kernel's state. The
//     memory is not used in another namespace, such as one that was made again under the same name. Callers call Set
//     regularly (package vpc: every 30 s), and each Set replaces the memory by what it has read and written.
//   - Frames from and to a bridge port that is neither a port of the VPC nor in [Options.Trusted] are dropped. A
//     device that is added later therefore passes nothing until the Set that names its port. In a new namespace, call
//     Set before the first device is up; the VPC may have no ports yet.
//   - One lookup, before all other rules of the bridge table, decides about an IP packet that a port sends from its own
//     address. Bridged frames pass two chains of the table. This halves the time that a packet spends in the table:
//     1.39 instead of 1.58 times the CPU time of a plain bridge for an established flow of small packets (Linux 6.18).
//   - A port may use the link-local address formed from its MAC address (RFC 4291, appendix A) and no other one.
//   - Packets are assigned to a port by IP address, because routed packets carry no bridge port in netfilter. The
//     bridge table marks packets from ports with port security (fromPort), so that packets from other hosts are not
//     filtered a second time on egress, and packets bridged to such ports (toPort), so that multicast, broadcast and
//     packets with foreign destinations do not bypass the ingress rules. A consequence is that ports of a VPC cannot
//     exchange multicast or broadcast packets, as in other clouds. Neighbour discovery passes. The two marks are bits
//     24 and 25 of the packet mark, and bit 24 of the mark of connections. Nothing else in the namespace may use them.
//   - An address pair that several ports have is subject to the union of their groups. An address within a pair that
//     is the own address of a port is subject to that port's groups.
//   - Ports with the same list of groups share their chains. One ipset for each IP version assigns addresses and
//     address pairs to lists: the packet counter of an element, which no rule updates, is the beginning of the list's
//     hash. A tree of chains compares the counter with constants. The first packet of a flow therefore needs O(log n)
//     comparisons, about 11 for 1,000 lists, each of which takes 100 ns. A new port with a known list adds one element
//     and changes no chain, and a new list changes one chain of each tree. No number needs to be stored or read back.
//     With 1,000 lists, the first packet takes 1.25 times the CPU time that it takes with one list (Linux 6.18). A set
//     and a rule for each list took 22 times. A map to the packet mark would be faster, but ipset permits it only in
//     the table mangle, and a further hook would slow down each packet of an established flow.
//   - Lists that permit all egress, which is usual, have no egress chain, and a range of such lists is not divided.
//   - The chains of egress RETURN permitted packets, because the packets must still pass the ingress rules of the
//     destination. An ACCEPT there would bypass them (OpenNebula issue 3556).
//   - Connections are deleted after the rules have changed, and net.netfilter.nf_conntrack_tcp_loose is 0. With the
//     kernel's default of 1 the next segment of either side would re-create a deleted TCP connection. It is 1 for VPCs
//     with LooseTCP: connections of a VM that has just migrated to this host have no conntrack entries here.
//   - The namespace itself answers only DHCP, DNS, metadata and ping. Security groups do not apply to these.
//   - No packet is forwarded to the prefixes in [Options.Denied] or to the addresses in Denied of [cloud.HostVPC],
//     whatever the groups permit. The addresses are in an ipset, because a cloud may have thousands of hosts.
//   - The kernel counts the connections of each network namespace separately, and applies the host's setting
//     net.netfilter.nf_conntrack_max to each of them. A flood in one VPC therefore takes no entries from another. The
//     package sets no lower limit for a VPC: the setting cannot be written in a namespace (Linux 6.18), and connlimit
//     searches the list of all counted connections for each new one.
//   - Elements are added before rules change and removed afterwards. So a packet that both the old and the new state
//     permit is permitted at every moment in between. The list of an address changes after the rules of the new list
//     are written, and before the rules of the old list are deleted.
//
// The package does not make namespaces, bridges or devices, and does not know VMs or the control plane.
package firewall

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/coreos/go-iptables/iptables"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Options configure a Firewall. The zero value is valid.
type Options struct {
	// Trusted are the names of bridge ports whose frames pass the anti-spoofing rules, because another host has
	// checked them: the VXLAN devices. The ingress rules of local ports apply to these frames. A name that ends in *
	// stands for all names with that prefix. Set refuses a VPC port whose device has such a name. The default is none.
	Trusted []string
	// Denied are prefixes to which no packet is forwarded: addresses of the underlay, of hosts and of the control
	// plane. Addresses within the prefixes of the VPC and of its peered VPCs stay reachable, because tenants choose
	// these prefixes and may choose denied ones. A prefix of length 0 is refused. The default is none.
	Denied []netip.Prefix
	// Timeout limits the time that one call takes. The default is 30 s.
	Timeout time.Duration
}

// Firewall applies the wanted state of VPCs. Its methods may be called concurrently for different namespaces, but not
// for the same one.
type Firewall struct {
	options  Options
	nft      *nftPool
	families [2]family // IPv4, IPv6
	names    protocolNames
	memories memories
}

// Result describes what a call of Set changed.
type Result struct {
	// Writes is the number of changes to the kernel's state: sysctls, transactions of nftables, calls of
	// iptables-restore, operations on ipsets, and deleted connections. It is 0 if the kernel's state was the wanted
	// one. The fields below are parts of it.
	Writes int
	// Transactions is the number of transactions of nftables: at most one.
	Transactions int
	// Restores is the number of calls of iptables-restore: at most one for each IP version, and two if an address
	// changes from a list of groups that no other address has.
	Restores int
	// Revoked is the number of tracked connections that were deleted because the rules do not permit them.
	Revoked int
}

// New returns a Firewall. It fails if an option is invalid or a program that the package runs is missing. It changes
// nothing on the host.
func New(o Options) (*Firewall, error) {
	for _, name := range o.Trusted {
		if !validDevice.MatchString(name) {
			return nil, fmt.Errorf("trusted device %q: want the name of a device, with an optional * at its end", name)
		}
	}
	denied, err := checkDenied(o.Denied)
	if err != nil {
		return nil, err
	}
	o.Denied = denied
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	names, err := readProtocolNames("/etc/protocols")
	if err != nil {
		return nil, err
	}
	f := &Firewall{options: o, nft: &nftPool{}, names: names}
	f.memories.of = map[cloud.VPCID]*memory{}
	if f.families[0], err = newFamily("iptables-nft", iptables.ProtocolIPv4); err != nil {
		return nil, err
	}
	if f.families[1], err = newFamily("ip6tables-nft", iptables.ProtocolIPv6); err != nil {
		return nil, err
	}
	return f, f.nft.check()
}

// checkDenied returns the prefixes masked and sorted, without duplicates. It fails for an invalid prefix and for one
// that contains all addresses.
func checkDenied(prefixes []netip.Prefix) ([]netip.Prefix, error) {
	var denied []netip.Prefix
	for _, p := range prefixes {
		if !p.IsValid() || p.Bits() == 0 || p.Addr().Is4In6() {
			return nil, fmt.Errorf("denied prefix %s: want an IPv4 or IPv6 prefix with a length above 0", p)
		}
		denied = append(denied, p.Masked())
	}
	slices.SortFunc(denied, comparePrefixes)
	return slices.Compact(denied), nil
}

// Set makes the kernel's state in the namespace ns equal to vpc. It reads all of the kernel's state, and so also
// repairs changes that others made. When Set returns nil, the rules are in effect and no connection is tracked that
// they forbid. After an error, part of the changes may be in effect; the next Set or Update completes them. Set fails
// when ctx or the timeout of the options ends.
func (f *Firewall) Set(ctx context.Context, ns netns.NsHandle, vpc cloud.HostVPC) (Result, error) {
	return f.set(ctx, ns, &vpc, false)
}

// Update is like Set, but assumes that the kernel still has the state after the last Set or Update of the VPC, and
// writes only the differences between this state and vpc. Update does not find changes that others made, so callers
// must call Set regularly. Update reads the kernel's state like Set if the last call for the VPC failed, if there was
// none, or if the last call was for another namespace than ns.
func (f *Firewall) Update(ctx context.Context, ns netns.NsHandle, vpc cloud.HostVPC) (Result, error) {
	return f.set(ctx, ns, &vpc, true)
}

// Forget releases the memory of a VPC that has no namespace any more.
func (f *Firewall) Forget(id cloud.VPCID) { f.memories.take(id) }

// set applies a VPC and remembers the result. The memory of the VPC is dropped before the first write, so that the
// call after a failed one reads the kernel's state.
func (f *Firewall) set(ctx context.Context, ns netns.NsHandle, vpc *cloud.HostVPC, trust bool) (r Result, err error) {
	ctx, cancel := context.WithTimeout(ctx, f.options.Timeout)
	defer cancel()
	err = nsthread.In(ns, func() error {
		cookie, err := namespaceCookie()
		if err != nil {
			return err
		}
		m := f.memories.take(vpc.ID)
		if m == nil || m.cookie != cookie || !trust {
			m = &memory{cookie: cookie}
			err = f.verify(ctx, ns, m, vpc, &r)
		} else {
			err = f.change(ctx, ns, m, vpc, &r)
		}
		if err == nil || mutant.On(mutant.TrustAfterError) {
			f.memories.keep(vpc.ID, m)
		}
		return err
	})
	if err != nil {
		return r, fmt.Errorf("apply the firewall of VPC %s: %w", vpc.ID, err)
	}
	return r, nil
}

// verify reads the kernel's state and makes it equal to vpc. It fills m.
func (f *Firewall) verify(ctx context.Context, ns netns.NsHandle, m *memory, vpc *cloud.HostVPC, r *Result) error {
	m.vpc = copyVPC(vpc)
	want, err := render(&m.vpc, &f.options)
	if err != nil {
		return err
	}
	m.state = want
	have, err := f.read(ctx, ns)
	if err != nil {
		return err
	}
	if err := setSysctls(want.looseTCP, r); err != nil {
		return err
	}
	if err := f.write(ctx, ns, have, want, r); err != nil {
		return err
	}
	return revoke(ctx, ns, want.policy, r)
}

// kernelState holds the sets, tables and bridge chains that the kernel has in a namespace. It does not include sysctls
// and connections.
type kernelState struct {
	sets   map[string]*kernelSet // by name
	tables [2]kernelTable        // of iptables: IPv4, IPv6
	bridge *kernelBridge
}

// read returns the kernel's state in the calling thread's namespace, which is ns.
func (f *Firewall) read(ctx context.Context, ns netns.NsHandle) (*kernelState, error) {
	sets, err := readSets(ctx, ns)
	if err != nil {
		return nil, err
	}
	k := &kernelState{sets: sets}
	for i := range f.families {
		if k.tables[i], err = f.readTable(ctx, &f.families[i]); err != nil {
			return nil, err
		}
	}
	k.bridge, err = listBridge(ctx)
	return k, err
}

// write changes the state of the namespace, which must be the calling thread's, from have to want. The order lets a
// new port send only after its rules are in effect, and takes the rules of a removed port away only after it can no
// longer send.
func (f *Firewall) write(ctx context.Context, ns netns.NsHandle, have *kernelState, want *state, r *Result) error {
	members, err := openMembers(ctx, ns, have.sets)
	if err != nil {
		return err
	}
	defer members.close()
	if err := members.grow(ctx, want.sets, r); err != nil {
		return err
	}
	tables, err := f.writeTables(ctx, members, have, want, r)
	if err != nil {
		return err
	}
	if err := f.applyBridge(ctx, have.bridge, want.bridge, r); err != nil {
		return err
	}
	for i := range want.tables {
		if err := members.shrinkLists(ctx, &want.tables[i].lists, r); err != nil {
			return err
		}
	}
	for i, between := range tables {
		if between == nil {
			continue
		}
		if err := f.families[i].apply(ctx, between.kernel(), want.tables[i], r); err != nil {
			return err
		}
	}
	return members.shrink(ctx, want, r)
}

// writeTables changes the chains, and then adds and changes elements of the sets of lists. At every moment, there are
// chains for the list of each element. If the chains must therefore keep lists that are not in want, writeTables
// returns the tables that the kernel has now. For an IP version whose table is that in want, it returns nil.
func (f *Firewall) writeTables(
	ctx context.Context, m *members, have *kernelState, want *state, r *Result,
) (tables [2]*table, err error) {
	for i := range f.families {
		next := want.tables[i]
		exists, err := m.usable(next.lists.name, next.lists.ipv6)
		if err != nil {
			return tables, err
		}
		if exists == nil {
			err = m.createLists(ctx, &next.lists, r)
		} else if both, ok := next.withLists(exists.lists, have.tables[i]); ok {
			next, tables[i] = both, &both
		}
		if err != nil {
			return tables, err
		}
		if err := f.families[i].apply(ctx, have.tables[i], next, r); err != nil {
			return tables, err
		}
	}
	for i := range f.families {
		if err := m.growLists(ctx, &want.tables[i].lists, r); err != nil {
			return tables, err
		}
	}
	return tables, nil
}
