package config

import (
	"strings"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// BindFlags adds a flag to f for each setting except identity.providers. The defaults of the flags are the values in c.
// Parsing f changes the settings in c.
func (c *Config) BindFlags(f *pflag.FlagSet) {
	c.Billing.flags(f)
	c.Limits.flags(f)
	c.KV.flags(f)
	f.Uint64Var(&c.NodeID, "node-id", c.NodeID, "this member's id")
	f.StringVar(&c.Listen, "listen", c.Listen, "IP address that every port is served on")
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "directory for everything that must survive")
	f.Var(&c.Cluster, "cluster", "all members, this one included")
	f.StringSliceVar(&c.Join, "join", c.Join, "members of the cluster that this one is added to, as HOST or HOST:PORT")
	f.StringVar(&c.ClusterKey, "cluster-key", c.ClusterKey, "file with the key that all members share")
	f.StringVar(&c.JoinToken, "join-token", c.JoinToken, "file with a token of \"trivet cluster token\", with which a member that joins gets the cluster key")
	f.BoolVar(&c.Dev, "dev", c.Dev, "let every caller act in project default (one member, loopback only)")
	f.StringVar(&c.MetricsListen, "metrics-listen", c.MetricsListen, "host:port for /metrics and /targets")
	f.StringVar(&c.MetricsAddress, "metrics-address", c.MetricsAddress, "host:port at which Prometheus reaches metrics-listen (default: metrics-listen, with the address of listen in place of 0.0.0.0; without a usable address, the member is not in /targets)")
	f.StringVar(&c.MetricsCert, "metrics-cert", c.MetricsCert, "file with the TLS certificate chain of metrics-listen")
	f.StringVar(&c.MetricsKey, "metrics-key", c.MetricsKey, "file with the private key of metrics-cert")
	f.StringVar(&c.MetricsToken, "metrics-token", c.MetricsToken, "file with the bearer token that requests to metrics-listen must have")
	f.StringVar(&c.TLS.Cert, "tls-cert", c.TLS.Cert, "file with the certificate of tenants' ports; read again when it changes")
	f.StringVar(&c.TLS.Key, "tls-key", c.TLS.Key, "file with the private key of tls-cert; only its owner may have access to it")
	f.BoolVar(&c.InsecurePlaintext, "insecure-plaintext", c.InsecurePlaintext, "let tenants' ports be plaintext beyond loopback")
	f.DurationVar(&c.Tick, "tick", c.Tick, "unit of raft's time; an election takes 10 to 20")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text, json or auto")
	for _, p := range []struct {
		flag  string
		port  *uint16
		serve string
	}{
		{"kv-port", &c.Ports.KV, "the REST API of the key-value store and of the cluster's members"},
		{"identity-port", &c.Ports.Identity, "the REST API of users, tokens, orgs and projects"},
		{"vm-port", &c.Ports.VM, "the REST API of VMs, images, volumes and hosts"},
		{"grpc-port", &c.Ports.GRPC, "all gRPC APIs, including those that trivet and clients of etcd use"},
		{"credit-port", &c.Ports.Credit, "the REST API of wallets"},
		{"credit-grpc-port", &c.Ports.CreditGRPC, "the gRPC API of wallets alone"},
		{"network-port", &c.Ports.Network, "the REST API of networks"},
		{"network-grpc-port", &c.Ports.NetworkGRPC, "the gRPC API of networks alone"},
		{"agents-port", &c.Ports.Agents, "the agents of hosts, with TLS"},
		{"peers-port", &c.Ports.Peers, "the other members of the cluster, with TLS"},
	} {
		f.Uint16Var(p.port, p.flag, *p.port, "TCP port for "+p.serve)
	}
	f.StringSliceVar(&c.REST.Open, "rest-open", c.REST.Open, "services that answer without a credential beyond loopback: kv, identity")
	f.StringSliceVar(&c.REST.Hosts, "rest-host", c.REST.Hosts, "name by which endpoints that ask for no credential may be called; repeatable")
	f.StringVar(&c.Identity.Issuer, "issuer", c.Identity.Issuer, "URL at which others find the keys that tokens are signed with (default: this member's own)")
	f.BoolVar(&c.Images.HTTPS.Disabled, "images-https-disabled", c.Images.HTTPS.Disabled, "refuse images from https:// sources")
	f.StringSliceVar(&c.Images.HTTPS.Allow, "images-https-allow", c.Images.HTTPS.Allow, "private prefix that https:// images may be fetched from; repeatable")
	f.Var(&importDirs{c}, "import-dir", "directory that images are imported from, as PATH or PATH=ORG,ORG; repeatable")
}

// importDirs is the flag value of Images.ImportDirs. Each occurrence of the flag appends one directory.
type importDirs struct{ c *Config }

var _ pflag.SliceValue = (*importDirs)(nil)

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

// Append implements pflag.SliceValue.
func (d *importDirs) Append(text string) error { return d.Set(text) }

// Replace implements pflag.SliceValue.
func (d *importDirs) Replace(texts []string) error {
	d.c.Images.ImportDirs = nil
	for _, text := range texts {
		if err := d.Set(text); err != nil {
			return err
		}
	}
	return nil
}

// GetSlice implements pflag.SliceValue. It returns the present directories as texts in the format that Set parses.
func (d *importDirs) GetSlice() (texts []string) {
	for _, dir := range d.c.Images.ImportDirs {
		separator, text := "=", dir.Path
		for _, org := range dir.Orgs {
			text += separator + string(org)
			separator = ","
		}
		texts = append(texts, text)
	}
	return texts
}
