package main

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// config holds the settings of the control plane that depend on etcd's flags.
type config struct {
	NodeID     uint64            `yaml:"node_id"`
	Listen     string            `yaml:"listen"`
	DataDir    string            `yaml:"data_dir"`
	Cluster    map[uint64]string `yaml:"cluster,omitempty"`
	ClusterKey string            `yaml:"cluster_key"`
	Tick       string            `yaml:"tick"`
	KV         kvConfig          `yaml:"kv"`
}

type kvConfig struct {
	EtcdListen      []string `yaml:"etcd_listen"`
	TrustLoopback   bool     `yaml:"etcd_trust_loopback"`
	EtcdCert        string   `yaml:"etcd_cert,omitempty"`
	EtcdKey         string   `yaml:"etcd_key,omitempty"`
	EtcdClientCA    string   `yaml:"etcd_client_ca,omitempty"`
	Quota           int64    `yaml:"quota,omitempty"`
	CompactAge      string   `yaml:"compact_age,omitempty"`
	MaxRequestBytes int64    `yaml:"max_request_bytes,omitempty"`
	MaxTxnOps       int64    `yaml:"max_txn_ops,omitempty"`
	WatchProgress   string   `yaml:"watch_progress,omitempty"`
	TokenTTL        string   `yaml:"token_ttl,omitempty"`
	BcryptCost      int64    `yaml:"bcrypt_cost,omitempty"`
	StrictReconfig  *bool    `yaml:"strict_reconfig,omitempty"`
}

// tick is the time between heartbeats if --heartbeat-interval is not given. With 50 ms, an election takes 0.5 to 1 s,
// which is as fast as a busy test machine allows. With etcd's default interval it takes 1 to 2 s.
const tick = "50ms"

// id returns the node ID of an initial member, which is its position in --initial-cluster. The first position is 1.
func (o *options) id() uint64 {
	for i, s := range o.cluster {
		if s.name == o.name {
			return uint64(i + 1)
		}
	}
	return 0
}

// config returns the content of the control plane's configuration file. The parameter id is this member's node ID. A
// member that joins an existing cluster got its ID from the cluster.
func (p plan) config(id uint64) ([]byte, error) {
	c := config{NodeID: id, Listen: p.address, DataDir: p.dataDir, ClusterKey: p.keyFile(), Tick: tick}
	if text := p.values["heartbeat-interval"]; text != "" {
		c.Tick = text + "ms"
	}
	if !p.existing {
		c.Cluster = map[uint64]string{}
		for i, s := range p.cluster {
			host, err := memberHost(s.peer)
			if err != nil {
				return nil, err
			}
			c.Cluster[uint64(i+1)] = host
		}
	}
	if p.values["strict-reconfig-check"] == "false" {
		c.KV.StrictReconfig = new(false)
	}
	// Test suites add members and users over loopback without a credential. etcd permits this to every local process.
	// Trivet permits it only with etcd_trust_loopback.
	c.KV.EtcdListen = p.ports()
	c.KV.TrustLoopback = !slices.ContainsFunc(c.KV.EtcdListen, func(address string) bool {
		host, _, err := net.SplitHostPort(address)
		return err != nil || host != "localhost" && !net.ParseIP(host).IsLoopback()
	})
	if p.secure() {
		c.KV.EtcdCert, c.KV.EtcdKey = p.certificate()
		if p.values["client-cert-auth"] == "true" {
			c.KV.EtcdClientCA = p.values["trusted-ca-file"]
		}
	}
	for name, to := range map[string]*int64{
		"quota-backend-bytes": &c.KV.Quota, "max-request-bytes": &c.KV.MaxRequestBytes, "max-txn-ops": &c.KV.MaxTxnOps,
		"bcrypt-cost": &c.KV.BcryptCost,
	} {
		if text := p.values[name]; text != "" {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("--%s: %w", name, err)
			}
			*to = n
		}
	}
	c.KV.WatchProgress, c.KV.TokenTTL = p.values["watch-progress-notify-interval"], p.tokenTTL()
	if p.values["auto-compaction-mode"] != "revision" {
		c.KV.CompactAge = retention(p.values["auto-compaction-retention"])
	}
	return yaml.Marshal(c)
}

// tokenTTL returns the value of --auth-token-ttl, which is in seconds. Without that flag it returns the option ttl of
// --auth-token. Other options of --auth-token are ignored, because Trivet has only one kind of token.
func (p plan) tokenTTL() string {
	if text := p.values["auth-token-ttl"]; text != "" {
		return text + "s"
	}
	for _, option := range strings.Split(p.values["auth-token"], ",") {
		if ttl, ok := strings.CutPrefix(option, "ttl="); ok {
			return ttl
		}
	}
	return ""
}

// retention converts the value of --auto-compaction-retention to a duration. The value is a duration or a number of
// hours; 0 is converted to "".
func retention(text string) string {
	if _, err := strconv.Atoi(text); err == nil && text != "0" {
		return text + "h"
	}
	if text == "0" {
		return ""
	}
	return text
}

// secure reports whether clients use TLS. Trivet uses TLS on all client ports of a member or on none.
func (o *options) secure() bool {
	for _, u := range o.listenClient {
		if u.Scheme == "https" || u.Scheme == "unixs" {
			return true
		}
	}
	return false
}

// listenFor returns the TCP address on which the member listens for the clients of a client URL. Trivet does not
// support UNIX sockets. If the URL is a UNIX socket, the companion forwards its connections to the returned address.
func (p plan) listenFor(u *url.URL) string {
	if socket(u) == "" {
		return u.Host
	}
	return net.JoinHostPort(p.address, clientPort)
}

// socket returns the path of a UNIX socket as etcd parses it, or "" for other URLs.
func socket(u *url.URL) string {
	if u.Scheme != "unix" && u.Scheme != "unixs" {
		return ""
	}
	return u.Host + u.Path
}

// seeds returns the gRPC addresses of the other members, which a joining member connects to first.
func (p plan) seeds() ([]string, error) {
	var out []string
	for _, s := range p.cluster {
		if s.name == p.name {
			continue
		}
		host, err := memberHost(s.peer)
		if err != nil {
			return nil, err
		}
		out = append(out, net.JoinHostPort(host, grpcPort))
	}
	return out, nil
}

// hosts returns the hosts of the given addresses, without their ports and separated by commas.
func hosts(seeds []string) string {
	var out []string
	for _, s := range seeds {
		host, _, _ := strings.Cut(s, ":")
		out = append(out, host)
	}
	return strings.Join(out, ",")
}
