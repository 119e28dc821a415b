package uplink

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// TestAssembly runs the scripts in testdata/assembly. `stream` begins a new watch. `message term= rev= vms= released=
// images= volumes= gone= complete` adds a message to the assembly and prints the resulting assignment or error. A VM or
// volume is written as id:generation; gone are released volumes.
func TestAssembly(t *testing.T) {
	datadriven.Walk(t, "testdata/assembly", func(t *testing.T, path string) {
		var a assembly
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "stream":
				a.begin()
				return ""
			case "message":
				var m agentv1.WatchResponse
				d.ScanArgs(t, "term", &m.Term)
				d.ScanArgs(t, "rev", &m.Revision)
				m.Complete = d.HasArg("complete")
				var vms, released, images, volumes []string
				d.MaybeScanArgs(t, "vms", &vms)
				d.MaybeScanArgs(t, "released", &released)
				d.MaybeScanArgs(t, "images", &images)
				d.MaybeScanArgs(t, "volumes", &volumes)
				d.MaybeScanArgs(t, "gone", &m.ReleasedVolumes)
				for _, v := range volumes {
					one := &agentv1.AssignedVolume{}
					id, generation, _ := strings.Cut(v, ":")
					one.VolumeId = id
					fmt.Sscan(generation, &one.Generation)
					m.Volumes = append(m.Volumes, one)
				}
				for _, vm := range vms {
					one := &agentv1.AssignedVm{}
					id, generation, _ := strings.Cut(vm, ":")
					one.VmId = id
					fmt.Sscan(generation, &one.Generation)
					m.Vms = append(m.Vms, one)
				}
				m.ReleasedVms, m.Images = released, images
				got, err := a.add(&m)
				switch {
				case err != nil:
					return "refused: " + err.Error()
				case got == nil:
					return "nothing new"
				}
				return show(got)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

// violation adds watches to an assembly whose last message must not give an assignment: an incomplete snapshot, and a
// message of a lower term. It returns a description of the first one that did, or "".
func violation() string {
	for _, c := range []struct {
		what     string
		messages []*agentv1.WatchResponse
	}{
		{"an incomplete snapshot", []*agentv1.WatchResponse{{Term: 1, Revision: 1}}},
		{"a lower term", []*agentv1.WatchResponse{{Term: 2, Revision: 1, Complete: true}, {Term: 1, Revision: 2, Complete: true,
			Images: []string{"x"}}}},
	} {
		var a assembly
		a.begin()
		for i, m := range c.messages {
			if got, err := a.add(m); i == len(c.messages)-1 && err == nil && got != nil {
				return c.what
			}
		}
	}
	for what, messages := range map[string][]*agentv1.SyncNetworksResponse{
		"an incomplete snapshot of networks": {{Term: 1, Revision: 1}},
		"networks of a lower term":           {{Term: 2, Revision: 1, Complete: true}, {Term: 1, Revision: 2, Complete: true}},
	} {
		var a networkAssembly
		a.begin("n1", 0)
		for i, m := range messages {
			if got, err := a.add(m); i == len(messages)-1 && err == nil && got != nil {
				return what
			}
		}
	}
	return ""
}

func TestOnlyCompleteAssignmentsAreDelivered(t *testing.T) { require.Empty(t, violation()) }

func show(a *Assignment) string {
	out := fmt.Sprintf("term %d revision %d:", a.Term, a.Revision)
	for _, id := range slices.Sorted(maps.Keys(a.VMs)) {
		out += fmt.Sprintf(" %s:%d", id, a.VMs[id].GetGeneration())
	}
	for i, id := range slices.Sorted(maps.Keys(a.Volumes)) {
		if i == 0 {
			out += "  volumes"
		}
		out += fmt.Sprintf(" %s:%d", id, a.Volumes[id].GetGeneration())
	}
	if len(a.Released) > 0 {
		out += fmt.Sprintf("  released %v", a.Released)
	}
	if len(a.Images) > 0 {
		out += fmt.Sprintf("  images %v", a.Images)
	}
	return out
}
