package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/uplink"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostCommand is the first argument with which this program runs as simulated hosts. Each connects to the control plane
// with the agent's own code (mutual TLS, lease, heartbeats, reports) but runs no VMs. It reports that every VM is built,
// and that it runs if it should.
const hostCommand = "host"

func hostMain(args []string) int {
	flags := flag.NewFlagSet(hostCommand, flag.ExitOnError)
	dir := flags.String("dir", "", "")
	first := flags.Int("first", 0, "")
	members := flags.String("members", "", "")
	vcpus := flags.Uint("vcpus", 0, "")
	local := flags.String("local", "", "")
	_ = flags.Parse(args) // with ExitOnError it returns no error
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ip, err := netip.ParseAddr(*local)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	group, ctx := errgroup.WithContext(ctx)
	tokens := bufio.NewScanner(os.Stdin)
	for i := *first; tokens.Scan(); i++ {
		name, token := hostName(i), tokens.Text()
		group.Go(func() error {
			err := simulate(ctx, filepath.Join(*dir, name), name, token, strings.Split(*members, ","), ip, uint32(*vcpus))
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err)
			}
			return err
		})
	}
	if err := errors.Join(tokens.Err(), group.Wait()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func hostName(i int) string { return fmt.Sprintf("sim-%04d", i) }

// simulate runs a simulated host with these vCPUs until ctx ends. It connects from the address local. The host has 4 GiB
// of memory and 64 GiB of storage for each vCPU.
func simulate(ctx context.Context, dir, name, token string, members []string, local netip.Addr, vcpus uint32) (err error) {
	h := &hollow{told: map[cloud.VMID]uint64{}}
	capacity := &vmv1.NodeCapacity{Vcpus: vcpus, MemoryMib: uint64(vcpus) << 12, StorageGib: uint64(vcpus) << 6}
	h.link, err = uplink.Open(uplink.Options{
		Dir: dir, Seeds: members, LocalIP: local, Token: func() (string, error) { return token, nil }, Name: name, Version: "bench",
		Facts: func() *agentv1.NodeFacts {
			return &agentv1.NodeFacts{BootId: name, QemuVersion: "7.2.0", CpuModels: []string{"max"}, Architecture: vmv1.Architecture_ARCHITECTURE_X86_64}
		},
		Heartbeat: func() *vmv1.HeartbeatNodeRequest {
			return &vmv1.HeartbeatNodeRequest{
				State: vmv1.NodeState_NODE_STATE_READY, Capacity: capacity, Allocatable: capacity,
				Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
			}
		},
		Present: h.present, Assign: h.assign, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return h.link.Run(ctx)
}

// hollow is the state of a simulated host, which reports VMs as built or running although it runs none.
type hollow struct {
	link *uplink.Link

	mu   sync.Mutex
	told map[cloud.VMID]uint64 // the generation of each VM that was last reported
}

func (h *hollow) present() (ids []cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.told {
		ids = append(ids, id)
	}
	return ids
}

func (h *hollow) assign(a uplink.Assignment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, vm := range a.VMs {
		if generation, ok := h.told[id]; ok && generation >= vm.GetGeneration() {
			continue
		}
		h.told[id] = vm.GetGeneration()
		observed := cloud.ObservedBuilt
		switch vm.GetPower() {
		case agentv1.Power_POWER_DESTROYED:
			observed = cloud.ObservedAbsent
		case agentv1.Power_POWER_ON:
			observed = cloud.ObservedRunning
		}
		h.link.Observe(cloud.Observation{
			VM: id, Generation: vm.GetGeneration(), Observed: observed, StartsDone: vm.GetStarts(), StopsWithLease: vm.GetStopsWithLease(),
		})
	}
	for _, id := range a.Released {
		delete(h.told, id)
		h.link.Forget(id)
	}
}

// fleet holds the processes of the simulated hosts.
type fleet struct {
	dir   string
	hosts int // their number
	procs []*exec.Cmd
	logs  []*os.File
}

// fleetOptions describes simulated hosts: their number, how many of them share a process, and their size.
type fleetOptions struct {
	hosts, perProcess int
	vcpus             uint32
}

// startFleet starts simulated hosts and waits until all are READY. Their files are on a tmpfs, so that they do not share
// the members' disk: real hosts would each write to their own.
func startFleet(ctx context.Context, c *trivet, o fleetOptions) (f *fleet, err error) {
	f = &fleet{dir: c.Dir.Path("hosts"), hosts: o.hosts}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return f, err
	}
	if err := unix.Mount("trivet-bench", f.dir, "tmpfs", 0, "size=1g,mode=700"); err != nil {
		return f, fmt.Errorf("mount %s: %w", f.dir, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute+time.Duration(o.hosts)*200*time.Millisecond)
	defer cancel()
	for first := 0; first < o.hosts; first += o.perProcess {
		n := min(o.perProcess, o.hosts-first)
		if err := f.start(ctx, c, first, n, o.vcpus); err != nil {
			return f, err
		}
		if err := c.awaitReady(ctx, first+n); err != nil {
			return f, err
		}
	}
	return f, nil
}

// awaitReady waits until n hosts are READY.
func (c *trivet) awaitReady(ctx context.Context, n int) error {
	return lab.Until(ctx, fmt.Sprintf("%d hosts are READY", n), func(ctx context.Context) error {
		ready := 0
		err := c.eachNode(ctx, func(one *vmv1.Node) {
			if one.GetState() == vmv1.NodeState_NODE_STATE_READY {
				ready++
			}
		})
		if err == nil && ready < n {
			err = fmt.Errorf("%d are READY", ready)
		}
		return err
	})
}

// eachNode calls visit with every host.
func (c *trivet) eachNode(ctx context.Context, visit func(*vmv1.Node)) error {
	for token := ""; ; {
		page, err := c.Admin.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			return err
		}
		for _, one := range page.GetNodes() {
			visit(one)
		}
		if token = page.GetNextPageToken(); token == "" {
			return nil
		}
	}
}

// start starts a process with n simulated hosts, of which the first has the number first.
func (f *fleet) start(ctx context.Context, c *trivet, first, n int, vcpus uint32) error {
	var tokens strings.Builder
	for i := range n {
		token, err := c.Admin.NodeToken(ctx)
		if err != nil {
			return err
		}
		tokens.WriteString(token + "\n")
		if err := os.Mkdir(filepath.Join(f.dir, hostName(first+i)), 0o700); err != nil {
			return err
		}
	}
	log, err := os.Create(filepath.Join(f.dir, hostName(first)+".log"))
	if err != nil {
		return err
	}
	f.logs = append(f.logs, log)
	cmd := exec.Command("/proc/self/exe", hostCommand, "-dir", f.dir, "-first", fmt.Sprint(first), "-vcpus", fmt.Sprint(vcpus),
		// A member accepts a limited number of connections from one address, so each process has an address of its own.
		"-members", strings.Join(c.Addresses(":7443"), ","), "-local", fmt.Sprintf("127.1.%d.1", len(f.procs)))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(tokens.String()), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	f.procs = append(f.procs, cmd)
	return nil
}

func (f *fleet) pids() (pids []int) {
	for _, p := range f.procs {
		pids = append(pids, p.Process.Pid)
	}
	return pids
}

func (f *fleet) close() error {
	for _, p := range f.procs {
		end(p)
	}
	for _, l := range f.logs {
		_ = l.Close()
	}
	err := unix.Unmount(f.dir, unix.MNT_DETACH)
	if errors.Is(err, unix.EINVAL) { // startFleet failed before it mounted f.dir
		return nil
	}
	return err
}
