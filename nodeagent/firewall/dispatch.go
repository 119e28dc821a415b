package firewall

import (
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
// element is the listID. The longest prefix that contains an address decides, as in subjects.groupsOf. A set without
// elements does not exist.
type listSet struct {
	name  string
	ipv6  bool
	lists map[netip.Prefix]listID
}

// listsOf returns the lists of groups of one IP version by prefix.
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
	return lists
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
	maps.Copy(r.chains, dispatchChains(&r.lists, r.open, nil))
}

// dispatchChains returns the chains that select the chain of a list by a packet's source address (egressChain) and by
// its destination address (ingressChain). They know the lists in set and those in further. The argument open is the
// name of the set of addresses that no list applies to, or empty.
func dispatchChains(set *listSet, open string, further []listID) map[string][]string {
	ids := append(slices.Collect(maps.Values(set.lists)), further...)
	slices.Sort(ids)
	ids = slices.Compact(ids)
	chains := map[string][]string{}
	egress := tree{set.name, "src", egressNode, egressPrefix, chains}
	chains[egressChain] = append(egress.root(ids), "-j "+noRuleChain)
	ingress := tree{set.name, "dst", ingressNode, ingressPrefix, chains}
	var rules []string
	if open != "" {
		rules = append(rules, fmt.Sprintf("%s -m set --match-set %s dst -j RETURN", unmarkedToPort, open))
	}
	chains[ingressChain] = append(append(rules, ingress.root(ids)...), markedToPort+" -j "+noRuleChain)
	return chains
}

// tree renders chains that find the list of an address by comparing the packet counter of the address's element with
// constants. A chain divides its range of IDs into four equal ones, so that the number of comparisons is logarithmic,
// and so that a new list changes only the chain of the smallest range that contains it. The names of chains contain
// the range. The kernel limits the depth of calls to 16, which a division into two would reach with some thousand
// lists.
type tree struct {
	set, field string // the set of lists, and src or dst
	node, list string // prefixes of the names of chains: of this tree, and of those with the rules of a list
	chains     map[string][]string
}

// maxLeaf is the number of lists up to which a chain compares with each of them.
const maxLeaf = 4

// compare returns a rule for packets to whose address's element the comparison of the packet counter applies.
func (t *tree) compare(operator string, id listID, target string) string {
	return fmt.Sprintf("-m set --match-set %s %s ! --update-counters --packets-%s %d %s",
		t.set, t.field, operator, uint64(id), target)
}

func (t *tree) equal(id listID) string { return t.compare("eq", id, "-g "+t.list+id.String()) }

// root returns the rules that find the list of an address among ids, which are sorted. Packets whose address has no
// list pass them. Packets whose address has another list than those in ids are dropped.
func (t *tree) root(ids []listID) []string {
	if len(ids) == 0 {
		return nil
	}
	present := fmt.Sprintf("-m set --match-set %s %s ! --update-counters ", t.set, t.field)
	if len(ids) <= maxLeaf {
		return append(t.leaf(ids), present+"-j "+noRuleChain)
	}
	parts, depth := divide(ids, 0)
	return append(t.branches(parts, depth), present+"-g "+t.chain(parts[len(parts)-1], depth))
}

func (t *tree) leaf(ids []listID) []string {
	var rules []string
	for _, id := range ids {
		rules = append(rules, t.equal(id))
	}
	if mutant.On(mutant.AnyList) {
		rules[len(rules)-1] = "-g " + t.list + ids[len(ids)-1].String()
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
		rules = append(rules, t.compare("lt", start(next, depth), "-g "+t.chain(part, depth)))
	}
	return rules
}

// chain adds the chain of a range of IDs, which ids are all known ones of, and returns its name. The first depth bits
// of all IDs in the range are equal.
func (t *tree) chain(ids []listID, depth int) string {
	name := fmt.Sprintf("%s%d-%x", t.node, depth, uint64(ids[0]>>(64-depth)))
	t.chains[name] = t.rules(ids, depth)
	return name
}

// rules returns the rules for packets whose address has a list. The kernel evaluates the last part in the same chain.
func (t *tree) rules(ids []listID, depth int) []string {
	if len(ids) <= maxLeaf {
		return append(t.leaf(ids), "-j "+noRuleChain)
	}
	parts, depth := divide(ids, depth)
	return append(t.branches(parts, depth), t.rules(parts[len(parts)-1], depth)...)
}

// divide divides sorted IDs, of which there are several, by the two bits after the first depth ones, which are equal
// in all IDs. It goes on by two bits until there are several parts. It returns the parts that are not empty, and the
// number of leading bits that are equal within each part.
func divide(ids []listID, depth int) ([][]listID, int) {
	for {
		depth += 2
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

// withLists returns the table that precedes t while the elements of the set still have the lists in have: it also has
// the chains of those lists that t does not have but that a prefix of t still has. It returns false if there are none.
// The argument kernel is the table as the kernel has it.
func (t *table) withLists(have map[netip.Prefix]listID, kernel kernelTable) (table, bool) {
	current := map[listID]bool{}
	for _, id := range t.lists.lists {
		current[id] = true
	}
	further := map[listID]bool{}
	for p := range t.lists.lists {
		id, exists := have[p]
		_, rules := kernel.chains[egressPrefix+id.String()]
		if exists && rules && !current[id] {
			further[id] = true
		}
	}
	if len(further) == 0 || mutant.On(mutant.DropOldList) {
		return table{}, false
	}
	chains := map[string][]string{}
	for _, c := range t.chains {
		chains[c.name] = c.rules
	}
	ids := slices.Sorted(maps.Keys(further))
	maps.DeleteFunc(chains, func(name string, _ []string) bool {
		return strings.HasPrefix(name, egressNode) || strings.HasPrefix(name, ingressNode)
	})
	maps.Copy(chains, dispatchChains(&t.lists, t.open, ids))
	for _, id := range ids {
		for _, name := range []string{egressPrefix + id.String(), ingressPrefix + id.String()} {
			chains[name] = kernel.chains[name]
		}
	}
	return newTable(chains, t.lists, t.open), true
}
