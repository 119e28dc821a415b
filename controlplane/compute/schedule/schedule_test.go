package schedule

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPlace runs the scripts in testdata. `host id= vcpus= mem= disk=` adds a host with that allocatable capacity, in
// MiB and GiB; `label=key:value`, `cordoned` or `lost` (NOT_READY) may be added. `place vm= vcpus= mem= disk=` places a
// VM that needs that capacity, and prints the chosen host, or the reason for each host; `select=key:value` and
// `model=CPU-MODEL` may be added. `together=`, `apart=`, `near=` and `far=` put the VM into an affinity group, an
// anti-affinity group, a soft affinity group and a soft anti-affinity group, and `spread=label` into the spread group
// of that label. The VM's capacity is then allocated on the chosen host.
func TestPlace(t *testing.T) {
	datadriven.Walk(t, "testdata/place", func(t *testing.T, path string) {
		c := &testCloud{ix: NewIndex(), members: map[string]map[cloud.NodeID]int{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "host":
				n, lastSeen := testHost(t, d)
				c.ix.Put(n, lastSeen)
				return "ok"
			case "place":
				return c.place(t, d)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

// testCloud is the cloud of a script. It has the hosts of the members of each group, by the argument of place.
type testCloud struct {
	ix      *Index
	members map[string]map[cloud.NodeID]int
}

const now cloud.Time = 1_000_000

func testHost(t *testing.T, d *datadriven.TestData) (*cloud.Node, cloud.Time) {
	var id, label string
	n := &cloud.Node{Declared: cloud.NodeReady, Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664, CPUModels: []string{"qemu64"}}
	d.ScanArgs(t, "id", &id)
	n.ID, n.Name = cloud.NodeID(id), id
	n.Allocatable = capacity(t, d)
	n.Cordoned = d.HasArg("cordoned")
	if d.MaybeScanArgs(t, "label", &label) {
		k, v, _ := strings.Cut(label, ":")
		n.Labels = map[string]string{k: v}
	}
	if d.HasArg("lost") {
		return n, now - 2*cloud.HeartbeatTimeout
	}
	return n, now
}

func capacity(t *testing.T, d *datadriven.TestData) (c cloud.Capacity) {
	var vcpus int
	var mem, disk uint64
	d.MaybeScanArgs(t, "vcpus", &vcpus)
	d.MaybeScanArgs(t, "mem", &mem)
	d.MaybeScanArgs(t, "disk", &disk)
	return cloud.Capacity{VCPUs: uint32(vcpus), MemoryMiB: mem, StorageGiB: disk}
}

func (c *testCloud) place(t *testing.T, d *datadriven.TestData) string {
	var id, label string
	d.ScanArgs(t, "vm", &id)
	r := &Request{VM: cloud.VMID(id), Now: now, Need: capacity(t, d), Architecture: cloud.X8664}
	if d.MaybeScanArgs(t, "select", &label) {
		k, v, _ := strings.Cut(label, ":")
		r.Selector = map[string]string{k: v}
	}
	d.MaybeScanArgs(t, "model", &r.CPUModel)
	var groups []string
	for _, g := range []struct {
		arg     string
		members *map[cloud.NodeID]int
	}{
		{"together", &r.Affinity}, {"apart", &r.AntiAffinity}, {"near", &r.AffinitySoft}, {"far", &r.AntiAffinitySoft}, {"spread", &r.Spread},
	} {
		var name string
		if !d.MaybeScanArgs(t, g.arg, &name) {
			continue
		}
		if g.arg == "spread" {
			r.SpreadLabel = name
		}
		key := g.arg + " " + name
		if c.members[key] == nil {
			c.members[key] = map[cloud.NodeID]int{}
		}
		*g.members = c.members[key]
		groups = append(groups, key)
	}
	out := c.ix.Place(r)
	require.Equal(t, out, c.ix.Place(r), "the same request was placed on another host")
	if out.Node == "" {
		lines := []string{"nowhere"}
		for _, one := range out.Refused {
			lines = append(lines, one.Name+" "+one.Reason)
		}
		return strings.Join(lines, "\n")
	}
	c.ix.Allocate(out.Node, r.Need)
	for _, key := range groups {
		c.members[key][out.Node]++
	}
	return "on " + string(out.Node)
}

// TestSummarize checks that the text for a large cloud counts the hosts by reason, and that its length is bounded.
func TestSummarize(t *testing.T) {
	var refused []Refusal
	add := func(n int, reason, group string) {
		for i := range n {
			refused = append(refused, Refusal{Name: fmt.Sprint("host-", len(refused)), Reason: fmt.Sprintf(reason, i), Group: group})
		}
	}
	add(2, "has %d vCPUs free, 4 needed", "has less than 4 vCPUs free")
	first, details := Summarize(refused)
	require.Equal(t, "host-0 has 0 vCPUs free, 4 needed", first)
	require.Equal(t, []Detail{{"host-0", "has 0 vCPUs free, 4 needed"}, {"host-1", "has 1 vCPUs free, 4 needed"}}, details)
	first, _ = Summarize([]Refusal{{Name: "host-0", Reason: "is NOT_READY"}, {Name: "host-1", Reason: "has no room"}})
	require.Equal(t, "host-1 has no room", first)
	add(9000, "has %d vCPUs free, 4 needed", "has less than 4 vCPUs free")
	add(1, "is CORDONED%.0d", "is CORDONED")
	for i := range 20 {
		add(2, "%d", fmt.Sprint("reason ", i))
	}
	first, details = Summarize(refused)
	require.Equal(t, "of 9043 hosts, each of 9002 has less than 4 vCPUs free", first)
	require.Len(t, details, 9)
	require.Equal(t, Detail{"has less than 4 vCPUs free", "9002 hosts, for example host-0, host-1, host-2"}, details[0])
	require.Equal(t, Detail{"reason 0", "2 hosts: host-9003, host-9004"}, details[1])
	require.Equal(t, Detail{"other reasons", "27 hosts"}, details[8])
}

func BenchmarkPlace10000(b *testing.B) {
	ix := NewIndex()
	for i := range 10_000 {
		ix.Put(&cloud.Node{
			ID: cloud.NodeID(fmt.Sprint("n", i)), Declared: cloud.NodeReady, Hypervisors: []cloud.Hypervisor{cloud.KVM},
			Allocatable: cloud.Capacity{VCPUs: 64, MemoryMiB: 1 << 18, StorageGiB: 4096}, Allocated: cloud.Capacity{VCPUs: uint32(i % 64)},
		}, now)
	}
	r := &Request{VM: "v", Now: now, Need: cloud.Capacity{VCPUs: 2, MemoryMiB: 2048, StorageGiB: 10}}
	for b.Loop() {
		ix.Place(r)
	}
}
