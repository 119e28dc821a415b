package schedule

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestSnapshot runs the scripts in testdata/snapshot. `host` is as in TestPlace. `vm id= on= vcpus= mem= disk=` adds a
// VM that is started elsewhere if its host is lost, and allocates its capacity; `stays` (the VM is not started
// elsewhere and cannot be moved), `priority=`, `apart=`, `near=` and `select=key:value` may be added. `losses` prints
// what happens if each host is lost, and `rebalance [most=]` proposes moves.
func TestSnapshot(t *testing.T) {
	datadriven.Walk(t, "testdata/snapshot", func(t *testing.T, path string) {
		s := &Snapshot{Now: now}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "host":
				n, lastSeen := testHost(t, d)
				s.Hosts = append(s.Hosts, SnapshotHost{*n, lastSeen})
				return "ok"
			case "vm":
				addVM(t, d, s)
				return "ok"
			case "losses":
				var out []string
				for _, l := range FindLosses(s) {
					out = append(out, fmt.Sprintf("%s vms=%d recovered=%d waiting=%d %s %s", l.Name, l.VMs, l.Recovered, l.Waiting, l.First, l.Reason))
				}
				return strings.Join(out, "\n")
			case "rebalance":
				most := 100
				d.MaybeScanArgs(t, "most", &most)
				return printPlan(Rebalance(s, most))
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

func addVM(t *testing.T, d *datadriven.TestData, s *Snapshot) {
	var id, on, label string
	d.ScanArgs(t, "id", &id)
	d.ScanArgs(t, "on", &on)
	vm := SnapshotVM{Name: id, Node: cloud.NodeID(on), Request: Request{VM: cloud.VMID(id), Need: capacity(t, d)}, Recovers: true}
	if d.HasArg("stays") {
		vm.Recovers, vm.Immovable = false, "has a disk on its host"
	}
	d.MaybeScanArgs(t, "priority", &vm.Priority)
	d.MaybeScanArgs(t, "apart", &vm.Groups.AntiAffinity)
	d.MaybeScanArgs(t, "near", &vm.Groups.AffinitySoft)
	if d.MaybeScanArgs(t, "select", &label) {
		k, v, _ := strings.Cut(label, ":")
		vm.Request.Selector = map[string]string{k: v}
	}
	for i := range s.Hosts {
		if n := &s.Hosts[i].Node; n.ID == vm.Node {
			n.Allocated = n.Allocated.Plus(vm.Request.Need)
		}
	}
	s.VMs = append(s.VMs, vm)
}

func printPlan(p Plan) string {
	var out strings.Builder
	for _, m := range p.Moves {
		fmt.Fprintf(&out, "%s from %s to %s: %.2f -> %.2f\n", m.Name, m.From, m.To, m.Before, m.After)
	}
	fmt.Fprintf(&out, "before %.2f..%.2f, after %.2f..%.2f", p.Before.Lowest, p.Before.Highest, p.After.Lowest, p.After.Highest)
	return out.String()
}

// randomSnapshot returns a cloud with VMs that fit on their hosts, and that share no host with another VM of their
// anti-affinity group.
func randomSnapshot(rng *rand.Rand) *Snapshot {
	s := &Snapshot{Now: now}
	for i := range 2 + rng.IntN(12) {
		size := cloud.Capacity{VCPUs: 8 << rng.IntN(3), MemoryMiB: 16384, StorageGiB: 500}
		s.Hosts = append(s.Hosts, SnapshotHost{cloud.Node{
			ID: cloud.NodeID(fmt.Sprint("n", i)), Name: fmt.Sprint("n", i), Declared: cloud.NodeReady, Hypervisors: []cloud.Hypervisor{cloud.KVM},
			Allocatable: size, Cordoned: rng.IntN(10) == 0,
		}, now})
	}
	for i := range rng.IntN(60) {
		h := &s.Hosts[min(rng.IntN(len(s.Hosts)), rng.IntN(len(s.Hosts)))].Node // unequal
		vm := SnapshotVM{
			Name: fmt.Sprint("v", i), Node: h.ID, Recovers: rng.IntN(4) > 0, Priority: rng.IntN(3),
			Request: Request{VM: cloud.VMID(fmt.Sprint("v", i)), Need: cloud.Capacity{VCPUs: 1 << rng.IntN(3), MemoryMiB: 512 << rng.IntN(3)}},
		}
		if rng.IntN(4) == 0 {
			vm.Immovable = "has a disk on its host"
		}
		if rng.IntN(3) == 0 {
			vm.Groups.AntiAffinity = fmt.Sprint("g", rng.IntN(4))
		}
		if Shortage(h, vm.Request.Need) != "" || violates(s, &vm) {
			continue
		}
		h.Allocated = h.Allocated.Plus(vm.Request.Need)
		s.VMs = append(s.VMs, vm)
	}
	return s
}

func violates(s *Snapshot, vm *SnapshotVM) bool {
	for _, o := range s.VMs {
		if vm.Groups.AntiAffinity != "" && o.Groups.AntiAffinity == vm.Groups.AntiAffinity && o.Node == vm.Node && o.Name != vm.Name {
			return true
		}
	}
	return false
}

// TestRandomLosses compares FindLosses with an independent computation of each loss: the host is removed from a copy of
// the snapshot, and the VMs are placed one after the other. FindLosses must also leave its trial as it was.
func TestRandomLosses(t *testing.T) {
	waiting := 0
	for seed := range 200 {
		s := randomSnapshot(rand.New(rand.NewPCG(uint64(seed), 1)))
		losses := FindLosses(s)
		require.Len(t, losses, len(s.Hosts))
		for _, l := range losses {
			alone := &Snapshot{Now: s.Now, VMs: s.VMs}
			var lost SnapshotHost
			for _, h := range s.Hosts {
				if h.Node.ID == l.Node {
					lost = h
				} else {
					alone.Hosts = append(alone.Hosts, h)
				}
			}
			require.Equal(t, lost.Node.ID, l.Node)
			tr := newTrial(alone)
			recovered := 0
			for priority := 2; priority >= 0; priority-- {
				for _, vm := range byID(s.VMs) {
					if vm.Node != lost.Node.ID || !vm.Recovers || vm.Priority != priority {
						continue
					}
					tr.join(vm, vm.Node, -1)
					if d := tr.place(vm, nil); d.Node != "" {
						tr.add(vm, d.Node)
						recovered++
					}
				}
			}
			require.Equal(t, recovered, l.Recovered, "seed %d: VMs of the lost host %s that fit elsewhere", seed, l.Name)
			waiting += l.Waiting
		}
	}
	require.Greater(t, waiting, 100, "too few VMs wait")
}

func byID(vms []SnapshotVM) (out []*SnapshotVM) {
	for i := range vms {
		out = append(out, &vms[i])
	}
	sortVMs(out)
	return out
}

// TestRandomRebalance checks the proposals for random clouds: after the moves no host has more allocated than it has,
// no anti-affinity group has two VMs on a host, each move gains at least MinGain, and the fullest host is not fuller.
func TestRandomRebalance(t *testing.T) {
	moves := 0
	for seed := range 300 {
		s := randomSnapshot(rand.New(rand.NewPCG(uint64(seed), 2)))
		p := Rebalance(s, 50)
		require.Equal(t, p, Rebalance(s, 50), "seed %d: another result for the same snapshot", seed)
		require.LessOrEqual(t, p.After.Highest, p.Before.Highest, "seed %d", seed)
		moved := map[cloud.VMID]bool{}
		for _, m := range p.Moves {
			require.False(t, moved[m.VM], "seed %d: %s is moved twice", seed, m.Name)
			moved[m.VM] = true
			require.GreaterOrEqual(t, m.Before-m.After, MinGain, "seed %d: %+v", seed, m)
			for i := range s.VMs {
				if vm := &s.VMs[i]; vm.Request.VM == m.VM {
					require.Empty(t, vm.Immovable)
					require.Equal(t, m.From, vm.Node)
					vm.Node = m.To
					move(t, s, vm, m)
					require.False(t, violates(s, vm), "seed %d: %+v breaks an anti-affinity group", seed, m)
				}
			}
			moves++
		}
	}
	require.Greater(t, moves, 300, "too few moves")
}

func move(t *testing.T, s *Snapshot, vm *SnapshotVM, m Move) {
	for i := range s.Hosts {
		n := &s.Hosts[i].Node
		switch n.ID {
		case m.From:
			n.Allocated = n.Allocated.Minus(vm.Request.Need)
		case m.To:
			require.Empty(t, Shortage(n, vm.Request.Need), "%+v", m)
			require.False(t, n.Cordoned, "%+v", m)
			n.Allocated = n.Allocated.Plus(vm.Request.Need)
		}
	}
}
