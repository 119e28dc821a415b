package firewall

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// listID identifies a list of groups: the first 64 bits of the list's hash. Chains with the rules of a list have the
// ID in their names.
type listID uint64

func (id listID) String() string { return fmt.Sprintf("%016x", uint64(id)) }

// listSet is an ipset of type hash:net with counters. It assigns prefixes to lists of groups: the packet counter of an
// element is the listID. Overlapping prefixes have the same list, so that each address has exactly one list: if the
// counter of the longest matching prefix is not the one that a rule asks for, the kernel also tries the shorter
// prefixes. There is no ipset for a listSet without elements.
type listSet struct {
	name  string
	ipv6  bool
	lists map[netip.Prefix]listID
}

// dispatched has the parameters of the chains that select the rules of a packet.
type dispatched struct {
	lists     listSet
	unlimited map[listID]bool // the lists that permit all egress; they have no chain for it
	open      string          // the set of addresses to which address pairs of others do not apply; empty without pairs
}

// listsOf returns the lists of groups of one IP version by prefix. Overlapping prefixes have the same list.
func (s *subjects) listsOf(ipv6 bool) map[netip.Prefix]groupList {
	lists := map[netip.Prefix]groupList{}
	for _, pair := range s.pairs { // the longest prefix first
		if pair.prefix.Addr().Is6() != ipv6 {
			continue
		}
		for _, p := range positiveLength(pair.prefix) {
			if _, exists := lists[p]; !exists {
				lists[p] = pair.groups
			}
		}
	}
	for a, list := range s.own {
		if a.Is6() == ipv6 {
			lists[netip.PrefixFrom(a, a.BitLen())] = list
		}
	}
	if mutant.On(mutant.OverlappingLists) {
		return lists
	}
	return separate(lists)
}

