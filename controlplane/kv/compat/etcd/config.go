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

// config is the part of the control plane's configuration that etcd's flags say something about.
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

// tick is the time between heartbeats unless --heartbeat-interval says another. It makes an election take half a second to
// a second, as quick as a busy test machine allows; etcd's own default is a second to two.
const tick = "50ms"

// id is the node id of a member that was there from the beginning: its place in --initial-cluster.
func (o *options) id() uint64 {
	for i, s := range o.cluster {
		if s.name == o.name {
			return uint64(i + 1)
		}
	}
	return 0
}

// config writes the control plane's configuration. A member that joins gets its id from the cluster.
func (p plan) config(id uint64) ([]byte, error) {
	c := config{NodeID: id, Listen: p.address, DataDir: p.dataDir, ClusterKey: p.keyFile(), Tick: tick}
	if text := p.values["heartbeat-interval"]; text != "" {
		c.Tick = text + "ms"
	}
	if !p.existing {
		c.Cluster = map[uint64]string{}
		for i, s := range p.cluster {
			host, err := home(s.peer)
			if err != nil {
				return nil, err
			}
			c.Cluster[uint64(i+1)] = host
		}
	}
	if p.values["strict-reconfig-check"] == "false" {
		c.KV.StrictReconfig = new(false)
	}
	// Suites add members and users without a credential, as a local process may with etcd. Not with ours by default.
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

// tokenTTL is --auth-token-ttl, in seconds, or the ttl among the options of --auth-token. Tokens of ours are of one kind:
// of what --auth-token says nothing else is heeded.
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

// retention reads --auto-compaction-retention: a duration, or a number of hours.
func retention(text string) string {
	if _, err := strconv.Atoi(text); err == nil && text != "0" {
		return text + "h"
	}
	if text == "0" {
		return ""
	}
	return text
}

// secure reports whether clients come by TLS. Ours does all of a member's client ports in one way.
func (o *options) secure() bool {
	for _, u := range o.listenClient {
		if u.Scheme == "https" || u.Scheme == "unixs" {
			return true
		}
	}
	return false
}

// listenFor is where the member listens for what a client URL promises. Ours has no UNIX sockets: the companion has.
func (p plan) listenFor(u *url.URL) string {
	if socket(u) == "" {
		return u.Host
	}
	return net.JoinHostPort(p.address, clientPort)
}

// socket is the path of a UNIX socket, as etcd reads it; empty for other URLs.
func socket(u *url.URL) string {
	if u.Scheme != "unix" && u.Scheme != "unixs" {
		return ""
	}
	return u.Host + u.Path
}

// seeds are where the others' gRPC is, for a member that joins.
func (p plan) seeds() ([]string, error) {
	var out []string
	for _, s := range p.cluster {
		if s.name == p.name {
			continue
		}
		host, err := home(s.peer)
		if err != nil {
			return nil, err
		}
		out = append(out, net.JoinHostPort(host, grpcPort))
	}
	return out, nil
}

// hosts are the seeds without their port.
func hosts(seeds []string) string {
	var out []string
	for _, s := range seeds {
		host, _, _ := strings.Cut(s, ":")
		out = append(out, host)
	}
	return strings.Join(out, ",")
}
