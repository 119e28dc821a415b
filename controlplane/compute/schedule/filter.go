package schedule

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// filter is a rule that excludes hosts. The function excludes formats no text, because it is called for every host that
// a search examines.
type filter struct {
	excludes func(*host, *query) bool
	// reason returns the Refusal of an excluded host. It always sets Reason. An empty Group means that Group equals
	// Reason. An empty Kind means the field kind of this filter.
	reason func(*host, *query) Refusal
	kind   Kind
}

// filters is the table of rules. The first rule that excludes a host gives the reason. The lack of capacity is last,
// because it can change at any time.
var filters = []filter{
	{func(h *host, q *query) bool { return h.node.State(q.Now, h.lastSeen) != cloud.NodeReady },
		func(h *host, q *query) Refusal {
			return Refusal{Reason: statePrefix + h.node.State(q.Now, h.lastSeen).String()}
		}, KindState},
	{func(h *host, _ *query) bool { return !h.class.kvm }, fixed("does not report the hypervisor KVM"), KindHypervisor},
	{func(h *host, q *query) bool { return h.class.otherArchitecture(q.Request) }, fixed("is of another architecture"), KindArchitecture},
	{func(h *host, q *query) bool { return h.class.lacksModel(q.Request) },
		func(_ *host, q *query) Refusal {
			return Refusal{Reason: "does not offer the CPU model " + q.CPUModel}
		}, KindCPUModel},
	{func(h *host, q *query) bool { return h.node.MissingFeature(q.Features) != "" },
		func(h *host, q *query) Refusal { return Refusal{Reason: h.node.FeatureShortage(q.Features)} }, KindFeature},
	{func(h *host, q *query) bool { return q.Skip[h.node.ID] != "" },
		func(h *host, q *query) Refusal { return Refusal{Reason: q.Skip[h.node.ID]} }, KindFull},
	{func(h *host, q *query) bool { return q.check(h) != "" },
		func(h *host, q *query) Refusal { return Refusal{Reason: q.check(h)} }, KindCheck},
	{func(h *host, q *query) bool { return q.On != "" && h.node.ID != q.On },
		fixed("is not the host that the VM must be on"), KindOtherHost},
	{func(h *host, q *query) bool { return lacksLabels(h, q) }, fixed("does not have the labels of the node selector"), KindLabels},
	{func(h *host, q *query) bool { return q.AntiAffinity[h.node.ID] > 0 },
		fixed("runs a member of the same anti-affinity group"), KindAntiAffinity},
	{func(h *host, q *query) bool { return len(q.Affinity) > 0 && q.Affinity[h.node.ID] == 0 },
		fixed("runs no member of the VM's affinity group"), KindAffinity},
	{func(h *host, q *query) bool { return !covers(h.free, q.Need) },
		func(h *host, q *query) Refusal {
			reason, group, kind := shortage(h.free, q.Need)
			return Refusal{Reason: reason, Group: group, Kind: kind}
		}, ""},
}

func fixed(reason string) func(*host, *query) Refusal {
	return func(*host, *query) Refusal { return Refusal{Reason: reason} }
}

func lacksLabels(h *host, q *query) bool {
	for k, v := range q.Selector {
		if h.node.Labels[k] != v {
			return true
		}
	}
	return false
}

// covers reports whether free is enough of each resource.
func covers(free, need cloud.Capacity) bool {
	return free.VCPUs >= need.VCPUs && free.MemoryMiB >= need.MemoryMiB && free.StorageGiB >= need.StorageGiB &&
		free.HugepagesMiB >= need.HugepagesMiB && free.DedicatedVCPUs >= need.DedicatedVCPUs
}

// Shortage returns a text that names the first resource of which the host n has less free than need requires. It
// returns "" if the host has enough of each resource.
func Shortage(n *cloud.Node, need cloud.Capacity) string {
	text, _, _ := shortage(n.Free(), need)
	return text
}

func shortage(free, need cloud.Capacity) (reason, group string, kind Kind) {
	for _, r := range []struct {
		name       string
		kind       Kind
		want, have uint64
	}{
		{"vCPUs", KindVCPUs, uint64(need.VCPUs), uint64(free.VCPUs)},
		{"MiB of memory", KindMemory, need.MemoryMiB, free.MemoryMiB},
		{"MiB of huge pages", KindHugepages, need.HugepagesMiB, free.HugepagesMiB},
		{"dedicated CPUs", KindDedicated, uint64(need.DedicatedVCPUs), uint64(free.DedicatedVCPUs)},
		{"GiB of storage", KindStorage, need.StorageGiB, free.StorageGiB},
	} {
		if r.want > r.have {
			reason = fmt.Sprintf("has %d %s free, %d needed", r.have, r.name, r.want)
			return reason, fmt.Sprintf("has less than %d %s free", r.want, r.name), r.kind
		}
	}
	return "", "", ""
}

// Excludes returns the reason why the host n cannot have the VM that r describes, or "" if it can. The host's state
// does not matter.
func Excludes(n *cloud.Node, r *Request) string {
	ix := NewIndex()
	ix.Put(n, 0)
	q := ix.newQuery(r)
	for _, f := range filters[1:] { // the first is the state
		if h := ix.hosts[n.ID]; f.excludes(h, q) {
			return f.reason(h, q).Reason
		}
	}
	return ""
}

// explain returns the reason for each host of the index, sorted by host ID.
func (ix *Index) explain(q *query) []Refusal {
	out := make([]Refusal, 0, len(ix.hosts))
	for _, h := range ix.hosts {
		for _, f := range filters {
			if !f.excludes(h, q) {
				continue
			}
			why := f.reason(h, q)
			why.Node, why.Name, why.Group = h.node.ID, h.node.Name, cmp.Or(why.Group, why.Reason)
			why.Kind = cmp.Or(why.Kind, f.kind)
			out = append(out, why)
			break
		}
	}
	slices.SortFunc(out, func(a, b Refusal) int { return cmp.Compare(a.Node, b.Node) })
	return out
}
