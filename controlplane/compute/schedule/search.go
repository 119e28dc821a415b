package schedule

import (
	"cmp"
	"math"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// fewHosts is the number of hosts up to which a search examines all hosts with a label instead of the cells.
const fewHosts = 256

// query is a request with values that are computed once for the whole search.
type query struct {
	*Request
	ix       *Index
	position uint64 // of the VM on the ring
	// spread is the number of VMs of the VM's spread group, by value of the spread label.
	spread map[string]int
}

func (ix *Index) newQuery(r *Request) *query {
	q := &query{Request: r, ix: ix, position: ringPosition(string(r.VM))}
	if r.SpreadLabel != "" {
		q.spread = map[string]int{}
		for id, n := range r.Spread {
			if h := ix.hosts[id]; h != nil {
				if value, ok := h.node.Labels[r.SpreadLabel]; ok {
					q.spread[value] += n
				}
			}
		}
	}
	return q
}

func (q *query) check(h *host) string {
	if q.Check == nil {
		return ""
	}
	return q.Check(&h.node)
}

// fits reports whether no filter excludes the host.
func (q *query) fits(h *host) bool {
	if !covers(h.free, q.Need) { // the most frequent reason first
		return false
	}
	return !slices.ContainsFunc(filters, func(f filter) bool { return f.excludes(h, q) })
}

// rank is the preference for a host: see the package comment. Lower ranks are better.
type rank struct {
	soft, spread int
	noAffinity   bool
	missing      int // twentieths of the scarcest resource that are not free
	distance     uint64
	id           cloud.NodeID
}

func (q *query) rankOf(h *host) rank {
	need := h.class.need(q.Need)
	r := rank{
		soft: q.AntiAffinitySoft[h.node.ID], noAffinity: len(q.AffinitySoft) > 0 && q.AffinitySoft[h.node.ID] == 0,
		missing: levels - need.level(h.cell.free), distance: h.position - q.position, id: h.node.ID,
	}
	if q.SpreadLabel != "" {
		r.spread = math.MaxInt
		if value, ok := h.node.Labels[q.SpreadLabel]; ok {
			r.spread = q.spread[value]
		}
	}
	return r
}

func (r rank) compare(o rank) int {
	affinity := 0
	if r.noAffinity != o.noAffinity {
		affinity = 1
		if o.noAffinity {
			affinity = -1
		}
	}
	return cmp.Or(cmp.Compare(r.soft, o.soft), cmp.Compare(r.spread, o.spread), affinity, cmp.Compare(r.missing, o.missing),
		cmp.Compare(r.distance, o.distance), cmp.Compare(r.id, o.id))
}

// within is a condition that restricts a part of a search to some hosts. nil means all hosts.
type within func(*host) bool

// search returns the host with the lowest rank of those that no filter excludes, or nil.
func (q *query) search() *host {
	if hosts, ok := q.shortList(); ok {
		return q.best(hosts, nil)
	}
	if len(q.AntiAffinitySoft) == 0 {
		return q.searchSpread(nil)
	}
	if h := q.searchSpread(func(h *host) bool { return q.AntiAffinitySoft[h.node.ID] == 0 }); h != nil {
		return h
	}
	return q.best(q.known(q.AntiAffinitySoft), nil)
}

// shortList returns a list that has all hosts which satisfy the hard requirements, and maybe others. It returns false
// if the requirements do not lead to a short list.
func (q *query) shortList() ([]*host, bool) {
	if q.On != "" {
		return q.known(map[cloud.NodeID]int{q.On: 1}), true
	}
	if len(q.Affinity) > 0 {
		return q.known(q.Affinity), true
	}
	for k, v := range q.Selector {
		if v == "" {
			continue // hosts without the label match too
		}
		if hosts := q.ix.labels[k][v]; len(hosts) <= fewHosts {
			return hosts, true
		}
	}
	return nil, false
}

// known returns the hosts of the index that are in members with a count above 0.
func (q *query) known(members map[cloud.NodeID]int) (out []*host) {
	for id, n := range members {
		if h := q.ix.hosts[id]; h != nil && n > 0 {
			out = append(out, h)
		}
	}
	return out
}

// best returns the host with the lowest rank of those hosts that no filter excludes.
func (q *query) best(hosts []*host, in within) (out *host) {
	var lowest rank
	for _, h := range hosts {
		if in != nil && !in(h) || !q.fits(h) {
			continue
		}
		if r := q.rankOf(h); out == nil || r.compare(lowest) < 0 {
			out, lowest = h, r
		}
	}
	return out
}

// searchSpread searches the hosts with the values of the spread label in the order of their number of VMs, and then the
// hosts without the label.
func (q *query) searchSpread(in within) *host {
	if q.SpreadLabel == "" {
		return q.searchAffinity(in)
	}
	byValue := q.ix.labels[q.SpreadLabel]
	byCount := map[int][]string{}
	for value := range byValue {
		byCount[q.spread[value]] = append(byCount[q.spread[value]], value)
	}
	counts := make([]int, 0, len(byCount))
	for n := range byCount {
		counts = append(counts, n)
	}
	slices.Sort(counts)
	for _, n := range counts {
		var few []*host
		total := 0
		for _, value := range byCount[n] {
			if total += len(byValue[value]); total <= fewHosts {
				few = append(few, byValue[value]...)
			}
		}
		var h *host
		if total <= fewHosts {
			h = q.best(few, in)
		} else {
			h = q.searchAffinity(func(h *host) bool {
				value, ok := h.node.Labels[q.SpreadLabel]
				return ok && q.spread[value] == n && (in == nil || in(h))
			})
		}
		if h != nil {
			return h
		}
	}
	return q.searchAffinity(func(h *host) bool {
		_, ok := h.node.Labels[q.SpreadLabel]
		return !ok && (in == nil || in(h))
	})
}

// searchAffinity searches the hosts with a member of the soft affinity group, and then all hosts.
func (q *query) searchAffinity(in within) *host {
	if len(q.AffinitySoft) > 0 {
		if h := q.best(q.known(q.AffinitySoft), in); h != nil {
			return h
		}
	}
	return q.searchCells(in)
}

// searchCells searches all hosts, from the highest level of cells to the lowest.
func (q *query) searchCells(in within) *host {
	for level := levels; level >= 0; {
		next := -1
		var best *host
		for _, c := range q.ix.classes {
			if !c.kvm || c.otherArchitecture(q.Request) || c.lacksModel(q.Request) {
				continue
			}
			need := c.need(q.Need)
			for i := range c.cells {
				one := &c.cells[i]
				l := need.level(one.free)
				if l > level || l < level && l <= next || !need.mayCover(one.free) {
					continue
				}
				if l < level {
					next = l
				} else if h := q.first(one.cell, in, best); h != nil {
					best = h
				}
			}
		}
		if best != nil {
			return best
		}
		level = next
	}
	return nil
}

// first returns the first host of a cell after the VM's position on the ring that no filter excludes. It returns nil if
// there is none, or if the host other comes before it.
func (q *query) first(c *cell, in within, other *host) *host {
	from, _ := slices.BinarySearchFunc(c.hosts, q.position, func(h *host, at uint64) int { return cmp.Compare(h.position, at) })
	for i := range c.hosts {
		h := c.hosts[(from+i)%len(c.hosts)]
		if other != nil && cmp.Or(cmp.Compare(h.position-q.position, other.position-q.position), cmp.Compare(h.node.ID, other.node.ID)) > 0 {
			return nil
		}
		if (in == nil || in(h)) && q.fits(h) {
			return h
		}
	}
	return nil
}
