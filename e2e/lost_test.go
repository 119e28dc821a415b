//go:build long

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

const (
	// writeAcknowledged makes a guest write the numbers 1, 2, 3 and so on to its volume, each to a sector of its own, and
	// print each number that the volume has acknowledged as durable. The arguments are the first sector and the name of the
	// series. The line can be repeated.
	writeAcknowledged = "run mkdir /tmp/%[2]s 2>/dev/null && { (i=1; while printf %%512d $i | dd of=/dev/vda bs=512 seek=$((%[1]d+i)) " +
		"conv=notrunc,fsync; do echo ACK-%[2]s=$i= >/dev/console; i=$((i+1)); sleep 0.5; done) >/dev/null 2>&1 </dev/null & } ; true"
	// readAcknowledged makes a guest compare what it reads with the numbers. The arguments are the first sector and the
	// last number.
	readAcknowledged = "run dd if=/dev/vda bs=512 skip=%[1]d count=%[2]d 2>/dev/null | tr -s ' ' '\\n' | sed 1d | " +
		"awk -v n=%[2]d '$1 != NR {bad++} END {printf \"KEPT-%[1]d n=%%d lost=%%d wrong=%%d\\n\", n, n-NR, bad}'"
)

// lostStory has VMs with one RBD volume each, whose hosts are lost. The control plane may start the VMs on other hosts.
type lostStory struct {
	*rbdCloud
	ctx     context.Context
	nodes   map[string]int // the numbers of the hosts, by ID
	vms     []*lostVM
	runners *runners
	series  int
}

type lostVM struct {
	id, name, volume string
	host             int // the number of the host on which the VM runs, as the test has seen it last
	acknowledged     int // the last number of the present series that the volume has acknowledged before the host was lost
}

// newLostStory starts count VMs on one host, which may run on all hosts.
func (c *rbdCloud) newLostStory(ctx context.Context, host, count int, memory uint64) *lostStory {
	s := &lostStory{rbdCloud: c, ctx: ctx, nodes: map[string]int{}}
	nodes, err := c.admin.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
	require.NoError(c.t, err)
	for _, n := range nodes.GetNodes() {
		for i, h := range c.hosts {
			if n.GetName() == h.Name {
				s.nodes[n.GetId()] = i + 1
			}
		}
	}
	for i := range count {
		name := fmt.Sprintf("precious-%d", i)
		s.vms = append(s.vms, &lostVM{name: name, host: host, volume: c.createVolume(ctx, "ceph", name, "")})
	}
	for _, vm := range s.vms {
		made, err := c.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
			Name: vm.name, OrgId: "default", ProjectId: "default", Metadata: map[string]string{"trivet/ha": "restart"},
			Labels: map[string]string{"trivet/node-selector": "host=" + c.hosts[host-1].Name},
			Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: memory},
				Disks: []*vmv1.DiskSpec{{Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: vm.volume}}}},
				Boot:  &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: guestCmdline},
			},
		})
		require.NoError(c.t, err)
		vm.id = made.GetId()
		_, err = c.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: vm.id})
		require.NoError(c.t, err)
	}
	for _, vm := range s.vms {
		require.NoError(c.t, consoleSays(ctx, c.world, vm.id, banner, 1))
		s.update(vm, map[string]string{"trivet/node-selector": ""}, nil)
	}
	s.runners = s.watchRunners()
	return s
}

func (s *lostStory) update(vm *lostVM, labels, metadata map[string]string) {
	s.t.Helper()
	_, err := s.admin.VMs.UpdateVm(s.ctx, &vmv1.UpdateVmRequest{OrgId: "default", ProjectId: "default", VmId: vm.id, Labels: labels, Metadata: metadata})
	require.NoError(s.t, err)
}

// sector is the first sector of the present series of numbers.
func (s *lostStory) sector() int { return 8192 + 4096*s.series }

// write begins a new series of numbers in the guests of VMs, and waits until each volume has acknowledged a few.
func (s *lostStory) write(vms []*lostVM) {
	s.t.Helper()
	s.series++
	name := fmt.Sprintf("series-%d", s.series)
	for _, vm := range vms {
		s.on(vm.host).command(s.ctx, vm.id, fmt.Sprintf(writeAcknowledged, s.sector(), name), "ACK-"+name+"=3=")
	}
}

// stopped reads the last acknowledged numbers of VMs that do not run any more. The log of a guest is a file of its lost
// host, which QEMU has written.
func (s *lostStory) stopped(vms []*lostVM) {
	s.t.Helper()
	number := regexp.MustCompile(fmt.Sprintf(`ACK-series-%d=(\d+)=`, s.series))
	for _, vm := range vms {
		text, err := os.ReadFile(filepath.Join(s.hosts[vm.host-1].DataDir(), "vms", vm.id, "console.log"))
		require.NoError(s.t, err)
		all := number.FindAllSubmatch(text, -1)
		require.NotEmpty(s.t, all)
		vm.acknowledged, err = strconv.Atoi(string(all[len(all)-1][1]))
		require.NoError(s.t, err)
	}
}

