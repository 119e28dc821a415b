// Package config holds the configuration of a member: its defaults, flags, environment variables, file and validation.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Config is everything that can be set, by flag, by TRIVET_… in the environment and in one YAML file; the first that
// says something wins in this order.
type Config struct {
	// NodeID is this member's id; 0 is 1, or with Join that of the entry that has this address.
	NodeID uint64 `yaml:"node_id"`
	// Listen is the address that every port is served on.
	Listen string `yaml:"listen"`
	// DataDir holds everything that must survive.
	DataDir string `yaml:"data_dir"`
	// Cluster are the addresses of all members, this one included; empty for a cloud of one member.
	Cluster Members `yaml:"cluster"`
	// Join are addresses, host or host:port, of members of a cluster that this one was added to, or will be; instead of
	// Cluster. They count while the data directory is new.
	Join []string `yaml:"join"`
	// ClusterKey is the file that all members share. Required with Cluster, and with Join unless there is a JoinToken.
	ClusterKey string `yaml:"cluster_key"`
	// JoinToken is a file with a token that brings the cluster key to a member that joins; needed once. Never the token
	// itself: a command line can be read by everybody on the host.
	JoinToken string `yaml:"join_token"`
	// Dev lets everybody act in the project default. For one member on loopback only.
	Dev bool `yaml:"dev"`
	// MetricsListen is where /metrics is served to whoever asks. Callers on loopback find it on the VM port too.
	MetricsListen string `yaml:"metrics_listen"`
	Ports         Ports  `yaml:"ports"`
	Images        Images `yaml:"images"`
	KV            KV     `yaml:"kv"`
	// Identity configures tokens, and who else is believed.
	Identity Identity `yaml:"identity"`
	Billing  Billing  `yaml:"billing"`
	// Limits bound what tenants may write.
	Limits Limits `yaml:"limits"`
	// REST says which services answer without a credential beyond loopback.
	REST REST `yaml:"rest"`
	// TLS is the certificate of tenants' ports.
	TLS TLS `yaml:"tls"`
	// InsecurePlaintext lets tenants' ports be plaintext beyond loopback.
	InsecurePlaintext bool `yaml:"insecure_plaintext"`
	// Tick is the unit of raft's time; an election takes 10 to 20 of it.
	Tick time.Duration `yaml:"tick"`
	// LogFormat is text, json or auto (json under systemd).
	LogFormat string `yaml:"log_format"`
}

// Ports of a member. They are the same on all members.
type Ports struct {
	KV       uint16 `yaml:"kv"`
	Identity uint16 `yaml:"identity"`
	VM       uint16 `yaml:"vm"`
	GRPC     uint16 `yaml:"grpc"`
	// Credit is that of credit's REST, CreditGRPC that of credit.v1 alone; GRPC serves it too.
	Credit     uint16 `yaml:"credit"`
	CreditGRPC uint16 `yaml:"credit_grpc"`
	Agents     uint16 `yaml:"agents"`
	Peers      uint16 `yaml:"peers"`
}

// Images configures the import of images.
type Images struct {
	// ImportDirs are where file:// sources may lie. Empty is the directory import in DataDir, for system:admin.
	ImportDirs []image.ImportDir `yaml:"import_dirs"`
}