// separate returns an equivalent map in which prefixes with different lists do not overlap. Each address keeps the list
// of the longest prefix in the argument that contains the address. A prefix that contains prefixes with other lists is
// divided into halves, repeatedly, until no part overlaps such a prefix.
func separate(lists map[netip.Prefix]groupList) map[netip.Prefix]groupList {
	sorted := slices.SortedFunc(maps.Keys(lists), func(a, b netip.Prefix) int { // containing prefixes first
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := map[netip.Prefix]groupList{}
	for i, p := range sorted {
		n := slices.IndexFunc(sorted[i+1:], func(q netip.Prefix) bool { return !p.Contains(q.Addr()) })
		if n < 0 {
			n = len(sorted) - i - 1
		}
		var inside []netip.Prefix // prefixes within p that have other lists
		for _, q := range sorted[i+1 : i+1+n] {
			if !slices.Equal(lists[q], lists[p]) {
				inside = append(inside, q)
			}
		}
		addParts(out, p, inside, lists[p])
	}
	return out
}

// addParts adds the largest prefixes within p that do not overlap the prefixes in except, each with the given list. The
// prefixes in except must be within p and sorted by address.
func addParts(out map[netip.Prefix]groupList, p netip.Prefix, except []netip.Prefix, list groupList) {
	if len(except) == 0 {
		out[p] = list
		return
	}
	if except[0] == p {
		return
	}
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	high := netip.PrefixFrom(cloud.Last(p), p.Bits()+1).Masked()
	n := slices.IndexFunc(except, func(q netip.Prefix) bool { return high.Contains(q.Addr()) })
	if n < 0 {
		n = len(except)
	}
	addParts(out, low, except[:n], list)
	addParts(out, high, except[n:], list)
}

// positiveLength returns prefixes that contain the same addresses as p and have a length above 0, because ipsets
// cannot contain others.
func positiveLength(p netip.Prefix) []netip.Prefix {
	if p.Bits() > 0 {
		return []netip.Prefix{p}
	}
	return []netip.Prefix{netip.PrefixFrom(p.Addr(), 1), netip.PrefixFrom(cloud.Last(p), 1).Masked()}
}

// dispatch adds the chains that select the rules of a packet by its addresses, and the chains of these rules.
func (r *tableRenderer) dispatch() {
	r.lists = listSet{setName("lists", r.ipv6, ""), r.ipv6, map[netip.Prefix]listID{}}
	r.unlimited = map[listID]bool{}
	for p, list := range r.policy.subjects.listsOf(r.ipv6) {
		r.lists.lists[p] = list.id()
		r.groupChains(list)
	}
	if slices.ContainsFunc(r.policy.subjects.pairs, func(p pairGroups) bool { return p.prefix.Addr().Is6() == r.ipv6 }) {
		// The own addresses of ports without port security and of those on other hosts are not subject to the rules
		// for a pair that contains them.
		r.open = r.set("open", "", func(yield func(netip.Addr) bool) {
			for a := range r.policy.subjects.open {
				if _, own := r.policy.subjects.own[a]; !own && !yield(a) {
					return
				}
			}
		})
	}
	maps.Copy(r.chains, dispatchChains(&r.dispatched, nil))
}

// dispatchChains returns the chains that select the chain of a list by a packet's source address (egressChain) and by
// its destination address (ingressChain). The chains select among the lists of d and those in further.
func dispatchChains(d *dispatched, further []listID) map[string][]string {
	ids := append(slices.Collect(maps.Values(d.lists.lists)), further...)
	slices.Sort(ids)
	ids = slices.Compact(ids)
	chains := map[string][]string{}
	egress := tree{d.lists.name, "src", egressNode, egressPrefix, d.unlimited, chains}
	chains[egressChain] = append(egress.root(ids), "-j "+noRuleChain)
	ingress := tree{d.lists.name, "dst", ingressNode, ingressPrefix, nil, chains}
	var rules []string
	if d.open != "" {
		rules = append(rules, fmt.Sprintf("%s -m set --match-set %s dst -j RETURN", unmarkedToPort, d.open))
	}
	chains[ingressChain] = append(append(rules, ingress.root(ids)...), markedToPort+" -j "+noRuleChain)
	return chains
}

// tree renders chains that find the list of an address by comparing the packet counter of the address's element with
// constants. A chain divides its range of IDs into ranges of equal size. So the number of comparisons is logarithmic,
// and a new list changes only the chain of the smallest range that contains its ID. The name of a chain contains its
// range. A range whose lists permit all packets is not divided. If an element has an unknown list, which only a change
// by hand can cause, packets of its address are dropped, unless the ID is in such a range.
type tree struct {
	set, field string // the set of lists, and src or dst
	node, list string // prefixes of the names of chains: of this tree, and of those with the rules of a list
	unlimited  map[listID]bool
	chains     map[string][]string
}

// maxLeaf is the greatest number of lists for which a chain has one comparison for each list.
const maxLeaf = 4

// manyLists is the number of lists above which a chain divides its range into four. Division into two takes fewer
// comparisons, but would exceed the kernel's limit of 16 for the depth of calls with some thousand lists.
const manyLists = 256

// compare returns a rule that applies target to packets whose address has an element in the set with a matching packet
// counter. operator (eq, lt or gt) compares the counter with id.
func (t *tree) compare(operator string, id listID, target string) string {
	return fmt.Sprintf("-m set --match-set %s %s ! --update-counters --packets-%s %d %s",
		t.set, t.field, operator, uint64(id), target)
}

func (t *tree) equal(id listID) string {
	if t.unlimited[id] {
		return t.compare("eq", id, "-j RETURN")
	}
	return t.compare("eq", id, "-g "+t.list+id.String())
}

// target returns the action for packets whose address has one of the lists. The first depth bits of the lists' IDs are
// equal.
func (t *tree) target(ids []listID, depth int) string {
	if t.permits(ids) {
		return "-j RETURN"
	}
	return "-g " + t.chain(ids, depth)
}

// permits reports whether all of the lists are unlimited.
func (t *tree) permits(ids []listID) bool {
	return !slices.ContainsFunc(ids, func(id listID) bool { return !t.unlimited[id] })
}

// root returns the rules that find the list of an address among ids, which are sorted. Packets whose address has no
// list match none of these rules.
func (t *tree) root(ids []listID) []string {
	if len(ids) == 0 {
		return nil
	}
	present := fmt.Sprintf("-m set --match-set %s %s ! --update-counters ", t.set, t.field)
	if t.permits(ids) {
		return []string{present + "-j RETURN"}
	}
	if len(ids) <= maxLeaf {
		return append(t.leaf(ids), present+"-j "+noRuleChain)
	}
	parts, depth := divide(ids, 0)
	return append(t.branches(parts, depth), present+t.target(parts[len(parts)-1], depth))
}

func (t *tree) leaf(ids []listID) []string {
	var rules []string
	for _, id := range ids {
		rules = append(rules, t.equal(id))
	}
	if last := len(rules) - 1; mutant.On(mutant.AnyList) && t.unlimited == nil {
		rules[last] = "-g " + t.list + ids[last].String()
	}
	return rules
}

// branches returns the rules for all parts but the last one.
func (t *tree) branches(parts [][]listID, depth int) []string {
	var rules []string
	for i, part := range parts[:len(parts)-1] {
		if len(part) == 1 {
			rules = append(rules, t.equal(part[0]))
			continue
		}
		next := parts[i+1][0]
		rules = append(rules, t.compare("lt", start(next, depth), t.target(part, depth)))
	}
	return rules
}

// chain adds the chain of a range of IDs and returns its name. ids are all known IDs in the range. The first depth bits
// of all IDs in the range are equal.
func (t *tree) chain(ids []listID, depth int) string {
	name := fmt.Sprintf("%s%d-%x", t.node, depth, uint64(ids[0]>>(64-depth)))
	t.chains[name] = t.rules(ids, depth)
	return name
}

// rules returns the rules for packets whose address has a list. Each part of the range but the last has a chain of its
// own. The rules of the last part follow in the same chain.
func (t *tree) rules(ids []listID, depth int) []string {
	if t.permits(ids) {
		return []string{"-j RETURN"}
	}
	if len(ids) <= maxLeaf {
		return append(t.leaf(ids), "-j "+noRuleChain)
	}
	parts, depth := divide(ids, depth)
	return append(t.branches(parts, depth), t.rules(parts[len(parts)-1], depth)...)
}

// divide divides at least two sorted IDs whose first depth bits are equal into parts, by the next bit, or by the next
// two bits if there are more than manyLists IDs. If all IDs are in one part, it continues with the bits that follow. It
// returns the parts that are not empty, and the number of leading bits that are equal within each part.
func divide(ids []listID, depth int) ([][]listID, int) {
	for {
		depth++
		if len(ids) > manyLists {
			depth++
		}
		var parts [][]listID
		for rest := ids; len(rest) > 0; {
			n := slices.IndexFunc(rest, func(id listID) bool { return start(id, depth) != start(rest[0], depth) })
			if n < 0 {
				n = len(rest)
			}
			parts, rest = append(parts, rest[:n]), rest[n:]
		}
		if len(parts) > 1 {
			return parts, depth
		}
	}
}

// start returns the first ID with the same depth leading bits as id.
func start(id listID, depth int) listID { return id >> (64 - depth) << (64 - depth) }

// withLists returns an intermediate table, which is written before t while the elements of the set still have the lists
// in have. In addition to the chains of t, it has the chains of some lists that only have contains. A list of a prefix
// that t also has is kept, so that packets that both the old and the new list permit pass. A list that limits egress is
// kept, so that the packets that the list forbids are dropped. withLists returns false if there are no such lists. The
// argument kernel is the table as the kernel has it.
func (t *table) withLists(have map[netip.Prefix]listID, kernel kernelTable) (table, bool) {
	current := map[listID]bool{}
	for _, id := range t.lists.lists {
		current[id] = true
	}
	d := t.dispatched
	d.unlimited = maps.Clone(t.unlimited)
	further := map[listID]bool{}
	for p, id := range have {
		_, wanted := t.lists.lists[p]
		_, exists := kernel.chains[ingressPrefix+id.String()]
		_, limited := kernel.chains[egressPrefix+id.String()]
		if !current[id] && exists && (wanted || limited) {
			further[id] = true
			d.unlimited[id] = !limited
		}
	}
	if len(further) == 0 || mutant.On(mutant.DropOldList) {
		return table{}, false
	}
	chains := map[string][]string{}
	for _, c := range t.chains {
		if !strings.HasPrefix(c.name, egressNode) && !strings.HasPrefix(c.name, ingressNode) {
			chains[c.name] = c.rules
		}
	}
	ids := slices.Sorted(maps.Keys(further))
	maps.Copy(chains, dispatchChains(&d, ids))
	for _, id := range ids {
		for _, name := range []string{egressPrefix + id.String(), ingressPrefix + id.String()} {
			if rules, exists := kernel.chains[name]; exists {
				chains[name] = rules
			}
		}
	}
	return newTable(chains, d), true
}
