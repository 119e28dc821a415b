package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/nodeagent/uplink"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// hostsCommand is the first argument with which this program runs simulated hosts. The hosts connect to the control
// plane with the agent's own code (mutual TLS, lease, heartbeats, reports, networks), but run no VMs and make no
// networks. They report every VM as built, and acknowledge every update of networks at once.
const hostsCommand = "hosts"

// hostsStart is the first line that the process reads.
type hostsStart struct {
	Dir     string
	Members []string
	Tokens  []string // one for each host
}

// hostsState is the answer of the process to a line with the ID of a VPC.
type hostsState struct {
	// Hosts is the number of hosts that have the VPC.
	Hosts int
	// Fewest is the number of ports of the VPC on the host of these that has the fewest.
	Fewest int
	// Updates is the number of updates that all hosts together have received, of all VPCs.
	Updates int
}

func hostsMain([]string) error {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	var start hostsStart
	if err := in.Decode(&start); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	running, ctx := errgroup.WithContext(ctx)
	var hosts []*simulatedHost
	for i, token := range start.Tokens {
		h, err := openHost(start, i, token)
		if err != nil {
			return err
		}
		hosts = append(hosts, h)
	}
	for _, h := range hosts {
		running.Go(func() error {
			// After the end of ctx, the error that ended it is the one to report.
			if err := h.link.Run(ctx); ctx.Err() == nil {
				return err
			}
			return nil
		})
	}
	running.Go(func() error {
		for question := any(nil); ; {
			if err := in.Decode(&question); errors.Is(err, io.EOF) {
				cancel()
				return nil
			} else if err != nil {
				return err
			}
			id, _ := question.(string)
			if err := out.Encode(stateOf(hosts, cloud.VPCID(id))); err != nil {
				return err
			}
		}
	})
	return running.Wait()
}

// simulatedHost is the state of a simulated host.
type simulatedHost struct {
	link *uplink.Link

	mu       sync.Mutex            // guards the fields below
	reported map[cloud.VMID]uint64 // the last reported generation of each VM
	ports    map[cloud.VPCID]map[cloud.PortID]bool
	updates  int
}

func openHost(start hostsStart, number int, token string) (*simulatedHost, error) {
	name := fmt.Sprintf("sim-%02d", number)
	dir := filepath.Join(start.Dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	h := &simulatedHost{reported: map[cloud.VMID]uint64{}, ports: map[cloud.VPCID]map[cloud.PortID]bool{}}
	capacity := &vmv1.NodeCapacity{Vcpus: 1000, MemoryMib: 1 << 20, StorageGib: 1 << 20}
	var err error
	h.link, err = uplink.Open(uplink.Options{
		Dir: dir, Seeds: start.Members, Token: func() (string, error) { return strings.TrimSpace(token), nil },
		Name: name, Version: "bench",
		Facts: func() *agentv1.NodeFacts {
			return &agentv1.NodeFacts{
				BootId: name, QemuVersion: "7.2.0", CpuModels: []string{"max"}, Architecture: vmv1.Architecture_ARCHITECTURE_X86_64,
			}
		},
		Heartbeat: func() *vmv1.HeartbeatNodeRequest {
			return &vmv1.HeartbeatNodeRequest{
				State: vmv1.NodeState_NODE_STATE_READY, Capacity: capacity, Allocatable: capacity,
				Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
			}
		},
		Present: h.present, Assign: h.assign, Networks: h, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		HostNetwork: &agentv1.HostNetwork{Vtep: fmt.Sprintf("192.0.2.%d", 1+number), UnderlayMtu: 1500},
	})
	return h, err
}

func (h *simulatedHost) present() (ids []cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.reported {
		ids = append(ids, id)
	}
	return ids
}

// assign reports each new VM as built.
func (h *simulatedHost) assign(a uplink.Assignment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, vm := range a.VMs {
		if generation, ok := h.reported[id]; ok && generation >= vm.GetGeneration() {
			continue
		}
		h.reported[id] = vm.GetGeneration()
		h.link.Observe(cloud.Observation{VM: id, Generation: vm.GetGeneration(), Observed: cloud.ObservedBuilt})
	}
}

// Apply implements uplink.Networks: it counts the ports of each VPC, and acknowledges the update.
func (h *simulatedHost) Apply(u cloud.NetworkUpdate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.updates++
	if u.Snapshot {
		clear(h.ports)
	}
	for _, id := range u.Deleted {
		delete(h.ports, cloud.VPCID(id))
		for _, ports := range h.ports {
			delete(ports, cloud.PortID(id))
		}
	}
	for i := range u.VPCs {
		if h.ports[u.VPCs[i].ID] == nil {
			h.ports[u.VPCs[i].ID] = map[cloud.PortID]bool{}
		}
	}
	for i := range u.Ports {
		if ports := h.ports[u.Ports[i].VPC]; ports != nil {
			ports[u.Ports[i].ID] = true
		}
	}
	h.link.AcknowledgeNetworks(cloud.NetworkAck{Stream: u.Stream, Revision: u.Revision})
}

// stateOf returns the state of the hosts with regard to the VPC with the given ID.
func stateOf(hosts []*simulatedHost, id cloud.VPCID) (s hostsState) {
	for _, h := range hosts {
		h.mu.Lock()
		s.Updates += h.updates
		if ports, has := h.ports[id]; has {
			if s.Hosts == 0 || len(ports) < s.Fewest {
				s.Fewest = len(ports)
			}
			s.Hosts++
		}
		h.mu.Unlock()
	}
	return s
}