// KV configures the users' keys.
type KV struct {
	// Open lets everybody who can reach the gRPC port read and write keys. The cluster and who may what stay closed.
	Open bool `yaml:"open"`
	// EtcdListen are host:port where clients of etcd find what an etcd serves: gRPC, /health, /version and /metrics.
	EtcdListen []string `yaml:"etcd_listen"`
	// EtcdCert and EtcdKey are the files of those ports' certificate; without them they are plaintext.
	EtcdCert string `yaml:"etcd_cert"`
	EtcdKey  string `yaml:"etcd_key"`
	// EtcdClientCA is the CA file for client certificates on those ports; clients must present one. Until Auth is
	// enabled every holder of such a certificate may change the members, so issue them to operators only. Once Auth is
	// enabled, the common name is the user of a client without a token.
	EtcdClientCA string `yaml:"etcd_client_ca"`
	// EtcdTrustLoopback lets every process of this host change the members and etcd's users by the ports of EtcdListen without
	// a credential, until Auth is enabled, as etcd does. It is for test suites of etcd: with it any local process can take
	// the cluster down. Those ports must be on loopback.
	EtcdTrustLoopback bool `yaml:"etcd_trust_loopback"`
	// Quota is how large the keyspace with its history may become, in bytes; negative: as large as it likes.
	Quota int64 `yaml:"quota"`
	// CompactAge is how long history is kept; 0: until somebody compacts it, as etcd does.
	CompactAge time.Duration `yaml:"compact_age"`
	// CorruptCheck is the pause between two comparisons of all members' keys, which read all of them; 0: never.
	CorruptCheck time.Duration `yaml:"corrupt_check"`
	// StrictReconfig refuses etcd's clients to add and remove members until the others were heard for five seconds.
	StrictReconfig bool `yaml:"strict_reconfig"`
	// MaxRequestBytes is the limit of a request that writes, MaxTxnOps that of a transaction's operations.
	MaxRequestBytes int `yaml:"max_request_bytes"`
	MaxTxnOps       int `yaml:"max_txn_ops"`
	// WatchProgress is the time between notices to watches that asked for them.
	WatchProgress time.Duration `yaml:"watch_progress"`
	// TokenTTL is how long a token of Auth lives.
	TokenTTL time.Duration `yaml:"token_ttl"`
	// BcryptCost of passwords of Auth.
	BcryptCost int `yaml:"bcrypt_cost"`
}

// Limits of KV.
const (
	// maxRequestBytes is what an entry of the log has room for. A value has 1.5 MiB at most whatever the limit is.
	maxRequestBytes = 7 << 20
	maxTxnOps       = 10_000
)

// validate says what cannot work.
func (k *KV) validate() error {
	for _, address := range k.EtcdListen {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return fmt.Errorf("kv.etcd_listen: %w", err)
		}
	}
	if k.EtcdTrustLoopback && slices.ContainsFunc(k.EtcdListen, func(a string) bool { return !loopback(a) }) {
		return errors.New("kv.etcd_trust_loopback is for test suites: the addresses of etcd_listen must be on loopback")
	}
	switch {
	case (k.EtcdCert == "") != (k.EtcdKey == ""):
		return errors.New("kv: etcd_cert and etcd_key go together")
	case k.EtcdClientCA != "" && k.EtcdCert == "":
		return errors.New("kv: etcd_client_ca needs etcd_cert and etcd_key")
	case k.MaxRequestBytes < 1024 || k.MaxRequestBytes > maxRequestBytes:
		return fmt.Errorf("kv.max_request_bytes must be 1024 to %d, got %d", maxRequestBytes, k.MaxRequestBytes)
	case k.MaxTxnOps < 1 || k.MaxTxnOps > maxTxnOps:
		return fmt.Errorf("kv.max_txn_ops must be 1 to %d, got %d", maxTxnOps, k.MaxTxnOps)
	case k.WatchProgress < 100*time.Millisecond:
		return fmt.Errorf("kv.watch_progress must be 100ms or more, got %s", k.WatchProgress)
	case k.CompactAge < 0 || k.CompactAge > 0 && k.CompactAge < time.Second:
		return fmt.Errorf("kv.compact_age must be 0 or 1s and more, got %s", k.CompactAge)
	case k.CorruptCheck < 0 || k.CorruptCheck > 0 && k.CorruptCheck < time.Second:
		return fmt.Errorf("kv.corrupt_check must be 0 or 1s and more, got %s", k.CorruptCheck)
	case k.TokenTTL < time.Second:
		return fmt.Errorf("kv.token_ttl must be 1s or more, got %s", k.TokenTTL)
	case k.BcryptCost < users.MinCost || k.BcryptCost > users.MaxCost:
		return fmt.Errorf("kv.bcrypt_cost must be %d to %d, got %d", users.MinCost, users.MaxCost, k.BcryptCost)
	}
	return nil
}

