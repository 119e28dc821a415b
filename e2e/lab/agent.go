package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
)

// Agent describes a node agent that lab runs on this host.
type Agent struct {
	Dir Dir
	Bin Binaries
	// Name is the host name that the agent reports, and the base name of the agent's files and data directory.
	Name string
	// Members holds the addresses of the control-plane members, with or without ports.
	Members []string
	// Cgroup is the name of the cgroup beneath which the agent's guests run. UIDRange, such as 650000-659999, holds the
	// uids of its guests. Agents on one host must have different cgroups and disjoint ranges.
	Cgroup   string
	UIDRange string
	// Metrics is the host:port on which the agent serves /metrics and /health.
	Metrics string
	// Leave, unless "", is the id of the agent's present cluster, which it leaves to join the cluster of its token.
	Leave string
	// Net, unless "", is the path of the network namespace in which the agent runs. Underlay is its address there, to
	// which other hosts send the packets of VPCs; "" leaves the choice to the agent.
	Net, Underlay string
	// Network holds more settings of `network`.
	Network map[string]any
	// Labels are the labels of the host, by which placement can select it.
	Labels map[string]string
	// External holds the setting `external`.
	External map[string]any
	// RBDHelper, unless "", is the path of trivet-rbd.
	RBDHelper string
	// Pools holds the setting `storage_pools`. Without it, the host has the pool local.
	Pools []map[string]any
	// VCPUs is the number of virtual CPUs of guests for each CPU of the host; 0 means manyVCPUs.
	VCPUs float64
	// GID, unless 0, is the gid of the agent; see Cut.
	GID int
	// Env holds environment variables of the agent, like Program.Env.
	Env []string
}

// DataDir returns the agent's data directory, which holds its certificate and its VMs' disks.
func (a *Agent) DataDir() string { return a.Dir.Path(a.Name) }

// manyVCPUs is the factor of Agent.VCPUs by default, because tests run many small guests.
const manyVCPUs = 64

// Start writes the agent's configuration and starts the agent. The first start needs a join token; later ones may pass
// "".
func (a *Agent) Start(token string) error {
	if err := os.MkdirAll(a.DataDir(), 0o755); err != nil {
		return err
	}
	if token != "" {
		if err := os.WriteFile(a.Dir.Path(a.Name+".join"), []byte(token), 0o600); err != nil {
			return err
		}
	}
	settings := map[string]any{
		"controlplane": a.Members, "join_token": a.Dir.Path(a.Name + ".join"), "data_dir": a.DataDir(), "name": a.Name, "accel": "auto",
		"allow_tcg": true, "cgroup": a.Cgroup, "uid_range": a.UIDRange, "metrics_listen": a.Metrics,
		"log_format": "text", "leave_cluster": a.Leave,
		"overcommit": map[string]float64{"vcpus": cmp.Or(a.VCPUs, manyVCPUs), "memory": 1, "storage": 20},
	}
	if a.Underlay != "" {
		settings["underlay"] = a.Underlay
	}
	if a.Network != nil {
		settings["network"] = a.Network
	}
	if a.Labels != nil {
		settings["labels"] = a.Labels
	}
	if a.External != nil {
		settings["external"] = a.External
	}
	if a.Pools != nil {
		settings["storage_pools"] = a.Pools
	}
	if a.RBDHelper != "" {
		settings["rbd_helper"] = a.RBDHelper
	}
	config, err := yaml.Marshal(settings)
	if err != nil {
		return err
	}
	file := a.Dir.Path(a.Name + ".yaml")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		return err
	}
	binary, err := filepath.Abs(a.Bin.NodeAgent)
	if err != nil {
		return err
	}
	return a.Dir.Start(Program{Name: a.Name, Binary: binary, Args: []string{"--config", file}, Work: string(a.Dir), Net: a.Net, GID: a.GID, Env: a.Env})
}

// Joined reports whether the agent has joined a cluster, that is, has a certificate in its data directory.
func (a *Agent) Joined() bool {
	_, err := os.Stat(filepath.Join(a.DataDir(), "identity", "credential.pb"))
	return err == nil
}

// EndGuests kills every guest in the agent's cgroup tree, removes the guests' cgroups and returns the number of guests.
// The agent must have stopped. The guests' disks are not deleted.
func (a *Agent) EndGuests(ctx context.Context) (int, error) {
	tree, err := cgroup.Open(a.Cgroup)
	if err != nil {
		return 0, err
	}
	names, err := tree.List()
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, tree.Kill(ctx, name), tree.Remove(ctx, name))
	}
	errs = append(errs, tree.Close())
	return len(names), errors.Join(errs...)
}

// Guest returns the pid of a VM's QEMU on this host, or 0.
func (a *Agent) Guest(vm string) int {
	tree, err := cgroup.Open(a.Cgroup) // It stays open: Close would remove an empty tree, which the agent needs.
	if err != nil {
		return 0
	}
	if procs, err := tree.Procs(vm); err == nil && len(procs) > 0 {
		return procs[0]
	}
	return 0
}

// RemoveNetworks removes the network namespaces of the VPCs that the agent made. The agent and its guests must have ended.
func (a *Agent) RemoveNetworks() error {
	prefix, _ := a.Network["prefix"].(string)
	if prefix == "" {
		prefix = "trivet-"
	}
	all, err := filepath.Glob(filepath.Join(netnsDir, prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range all {
		errs = append(errs, tool("ip", "netns", "del", filepath.Base(path)))
	}
	return errors.Join(errs...)
}

// Healthy waits until the agent's /health returns 200. It returns an error if ctx ends first.
func (a *Agent) Healthy(ctx context.Context) error {
	return Until(ctx, "the agent serves", func(ctx context.Context) error {
		if a.Dir.Running(a.Name) == 0 {
			return &stopped{tail(a.Dir.LogFile(a.Name))}
		}
		return get(ctx, http.DefaultClient, "http://"+a.Metrics+"/health")
	})
}

// get sends a GET request with a timeout of two seconds. It returns an error unless the status is 200.
func get(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var body struct{ Error struct{ Message string } }
		json.NewDecoder(resp.Body).Decode(&body)
		return fmt.Errorf("%s: %s", resp.Status, body.Error.Message)
	}
	return nil
}