// kept requires that the guests of VMs, which run on other hosts, read all acknowledged numbers.
func (s *lostStory) kept(vms []*lostVM) {
	s.t.Helper()
	total := 0
	for _, vm := range vms {
		require.NoError(s.t, consoleSays(s.ctx, s.on(vm.host), vm.id, banner, 1))
		s.command(s.ctx, vm.id, fmt.Sprintf(readAcknowledged, s.sector()+1, vm.acknowledged),
			fmt.Sprintf("KEPT-%d n=%d lost=0 wrong=0", s.sector()+1, vm.acknowledged))
		total += vm.acknowledged
	}
	s.t.Logf("%d VMs have all of their %d acknowledged writes", len(vms), total)
}

// elsewhere waits until VMs run on hosts that were not lost, and prints how long this has taken.
func (s *lostStory) elsewhere(vms []*lostVM, began time.Time, lost ...int) {
	s.t.Helper()
	for _, vm := range vms {
		now := eventually(s.ctx, s.t, s.admin, vm.id, vm.name+" runs on another host", func(now *vmv1.VirtualMachine) bool {
			for _, host := range lost {
				if s.nodes[now.GetNodeId()] == host {
					return false
				}
			}
			return now.GetState() == vmv1.VmState_VM_STATE_RUNNING && now.GetNodeId() != ""
		})
		vm.host = s.nodes[now.GetNodeId()]
	}
	s.t.Logf("%d VMs run on other hosts %v after the loss", len(vms), time.Since(began).Round(100*time.Millisecond))
}

// at returns the VMs on a host.
func (s *lostStory) at(host int) (vms []*lostVM) {
	for _, vm := range s.vms {
		if vm.host == host {
			vms = append(vms, vm)
		}
	}
	return vms
}

// back requires that a host that answers again has removed all VMs that run on other hosts.
func (s *lostStory) back(host int) {
	s.t.Helper()
	agent := s.hosts[host-1]
	require.NoError(s.t, agent.Healthy(s.ctx))
	require.NoError(s.t, lab.Until(s.ctx, agent.Name+" has removed the VMs that it lost", func(context.Context) error {
		for _, vm := range s.vms {
			if vm.host == host {
				continue
			}
			if _, err := os.Stat(filepath.Join(agent.DataDir(), "vms", vm.id)); !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("the directory of %s exists: %w", vm.name, err)
			}
		}
		return nil
	}))
	for _, vm := range s.vms {
		now := eventually(s.ctx, s.t, s.admin, vm.id, "the VM is on its host", func(now *vmv1.VirtualMachine) bool { return now.GetNodeId() != "" || vm.host == 0 })
		require.Equal(s.t, vm.host, s.nodes[now.GetNodeId()], "%s has changed its host", vm.name)
	}
}

// end ends the witness, which must not have seen a VM on two hosts, and deletes the VMs with their volumes.
func (s *lostStory) end() {
	s.t.Helper()
	s.runners.stop()
	require.Empty(s.t, s.runners.twice, "these VMs had processes on two hosts")
	for _, vm := range s.vms {
		_, err := s.admin.VMs.DeleteVm(s.ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: vm.id, Force: true})
		require.NoError(s.t, err)
	}
	for _, vm := range s.vms {
		require.NoError(s.t, lab.Until(s.ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := s.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: vm.volume})
			return err
		}))
	}
}

// runners is a witness that observes on which hosts VMs have processes, every 20 ms.
type runners struct {
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu sync.Mutex
	// twice describes the observations of a VM on two hosts at once.
	twice []string
	// ended is when the last process of a VM on a host ended, by the number of the host and the ID of the VM.
	ended map[int]map[string]time.Time
}

func (s *lostStory) watchRunners() *runners {
	ctx, cancel := context.WithCancel(s.ctx)
	r := &runners{cancel: cancel, ended: map[int]map[string]time.Time{}}
	var trees []*cgroup.Tree // They stay open: Close would remove an empty tree, which the agent needs.
	for i, h := range s.hosts {
		tree, err := cgroup.Open(h.Cgroup)
		require.NoError(s.t, err)
		trees, r.ended[i+1] = append(trees, tree), map[string]time.Time{}
	}
	r.done.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			for _, vm := range s.vms {
				r.observe(trees, vm.id)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	s.t.Cleanup(r.stop)
	return r
}

func (r *runners) observe(trees []*cgroup.Tree, vm string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	on := map[int][]int{}
	for i, tree := range trees {
		if procs, err := tree.Procs(vm); err == nil && len(procs) > 0 {
			on[i+1] = procs
			r.ended[i+1][vm] = time.Now()
		}
	}
	// A process that has ended since it was observed is no second runner.
	for host := range on {
		if procs, err := trees[host-1].Procs(vm); err != nil || len(procs) == 0 {
			delete(on, host)
		}
	}
	if len(on) > 1 && len(r.twice) < 10 {
		r.twice = append(r.twice, fmt.Sprintf("%s: the processes by host are %v", vm, on))
	}
}

// lastEnd returns when the last process of the VMs on a host ended.
func (r *runners) lastEnd(host int, vms []*lostVM) (last time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, vm := range vms {
		if at := r.ended[host][vm.id]; at.After(last) {
			last = at
		}
	}
	return last
}

func (r *runners) stop() {
	r.cancel()
	r.done.Wait()
}

// names returns the names of VMs, for messages.
func names(vms []*lostVM) string {
	all := make([]string, len(vms))
	for i, vm := range vms {
		all[i] = vm.name
	}
	return strings.Join(all, " ")
}