// Identity configures tokens, and who else is believed.
type Identity struct {
	// Issuer is the URL at which others find the keys that tokens are signed with: that of a name, or of a balancer, for all
	// members. Empty is each member's own address.
	Issuer string `yaml:"issuer"`
	// Providers are the OpenID providers whose users may log in, once they are linked with users here.
	Providers []oidc.Provider `yaml:"providers"`
}

func (i *Identity) validate() error {
	if i.Issuer != "" {
		u, err := url.Parse(i.Issuer)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || strings.HasSuffix(i.Issuer, "/") {
			return fmt.Errorf("identity.issuer: %q is not a URL without a slash at its end", i.Issuer)
		}
	}
	seen := map[string]bool{}
	for _, p := range i.Providers {
		if err := p.Check(); err != nil {
			return fmt.Errorf("identity.providers: %w", err)
		}
		if seen[p.Name] {
			return fmt.Errorf("identity.providers: %s stands twice", p.Name)
		}
		seen[p.Name] = true
	}
	return nil
}

// hosts are the names by which what asks for no credential may be called.
func (c *Config) CredentialFreeHosts() []string {
	if u, err := url.Parse(c.Identity.Issuer); err == nil && u.Hostname() != "" {
		return append(slices.Clone(c.REST.Hosts), u.Hostname())
	}
	return c.REST.Hosts
}

// issuer is Identity.Issuer, or this member's own address.
func (c *Config) IssuerURL() string {
	if c.Identity.Issuer != "" {
		return c.Identity.Issuer
	}
	return c.TLS.Scheme() + "://" + net.JoinHostPort(c.Listen, strconv.Itoa(int(c.Ports.Identity)))
}

// REST configures what asks for no credential.
type REST struct {
	// Open lists services that answer to everybody who can reach the member's address: kv, and of identity the users.
	Open []string `yaml:"open"`
	// Hosts are names by which what asks for no credential may be called over plaintext, beside IP addresses, localhost and
	// the issuer's: any other may be a name that a web page has bound to this address.
	Hosts []string `yaml:"hosts"`
}

// openable are the services that can be opened.
var openable = []string{"kv", "identity"}

func (r *REST) validate() error {
	for _, name := range r.Open {
		if !slices.Contains(openable, name) {
			return fmt.Errorf("rest.open: %q is not one of %v", name, openable)
		}
	}
	return nil
}

// Default is the configuration of a whole cloud on one host.
func Default() Config {
	return Config{
		NodeID: 1, Listen: "127.0.0.1", DataDir: "trivet-data", Tick: 100 * time.Millisecond, LogFormat: "auto",
		Ports: Ports{KV: 8081, Identity: 8083, VM: 8084, GRPC: 50051, Credit: 8086, CreditGRPC: 50057, Agents: 7443, Peers: 2380},
		KV: KV{
			Quota: kv.DefaultQuota, MaxRequestBytes: kv.DefaultRequestBytes, MaxTxnOps: kv.DefaultTxnOps, WatchProgress: kv.DefaultProgress,
			TokenTTL: users.DefaultTokenLife, BcryptCost: users.DefaultCost, CorruptCheck: kv.DefaultCorruptCheck, StrictReconfig: true,
		},
		Limits: Limits{Limits: budget.Default},
	}
}

// Validate says what cannot work.
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
	for _, part := range []interface{ validate() error }{c.Ports, &c.KV, &c.Identity, &c.REST, &c.Billing, &c.Limits} {
		if err := part.validate(); err != nil {
			return err
		}
	}
	if c.Dev && (len(c.Cluster) > 1 || len(c.Join) > 0 || !net.ParseIP(c.Listen).IsLoopback()) {
		return errors.New("dev is for one member on a loopback address: it lets everybody in")
	}
	return c.validateCluster()
}

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
	for _, port := range []uint16{p.KV, p.Identity, p.VM, p.GRPC, p.Credit, p.CreditGRPC, p.Agents, p.Peers} {
		if port == 0 || seen[port] {
			return errors.New("ports must be set and all different")
		}
		seen[port] = true
	}
	return nil
}

