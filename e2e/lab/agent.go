package lab

import (
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

// Agent is a node agent on this host.
type Agent struct {
	Dir Dir
	Bin Binaries
	// Name names its files and the host.
	Name string
	// Members are the control plane's addresses.
	Members []string
	// Cgroup is the tree of its guests; no two agents may share one, nor a range of uids.
	Cgroup   string
	UIDRange string
	// Metrics is where it serves /metrics and /health.
	Metrics string
	// Leave is the id of a cluster that it leaves for that of its token. Optional.
	Leave string
}

// DataDir is where it keeps disks.
func (a *Agent) DataDir() string { return a.Dir.Path(a.Name) }

// Overcommit is what every agent of a lab promises: tests run many small guests.
var overcommit = map[string]int{"vcpus": 64, "memory": 1, "storage": 20}

// Start starts the agent; token is needed the first time.
func (a *Agent) Start(token string) error {
	if err := os.MkdirAll(a.DataDir(), 0o755); err != nil {
		return err
	}
	if token != "" {
		if err := os.WriteFile(a.Dir.Path(a.Name+".join"), []byte(token), 0o600); err != nil {
			return err
		}
	}
	config, err := yaml.Marshal(map[string]any{
		"controlplane": a.Members, "join_token": a.Dir.Path(a.Name + ".join"), "data_dir": a.DataDir(), "name": a.Name, "accel": "auto",
		"allow_tcg": true, "overcommit": overcommit, "cgroup": a.Cgroup, "uid_range": a.UIDRange, "metrics_listen": a.Metrics,
		"log_format": "text", "leave_cluster": a.Leave,
	})
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
	return a.Dir.Start(Program{Name: a.Name, Binary: binary, Args: []string{"--config", file}, Work: string(a.Dir)})
}

// Joined reports whether the agent has a certificate already.
func (a *Agent) Joined() bool {
	_, err := os.Stat(filepath.Join(a.DataDir(), "identity", "credential.pb"))
	return err == nil
}

// EndGuests kills every guest of this host that is not running any more after the agent's stop, and removes what they
// had of the kernel. The disks stay.
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

// Healthy waits until the agent serves.
func (a *Agent) Healthy(ctx context.Context) error {
	return Until(ctx, "the agent serves", func(ctx context.Context) error {
		if a.Dir.Running(a.Name) == 0 {
			return errors.New("it has stopped: " + tail(a.Dir.LogFile(a.Name)))
		}
		return get(ctx, http.DefaultClient, "http://"+a.Metrics+"/health")
	})
}

// get is nil for a 200.
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
