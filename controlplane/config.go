package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/trivet-cloud/trivet/controlplane/image"
)

// Config is everything that can be set, by flag, by TRIVET_… in the environment and in one YAML file; the first that
// says something wins in this order.
type Config struct {
	// NodeID is this member's id in Cluster.
	NodeID uint64 `yaml:"node_id"`
	// Listen is the address that every port is served on.
	Listen string `yaml:"listen"`
	// DataDir holds everything that must survive.
	DataDir string `yaml:"data_dir"`
	// Cluster are the addresses of all members, this one included; empty for a cloud of one member.
	Cluster Members `yaml:"cluster"`
	// ClusterKey is the file that all members share. Required with Cluster.
	ClusterKey string `yaml:"cluster_key"`
	// Dev lets everybody act in the project default. For one member on loopback only.
	Dev bool `yaml:"dev"`
	// MetricsListen is where /metrics is served to whoever asks. Callers on loopback find it on the VM port too.
	MetricsListen string `yaml:"metrics_listen"`
	Ports         Ports  `yaml:"ports"`
	Images        Images `yaml:"images"`
	// Tick is the unit of raft's time; an election takes 10 to 20 of it.
	Tick time.Duration `yaml:"tick"`
	// LogFormat is text, json or auto (json under systemd).
	LogFormat string `yaml:"log_format"`
}

// Ports of a member. They are the same on all members.
type Ports struct {
	Identity uint16 `yaml:"identity"`
	VM       uint16 `yaml:"vm"`
	GRPC     uint16 `yaml:"grpc"`
	Agents   uint16 `yaml:"agents"`
	Peers    uint16 `yaml:"peers"`
}

// Images configures the import of images.
type Images struct {
	// ImportDirs are where file:// sources may lie. Empty is the directory import in DataDir, for system:admin.
	ImportDirs []image.ImportDir `yaml:"import_dirs"`
}

// Default is the configuration of a whole cloud on one host.
func Default() Config {
	return Config{
		NodeID: 1, Listen: "127.0.0.1", DataDir: "trivet-data", Tick: 100 * time.Millisecond, LogFormat: "auto",
		Ports: Ports{Identity: 8083, VM: 8084, GRPC: 50051, Agents: 7443, Peers: 2380},
	}
}

// Validate says what cannot work.
func (c *Config) Validate() error {
	if net.ParseIP(c.Listen) == nil {
		return fmt.Errorf("listen: %q is not an IP address", c.Listen)
	}
	if c.NodeID == 0 {
		return errors.New("node_id must be 1 or more")
	}
	if c.DataDir == "" {
		return errors.New("data_dir is required")
	}
	if c.Tick < 10*time.Millisecond || c.Tick > 10*time.Second {
		return fmt.Errorf("tick must be 10ms to 10s, got %s", c.Tick)
	}
	if !slices.Contains([]string{"text", "json", "auto"}, c.LogFormat) {
		return fmt.Errorf("log_format must be text, json or auto, got %q", c.LogFormat)
	}
	for _, d := range c.Images.ImportDirs {
		if d.Path == "" {
			return errors.New("images.import_dirs: a directory has no path")
		}
	}
	if err := c.Ports.validate(); err != nil {
		return err
	}
	if c.Dev && (len(c.Cluster) > 1 || !net.ParseIP(c.Listen).IsLoopback()) {
		return errors.New("dev is for one member on a loopback address: it lets everybody in")
	}
	return c.validateCluster()
}

func (c *Config) validateCluster() error {
	if len(c.Cluster) == 0 {
		return nil
	}
	if c.ClusterKey == "" {
		return errors.New("a cluster needs cluster_key: make one with `trivet-controlplane keygen > cluster.key; chmod 600 cluster.key` " +
			"and give the same file to every member")
	}
	if c.Cluster[c.NodeID] == "" {
		return fmt.Errorf("cluster does not list this member, %d", c.NodeID)
	}
	seen := map[string]uint64{}
	for id, host := range c.Cluster {
		if id == 0 {
			return errors.New("cluster: member ids are 1 or more")
		}
		if net.ParseIP(host) == nil {
			return fmt.Errorf("cluster: %q is not an IP address", host)
		}
		if other, twice := seen[host]; twice {
			return fmt.Errorf("cluster: members %d and %d have the same address", min(id, other), max(id, other))
		}
		seen[host] = id
	}
	return nil
}

func (p Ports) validate() error {
	seen := map[uint16]bool{}
	for _, port := range []uint16{p.Identity, p.VM, p.GRPC, p.Agents, p.Peers} {
		if port == 0 || seen[port] {
			return errors.New("ports must be set and all different")
		}
		seen[port] = true
	}
	return nil
}

