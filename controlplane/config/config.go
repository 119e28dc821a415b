// Package config holds the configuration of a member. Load reads it from a YAML file, environment variables and flags.
// Config.Validate and Config.ValidateTLS check it. The other methods of Config derive addresses and URLs from it.
//
// The flag --kv-etcd-listen, for example, has the environment variable TRIVET_KV_ETCD_LISTEN and a key in the file,
// which the tags of the structs state. identity.providers has only the key. Package config starts nothing and opens no
// file but the configuration file.
package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/shared/scrape"
)

// Config is the configuration of a member. If several sources have the same setting, the first of these applies: flag,
// environment variable, file, Default.
type Config struct {
	// NodeID is this member's ID. Without Join, 0 means 1. With Join, 0 means the ID under which a member with this
	// address was added to the cluster.
	NodeID uint64 `yaml:"node_id"`
	// Listen is the IP address on which the member serves all of its Ports.
	Listen string `yaml:"listen"`
	// DataDir is the directory for all data that must survive restarts.
	DataDir string `yaml:"data_dir"`
	// Cluster lists the addresses of all members of a new cluster, including this one. It is empty for a cluster of one
	// member.
	Cluster Members `yaml:"cluster"`
	// Join lists addresses, as host or host:port, of members of the cluster that this member joins. Only one of Join
	// and Cluster may be set. After the member has joined, Join has no effect.
	Join []string `yaml:"join"`
	// ClusterKey is the path of the file with the key that all members share. It is required with Cluster. A member
	// with Join needs it unless the member gets the key by a JoinToken.
	ClusterKey string `yaml:"cluster_key"`
	// JoinToken is the path of a file with a token by which a joining member gets the cluster key. It is needed only
	// once. The setting is a path instead of the token itself because every user of the host can read command lines.
	JoinToken string `yaml:"join_token"`
	// Dev gives every caller the rights of an administrator in the project named default. It is allowed only for a
	// single member on a loopback address.
	Dev bool `yaml:"dev"`
	// MetricsListen is a host:port that serves /metrics and /targets, which lists the members and hosts for Prometheus. The
	// VM port serves /metrics only to callers on loopback.
	MetricsListen string `yaml:"metrics_listen"`
	// MetricsAddress is the host:port at which Prometheus reaches MetricsListen. Empty means MetricsListen, with Listen in
	// place of an unspecified address. If that is a loopback address or unspecified too, the member is not in /targets.
	MetricsAddress string `yaml:"metrics_address"`
	// MetricsCert and MetricsKey are the paths of PEM files for TLS on MetricsListen. MetricsToken is the path of a file with
	// the token that requests to MetricsListen must have. The files are read again at each use.
	MetricsCert  string `yaml:"metrics_cert"`
	MetricsKey   string `yaml:"metrics_key"`
	MetricsToken string `yaml:"metrics_token"`
	Ports        Ports  `yaml:"ports"`
	Images       Images `yaml:"images"`
	KV           KV     `yaml:"kv"`
	// Identity configures ID tokens and external identity providers.
	Identity Identity `yaml:"identity"`
	Billing  Billing  `yaml:"billing"`
	// Limits configures the maximum rates at which tenants may make changes, and the disk space that tenants must leave
	// free.
	Limits Limits `yaml:"limits"`
	// REST configures the REST endpoints that need no credential.
	REST REST `yaml:"rest"`
	// TLS is the certificate of the ports for tenants.
	TLS TLS `yaml:"tls"`
	// InsecurePlaintext allows plaintext on the ports for tenants even if their address can be reached from other
	// hosts.
	InsecurePlaintext bool `yaml:"insecure_plaintext"`
	// Tick is the unit of raft's timers. The election timeout is a random time of 10 to 20 times Tick.
	Tick time.Duration `yaml:"tick"`
	// LogFormat is text, json or auto. auto means json under systemd and text otherwise.
	LogFormat string `yaml:"log_format"`
}

// Ports are the TCP ports of a member. All members must use the same ports.
type Ports struct {
	KV       uint16 `yaml:"kv"`
	Identity uint16 `yaml:"identity"`
	VM       uint16 `yaml:"vm"`
	GRPC     uint16 `yaml:"grpc"`
	// Credit is the port of the credit REST API. CreditGRPC is a gRPC port with credit.v1 only; the port GRPC has
	// credit.v1 and all other services.
	Credit     uint16 `yaml:"credit"`
	CreditGRPC uint16 `yaml:"credit_grpc"`
	// Network is the port of the network REST API. NetworkGRPC is a port for network.v1 only, which takes gRPC and HTTP.
	Network     uint16 `yaml:"network"`
	NetworkGRPC uint16 `yaml:"network_grpc"`
	Agents      uint16 `yaml:"agents"`
	Peers       uint16 `yaml:"peers"`
}

