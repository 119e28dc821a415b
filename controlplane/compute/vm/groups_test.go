package vm

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func labelled(labels map[string]string) func(*CreateRequest) {
	return func(q *CreateRequest) { q.Labels = labels }
}

// TestPlacementGroups creates VMs with each of the labels of groups. The hosts h1 and h2 are in one rack.
func TestPlacementGroups(t *testing.T) {
	w := newWorld(t)
	racks := map[cloud.NodeID]string{}
	for i, rack := range []string{"a", "a", "b"} {
		id := w.AddHost(fmt.Sprint("h", i+1), plenty(), func(n *cloud.Node) { n.Labels = map[string]string{"rack": rack} })
		racks[id] = rack
	}
	hostsOf := func(name string, n int, labels map[string]string) (hosts []cloud.NodeID) {
		for i := range n {
			hosts = append(hosts, w.create(fmt.Sprint(name, "-", i), labelled(labels)).Node)
		}
		return hosts
	}
	distinct := func(hosts []cloud.NodeID) map[cloud.NodeID]int {
		out := map[cloud.NodeID]int{}
		for _, h := range hosts {
			out[h]++
		}
		return out
	}

	for _, label := range []string{cloud.AffinityLabel, cloud.AffinitySoftLabel} {
		require.Len(t, distinct(hostsOf("near-"+label[len("trivet/"):], 4, map[string]string{label: "app"})), 1, label)
	}
	for host, n := range distinct(hostsOf("far", 6, map[string]string{cloud.AntiAffinitySoftLabel: "app"})) {
		require.Equal(t, 2, n, "VMs of the soft anti-affinity group on %s", host)
	}
	count := map[string]int{}
	for _, h := range hostsOf("spread", 6, map[string]string{cloud.SpreadLabel: "rack"}) {
		count[racks[h]]++
	}
	require.Equal(t, map[string]int{"a": 3, "b": 3}, count, "VMs per rack")
	// Another spread group begins anew.
	count = map[string]int{}
	for _, h := range hostsOf("other", 2, map[string]string{cloud.SpreadLabel: "rack", cloud.SpreadGroupLabel: "db"}) {
		count[racks[h]]++
	}
	require.Equal(t, map[string]int{"a": 1, "b": 1}, count, "VMs per rack")

	// An affinity group does not leave its host, a soft one does.
	large := func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 60} }
	_, err := w.vms.Create(w.as(acme, ""), acme, small("big", labelled(map[string]string{cloud.AffinityLabel: "app"}), large), [32]byte{})
	require.ErrorContains(t, err, "no host fits")
	f, _ := fault.From(err)
	texts := fmt.Sprint(f.Details)
	require.Contains(t, texts, "runs no member of the VM's affinity group")
	require.Contains(t, texts, "vCPUs free, 60 needed")
	w.AddHost("h4", plenty())
	w.create("big", labelled(map[string]string{cloud.AffinitySoftLabel: "app"}), large)

	_, err = w.vms.Create(w.as(acme, ""), acme, small("x", labelled(map[string]string{cloud.SpreadGroupLabel: "db"})), [32]byte{})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestHostLabel chooses the host of a VM by the label with the host's name, which the agent has not sent. A VM for a host
// without room is refused, and so is a VM for a host that does not exist.
func TestHostLabel(t *testing.T) {
	w := newWorld(t)
	hosts := map[string]cloud.NodeID{}
	for i := range 4 {
		name := fmt.Sprint("h", i)
		hosts[name] = w.AddHost(name, plenty())
	}
	on := func(host string) func(*CreateRequest) {
		return labelled(map[string]string{cloud.NodeSelectorLabel: cloud.HostLabel + "=" + host})
	}
	for name, id := range hosts {
		for i := range 3 {
			require.Equal(t, id, w.create(fmt.Sprint("on-", name, "-", i), on(name)).Node)
		}
	}
	large := func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 60} }
	for host, why := range map[string]string{"h1": "vCPUs free, 60 needed", "h9": "does not have the labels of the node selector"} {
		_, err := w.vms.Create(w.as(acme, ""), acme, small("large", on(host), large), [32]byte{})
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		f, _ := fault.From(err)
		require.Contains(t, fmt.Sprint(f.Details), why)
	}
}

// TestConcurrentAffinity creates 8 VMs of a new affinity group at the same time. All must be on one host.
func TestConcurrentAffinity(t *testing.T) {
	w := newWorld(t)
	for i := range 8 {
		w.AddHost(fmt.Sprint("h", i), plenty())
	}
	w.delayCommits()
	hosts := make(chan cloud.NodeID)
	for i := range 8 {
		go func() {
			made, err := w.vms.Create(w.as(acme, ""), acme, small(fmt.Sprint("vm-", i), labelled(map[string]string{cloud.AffinityLabel: "app"})), [32]byte{})
			if err != nil {
				t.Error(err)
			}
			hosts <- made.VM.Node
		}()
	}
	seen := map[cloud.NodeID]bool{}
	for range 8 {
		seen[<-hosts] = true
	}
	require.Len(t, seen, 1, "VMs of an affinity group are on several hosts")
}
