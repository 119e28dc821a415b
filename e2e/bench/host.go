package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/nodeagent/uplink"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostCommand is the first argument with which this program runs as a simulated host: it connects to the control plane
// with the agent's own code (mutual TLS, lease, heartbeats, reports) but runs no VMs. It reports every VM as built.
const hostCommand = "host"

func hostMain(args []string) int {
	flags := flag.NewFlagSet(hostCommand, flag.ExitOnError)
	dir := flags.String("dir", "", "")
	name := flags.String("name", "", "")
	members := flags.String("members", "", "")
	_ = flags.Parse(args) // with ExitOnError it returns no error
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := simulate(ctx, *dir, *name, strings.Split(*members, ",")); err != nil {
		fmt.Fprintln(os.Stderr, *name+":", err)
		return 1
	}
	return 0
}

// simulate runs a simulated host until ctx ends. It reads its join token from the first line of standard input.
func simulate(ctx context.Context, dir, name string, members []string) error {
	token, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return fmt.Errorf("read token: %w", err)
	}
	h := &hollow{told: map[cloud.VMID]uint64{}}
	capacity := &vmv1.NodeCapacity{Vcpus: 100_000, MemoryMib: 1 << 30, StorageGib: 1 << 30}
	h.link, err = uplink.Open(uplink.Options{
		Dir: dir, Seeds: members, Token: func() (string, error) { return strings.TrimSpace(token), nil }, Name: name, Version: "bench",
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

// hollow is the state of a simulated host, which reports VMs as built although it runs none.
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
		if vm.GetPower() == agentv1.Power_POWER_DESTROYED {
			observed = cloud.ObservedAbsent
		}
		h.link.Observe(cloud.Observation{VM: id, Generation: vm.GetGeneration(), Observed: observed})
	}
	for _, id := range a.Released {
		delete(h.told, id)
		h.link.Forget(id)
	}
}

// fleet holds the processes of the simulated hosts.
type fleet struct {
	dir   string
	procs []*exec.Cmd
	logs  []*os.File
}

// startFleet starts n simulated hosts and waits until all are READY. Their files are on a tmpfs, so that they do not
// share the members' disk: real hosts would each write to their own.
func startFleet(ctx context.Context, c *trivet, n int) (f *fleet, err error) {
	f = &fleet{dir: c.Dir.Path("hosts")}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return f, err
	}
	if err := unix.Mount("trivet-bench", f.dir, "tmpfs", 0, "size=512m,mode=700"); err != nil {
		return f, fmt.Errorf("mount %s: %w", f.dir, err)
	}
	for i := range n {
		if err := f.start(ctx, c, fmt.Sprintf("sim-%02d", i)); err != nil {
			return f, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for i := range n {
		if _, err := c.Admin.AwaitNode(ctx, fmt.Sprintf("sim-%02d", i)); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (f *fleet) start(ctx context.Context, c *trivet, name string) error {
	token, err := c.Admin.NodeToken(ctx)
	if err != nil {
		return err
	}
	dir := filepath.Join(f.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	log, err := os.Create(dir + ".log")
	if err != nil {
		return err
	}
	f.logs = append(f.logs, log)
	cmd := exec.Command("/proc/self/exe", hostCommand, "-dir", dir, "-name", name, "-members", strings.Join(c.Addresses(":7443"), ","))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	f.procs = append(f.procs, cmd)
	_, err = io.WriteString(in, token+"\n")
	return errors.Join(err, in.Close())
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