// Images configures from where images are imported.
type Images struct {
	// ImportDirs lists the directories from which images may be imported with file:// sources. If it is empty, images
	// may be imported only from the directory import in DataDir, and only by system:admin.
	ImportDirs []image.ImportDir `yaml:"import_dirs"`
	HTTPS      HTTPSImages       `yaml:"https"`
}

// HTTPSImages configures imports from https:// sources.
type HTTPSImages struct {
	// Disabled refuses https:// sources.
	Disabled bool `yaml:"disabled"`
	// Allow lists prefixes of private and other special-purpose addresses from which images may be fetched, such as
	// 10.1.0.0/16. Without it, only public addresses are allowed.
	Allow []string `yaml:"allow"`
}

// Prefixes returns the prefixes in Allow.
func (h *HTTPSImages) Prefixes() (out []netip.Prefix, err error) {
	for _, text := range h.Allow {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("images.https.allow: %q is not a prefix such as 10.1.0.0/16", text)
		}
		out = append(out, p)
	}
	return out, nil
}

func (h *HTTPSImages) validate() error {
	_, err := h.Prefixes()
	return err
}

// Default returns the default configuration: a cluster of one member on 127.0.0.1.
func Default() Config {
	return Config{
		NodeID: 1, Listen: "127.0.0.1", DataDir: "trivet-data", Tick: 100 * time.Millisecond, LogFormat: "auto",
		Ports: Ports{KV: 8081, Identity: 8083, VM: 8084, GRPC: 50051, Credit: 8086, CreditGRPC: 50057, Network: 8087, NetworkGRPC: 9090, Agents: 7443, Peers: 2380},
		KV: KV{
			Quota: kv.DefaultQuota, MaxRequestBytes: kv.DefaultRequestBytes, MaxTxnOps: kv.DefaultTxnOps, WatchProgress: kv.DefaultProgress,
			TokenTTL: users.DefaultTokenTTL, BcryptCost: users.DefaultCost, CorruptCheck: kv.DefaultCorruptCheck, StrictReconfig: true,
		},
		Limits: Limits{Limits: budget.Default},
	}
}

// Validate returns an error if a setting is out of range or contradicts another. The error names the first such
// setting.
func (c *Config) Validate() error {
	if net.ParseIP(c.Listen) == nil {
		return fmt.Errorf("listen: %q is not an IP address", c.Listen)
	}
	if c.NodeID == 0 && len(c.Join) == 0 || c.NodeID >= 1<<63 {
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
	if err := c.ScrapePort().Validate(); err != nil {
		return err
	}
	for _, part := range []interface{ validate() error }{c.Ports, &c.Images.HTTPS, &c.KV, &c.Identity, &c.REST, &c.Billing, &c.Limits} {
		if err := part.validate(); err != nil {
			return err
		}
	}
	if c.Dev && (len(c.Cluster) > 1 || len(c.Join) > 0 || !net.ParseIP(c.Listen).IsLoopback()) {
		return errors.New("dev is for one member on a loopback address: it accepts every caller")
	}
	return c.validateCluster()
}

// ScrapePort returns the settings of MetricsListen.
func (c *Config) ScrapePort() scrape.Port {
	return scrape.Port{Listen: c.MetricsListen, Address: c.MetricsAddress, Cert: c.MetricsCert, Key: c.MetricsKey, Token: c.MetricsToken}
}

// validateCluster checks the settings with which a member creates or joins a cluster.
func (c *Config) validateCluster() error {
	if len(c.Cluster) > 0 && len(c.Join) > 0 {
		return errors.New("cluster is for the first start of a cluster, join for a member that is added to one: give one of them")
	}
	for _, host := range c.Join {
		if host == "" || strings.ContainsAny(host, " /") {
			return fmt.Errorf("join: %q is not host or host:port", host)
		}
	}
	switch {
	case c.JoinToken != "" && len(c.Join) == 0:
		return errors.New("join_token is for a member that is added to a cluster: say with join where that is")
	case c.JoinToken != "" && c.ClusterKey != "":
		return errors.New("join_token brings the cluster key, and cluster_key has it: give one of them")
	case len(c.Join) > 0, len(c.Cluster) == 0:
		return nil
	case c.ClusterKey == "":
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
	for _, port := range []uint16{p.KV, p.Identity, p.VM, p.GRPC, p.Credit, p.CreditGRPC, p.Network, p.NetworkGRPC, p.Agents, p.Peers} {
		if port == 0 || seen[port] {
			return errors.New("ports must be set and all different")
		}
		seen[port] = true
	}
	return nil
}