// members is Cluster, or this member alone.
func (c *Config) members() Members {
	if len(c.Cluster) > 0 {
		return c.Cluster
	}
	return Members{c.NodeID: c.Listen}
}

// addresses are the members' hosts with a port.
func (m Members) addresses(port uint16) map[uint64]string {
	out := make(map[uint64]string, len(m))
	for id, host := range m {
		out[id] = net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	return out
}

// Members are addresses by member id; as a flag, 1=10.0.0.1,2=10.0.0.2.
type Members map[uint64]string

var _ pflag.Value = (*Members)(nil)

// Set implements pflag.Value.
func (m *Members) Set(text string) error {
	out := Members{}
	for _, pair := range strings.Split(text, ",") {
		id, host, ok := strings.Cut(strings.TrimSpace(pair), "=")
		n, err := strconv.ParseUint(id, 10, 63)
		if !ok || err != nil || host == "" {
			return fmt.Errorf("want ID=ADDRESS,…, got %q", pair)
		}
		if out[n] != "" {
			return fmt.Errorf("member %d stands twice", n)
		}
		out[n] = host
	}
	*m = out
	return nil
}

// String implements pflag.Value.
func (m *Members) String() string {
	var pairs []string
	for _, id := range slices.Sorted(maps.Keys(*m)) {
		pairs = append(pairs, fmt.Sprintf("%d=%s", id, (*m)[id]))
	}
	return strings.Join(pairs, ",")
}

// Type implements pflag.Value.
func (m *Members) Type() string { return "ID=ADDRESS,…" }

// flags binds a configuration to flags.
func (c *Config) flags(f *pflag.FlagSet) {
	f.Uint64Var(&c.NodeID, "node-id", c.NodeID, "this member's id")
	f.StringVar(&c.Listen, "listen", c.Listen, "IP address that every port is served on")
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "directory for everything that must survive")
	f.Var(&c.Cluster, "cluster", "all members, this one included")
	f.StringVar(&c.ClusterKey, "cluster-key", c.ClusterKey, "file with the key that all members share")
	f.BoolVar(&c.Dev, "dev", c.Dev, "let everybody act in project default (one member, loopback only)")
	f.StringVar(&c.MetricsListen, "metrics-listen", c.MetricsListen, "host:port for /metrics")
	f.DurationVar(&c.Tick, "tick", c.Tick, "unit of raft's time; an election takes 10 to 20")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text, json or auto")
	for name, port := range map[string]*uint16{
		"identity-port": &c.Ports.Identity, "vm-port": &c.Ports.VM, "grpc-port": &c.Ports.GRPC,
		"agents-port": &c.Ports.Agents, "peers-port": &c.Ports.Peers,
	} {
		f.Uint16Var(port, name, *port, "port")
	}
	f.Var(&importDirs{c}, "import-dir", "directory that images are imported from, as PATH or PATH=ORG,ORG; repeatable")
}

// importDirs is Images.ImportDirs as a flag.
type importDirs struct{ c *Config }

func (d *importDirs) String() string { return "" }
func (d *importDirs) Type() string   { return "PATH[=ORG,…]" }

func (d *importDirs) Set(text string) error {
	path, orgs, ok := strings.Cut(text, "=")
	dir := image.ImportDir{Path: path}
	if ok {
		for _, org := range strings.Split(orgs, ",") {
			dir.Orgs = append(dir.Orgs, orgID(org))
		}
	}
	d.c.Images.ImportDirs = append(d.c.Images.ImportDirs, dir)
	return nil
}

// load reads file, environment and flags into a configuration, in the order in which later ones win.
func load(file string, environ []string, flags *pflag.FlagSet) (Config, error) {
	c := Default()
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return c, fmt.Errorf("read configuration: %w", err)
		}
		d := yaml.NewDecoder(bytes.NewReader(text))
		d.KnownFields(true)
		if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
			return c, fmt.Errorf("%s: %w", file, err)
		}
	}
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.flags(own)
	for _, pair := range environ {
		name, value, _ := strings.Cut(pair, "=")
		name, ours := strings.CutPrefix(name, "TRIVET_")
		if !ours {
			continue
		}
		if f := own.Lookup(strings.ToLower(strings.ReplaceAll(name, "_", "-"))); f != nil {
			if err := f.Value.Set(value); err != nil {
				return c, fmt.Errorf("TRIVET_%s: %w", name, err)
			}
		}
	}
	var errs []error
	flags.Visit(func(f *pflag.Flag) {
		if own.Lookup(f.Name) == nil {
			return
		}
		if f.Name == "import-dir" {
			return
		}
		errs = append(errs, own.Set(f.Name, f.Value.String()))
	})
	return c, errors.Join(errs...)
}