// members is Cluster, or this member alone.
func (c *Config) InitialMembers() Members {
	if len(c.Cluster) > 0 {
		return c.Cluster
	}
	return Members{c.NodeID: c.Listen}
}

// MemberIDs returns the IDs of InitialMembers in ascending order.
func (c *Config) MemberIDs() []uint64 { return slices.Sorted(maps.Keys(c.InitialMembers())) }

// Address returns host:port of one of this member's ports.
func (c *Config) Address(port uint16) string {
	return net.JoinHostPort(c.Listen, strconv.Itoa(int(port)))
}

// ClientURL returns the URL of the gRPC port of the member at a host. All members use the same ports.
func (c *Config) ClientURL(host string) string {
	return c.TLS.Scheme() + "://" + net.JoinHostPort(host, strconv.Itoa(int(c.Ports.GRPC)))
}

// seeds are the peer ports of members that may know the others.
func (c *Config) SeedAddresses() []string {
	var out []string
	port := strconv.Itoa(int(c.Ports.Peers))
	for _, host := range c.Join {
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), port)
		}
		out = append(out, host)
	}
	for _, id := range slices.Sorted(maps.Keys(c.Cluster)) {
		if id != c.NodeID {
			out = append(out, net.JoinHostPort(c.Cluster[id], port))
		}
	}
	return out
}

// inviters are the ports for agents of the members to join, where a token can be shown.
func (c *Config) AgentAddresses() (out []string) {
	for _, host := range c.Join {
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		out = append(out, net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(int(c.Ports.Agents))))
	}
	return out
}

