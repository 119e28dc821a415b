package schedule

import (
	"fmt"
	"sort"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestPlace runs the scripts in testdata. `host id= vcpus= mem= disk=` adds a host with that allocatable capacity, in
// MiB and GiB; `label=key:value`, `cordoned` or `lost` (NOT_READY) may be added. `place vm= vcpus= mem= disk=` places a
// VM that needs that capacity, and prints the chosen host and the reason for each excluded one; `select=key:value`,
// `avoid=HOST` or `model=CPU-MODEL` may be added. The VM's capacity is then allocated on the chosen host.
func TestPlace(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var fleet []Candidate
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "host":
				fleet = append(fleet, host(t, d))
				return "ok"
			case "place":
				return place(t, d, fleet)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

func host(t *testing.T, d *datadriven.TestData) Candidate {
	var id, label string
	c := Candidate{State: cloud.NodeReady, Node: cloud.Node{Hypervisors: []cloud.Hypervisor{cloud.KVM}, Architecture: cloud.X8664, CPUModels: []string{"qemu64"}}}
	d.ScanArgs(t, "id", &id)
	c.Node.ID = cloud.NodeID(id)
	c.Node.Allocatable = capacity(t, d)
	if d.HasArg("cordoned") {
		c.State = cloud.NodeCordoned
	}
	if d.HasArg("lost") {
		c.State = cloud.NodeNotReady
	}
	if d.MaybeScanArgs(t, "label", &label) {
		k, v, _ := strings.Cut(label, ":")
		c.Node.Labels = map[string]string{k: v}
	}
	return c
}

func capacity(t *testing.T, d *datadriven.TestData) (c cloud.Capacity) {
	var vcpus int
	var mem, disk uint64
	d.MaybeScanArgs(t, "vcpus", &vcpus)
	d.MaybeScanArgs(t, "mem", &mem)
	d.MaybeScanArgs(t, "disk", &disk)
	return cloud.Capacity{VCPUs: uint32(vcpus), MemoryMiB: mem, StorageGiB: disk}
}

func place(t *testing.T, d *datadriven.TestData, fleet []Candidate) string {
	var id, label, avoid, model string
	d.ScanArgs(t, "vm", &id)
	r := &Request{VM: cloud.VMID(id), Need: capacity(t, d), Architecture: cloud.X8664}
	if d.MaybeScanArgs(t, "select", &label) {
		k, v, _ := strings.Cut(label, ":")
		r.Selector = map[string]string{k: v}
	}
	if d.MaybeScanArgs(t, "avoid", &avoid) {
		r.Avoid = map[cloud.NodeID]bool{cloud.NodeID(avoid): true}
	}
	if d.MaybeScanArgs(t, "model", &model) {
		r.CPUModel = model
	}
	before := *r
	node, refused, ok := Place(fleet, r)
	again, _, _ := Place(fleet, r)
	require.Equal(t, node, again, "the same request was placed on another host")
	require.Equal(t, before, *r)
	var out []string
	for n, why := range refused {
		out = append(out, fmt.Sprintf("%s %s", n, why))
	}
	sort.Strings(out)
	if ok {
		for i := range fleet {
			if fleet[i].Node.ID == node {
				require.Empty(t, Shortage(&fleet[i].Node, r.Need))
				fleet[i].Node.Allocated = fleet[i].Node.Allocated.Plus(r.Need)
			}
		}
		out = append([]string{"on " + string(node)}, out...)
	} else {
		out = append([]string{"nowhere"}, out...)
	}
	return strings.Join(out, "\n")
}

func BenchmarkPlace10000(b *testing.B) {
	fleet := make([]Candidate, 10_000)
	for i := range fleet {
		fleet[i] = Candidate{State: cloud.NodeReady, Node: cloud.Node{
			ID: cloud.NodeID(fmt.Sprint("n", i)), Hypervisors: []cloud.Hypervisor{cloud.KVM},
			Allocatable: cloud.Capacity{VCPUs: 64, MemoryMiB: 1 << 18, StorageGiB: 4096},
			Allocated:   cloud.Capacity{VCPUs: uint32(i % 64)},
		}}
	}
	r := &Request{VM: "v", Need: cloud.Capacity{VCPUs: 2, MemoryMiB: 2048, StorageGiB: 10}}
	for b.Loop() {
		Place(fleet, r)
	}
}