// addresses are the members' hosts with a port.
func (m Members) Addresses(port uint16) map[uint64]string {
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
func (c *Config) BindFlags(f *pflag.FlagSet) {
	c.Billing.flags(f)
	c.Limits.flags(f)
	f.Uint64Var(&c.NodeID, "node-id", c.NodeID, "this member's id")
	f.StringVar(&c.Listen, "listen", c.Listen, "IP address that every port is served on")
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "directory for everything that must survive")
	f.Var(&c.Cluster, "cluster", "all members, this one included")
	f.StringSliceVar(&c.Join, "join", c.Join, "members of the cluster that this one is added to, as HOST or HOST:PORT")
	f.StringVar(&c.ClusterKey, "cluster-key", c.ClusterKey, "file with the key that all members share")
	f.StringVar(&c.JoinToken, "join-token", c.JoinToken, "file with the token of `trivet cluster token` that brings that key to a member that joins")
	f.BoolVar(&c.Dev, "dev", c.Dev, "let everybody act in project default (one member, loopback only)")
	f.StringVar(&c.MetricsListen, "metrics-listen", c.MetricsListen, "host:port for /metrics")
	f.StringVar(&c.TLS.Cert, "tls-cert", c.TLS.Cert, "file with the certificate of tenants' ports; read again when it changes")
	f.StringVar(&c.TLS.Key, "tls-key", c.TLS.Key, "file with its key, for its owner alone")
	f.BoolVar(&c.InsecurePlaintext, "insecure-plaintext", c.InsecurePlaintext, "let tenants' ports be plaintext beyond loopback")
	f.DurationVar(&c.Tick, "tick", c.Tick, "unit of raft's time; an election takes 10 to 20")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text, json or auto")
	for name, port := range map[string]*uint16{
		"kv-port": &c.Ports.KV, "identity-port": &c.Ports.Identity, "vm-port": &c.Ports.VM, "grpc-port": &c.Ports.GRPC,
		"credit-port": &c.Ports.Credit, "credit-grpc-port": &c.Ports.CreditGRPC, "agents-port": &c.Ports.Agents, "peers-port": &c.Ports.Peers,
	} {
		f.Uint16Var(port, name, *port, "port")
	}
	f.BoolVar(&c.KV.Open, "kv-open", c.KV.Open, "let everybody who reaches the gRPC port read and write keys")
	f.StringSliceVar(&c.KV.EtcdListen, "kv-etcd-listen", c.KV.EtcdListen, "host:port that serves what an etcd serves, for its clients; repeatable")
	f.StringVar(&c.KV.EtcdCert, "kv-etcd-cert", c.KV.EtcdCert, "file with the certificate of those ports")
	f.StringVar(&c.KV.EtcdKey, "kv-etcd-key", c.KV.EtcdKey, "file with its key")
	f.StringVar(&c.KV.EtcdClientCA, "kv-etcd-client-ca", c.KV.EtcdClientCA, "file with the authority of certificates that clients of those ports must show")
	f.BoolVar(&c.KV.EtcdTrustLoopback, "kv-etcd-trust-loopback", c.KV.EtcdTrustLoopback, "let every local process change members and etcd's users by those ports (for test suites)")
	f.Int64Var(&c.KV.Quota, "kv-quota", c.KV.Quota, "bytes that keys and their history may take; negative: no limit")
	f.DurationVar(&c.KV.CompactAge, "kv-compact-age", c.KV.CompactAge, "how long history is kept; 0: until somebody compacts it")
	f.DurationVar(&c.KV.CorruptCheck, "kv-corrupt-check", c.KV.CorruptCheck, "time between comparisons of all members' keys; 0: never")
	f.BoolVar(&c.KV.StrictReconfig, "kv-strict-reconfig", c.KV.StrictReconfig, "refuse etcd's clients to add or remove members while others were not heard for 5s")
	f.IntVar(&c.KV.MaxRequestBytes, "kv-max-request-bytes", c.KV.MaxRequestBytes, "limit of a request that writes keys")
	f.IntVar(&c.KV.MaxTxnOps, "kv-max-txn-ops", c.KV.MaxTxnOps, "limit of a transaction's operations")
	f.DurationVar(&c.KV.WatchProgress, "kv-watch-progress", c.KV.WatchProgress, "time between notices to watches that asked for them")
	f.DurationVar(&c.KV.TokenTTL, "kv-token-ttl", c.KV.TokenTTL, "how long a token of etcd's Auth lives")
	f.IntVar(&c.KV.BcryptCost, "kv-bcrypt-cost", c.KV.BcryptCost, "cost of hashing passwords of etcd's Auth")
	f.StringSliceVar(&c.REST.Open, "rest-open", c.REST.Open, "services that answer without a credential beyond loopback: kv, identity")
	f.StringSliceVar(&c.REST.Hosts, "rest-host", c.REST.Hosts, "name by which endpoints that ask for no credential may be called; repeatable")
	f.StringVar(&c.Identity.Issuer, "issuer", c.Identity.Issuer, "URL at which others find the keys that tokens are signed with (default: this member's own)")
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
			dir.Orgs = append(dir.Orgs, cloud.OrgID(org))
		}
	}
	d.c.Images.ImportDirs = append(d.c.Images.ImportDirs, dir)
	return nil
}

// load reads file, environment and flags into a configuration, in the order in which later ones win.
func Load(file string, environ []string, flags *pflag.FlagSet) (Config, error) {
	c := Default()
	c.NodeID = 0
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
	c.BindFlags(own)
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
		if list, ok := f.Value.(pflag.SliceValue); ok {
			errs = append(errs, own.Lookup(f.Name).Value.(pflag.SliceValue).Replace(list.GetSlice()))
			return
		}
		if f.Name == "join" {
			hosts, err := flags.GetStringSlice(f.Name)
			c.Join = hosts
			errs = append(errs, err)
			return
		}
		errs = append(errs, own.Set(f.Name, f.Value.String()))
	})
	if c.NodeID == 0 && len(c.Join) == 0 {
		c.NodeID = 1
	}
	return c, errors.Join(errs...)
}
