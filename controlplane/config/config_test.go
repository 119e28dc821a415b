package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/oidc"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// environment returns a function like os.LookupEnv for the variables in pairs, which have the form NAME=value.
func environment(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, pair := range pairs {
			if value, ok := strings.CutPrefix(pair, name+"="); ok {
				return value, true
			}
		}
		return "", false
	}
}

// TestPrecedence checks that flags override environment variables, which override the file, which overrides the
// defaults.
func TestPrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte(`
node_id: 2
listen: 10.0.0.2
cluster: {1: 10.0.0.1, 2: 10.0.0.2, 3: 10.0.0.3}
cluster_key: file.key
ports: {vm: 9999}
images:
  import_dirs: [{path: /srv/images, orgs: [acme]}]
`), 0o600))
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	bound := Default()
	bound.BindFlags(flags)
	require.NoError(t, flags.Parse([]string{"--cluster-key", "flag.key"}))
	c, err := Load(file, environment("TRIVET_CLUSTER_KEY=env.key", "TRIVET_TICK=200ms", "TRIVET_ELSEWHERE=1", "HOME=/"), flags)
	require.NoError(t, err)
	require.NoError(t, c.Validate())
	want := Default()
	want.NodeID, want.Listen, want.ClusterKey, want.Tick = 2, "10.0.0.2", "flag.key", 200*time.Millisecond
	want.Cluster = Members{1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.3"}
	want.Ports.VM = 9999
	want.Images.ImportDirs = []image.ImportDir{{Path: "/srv/images", Orgs: []cloud.OrgID{"acme"}}}
	require.Equal(t, want, c)
}

// TestLists checks that lists can be set in the file, in the environment and by flags, and that a source replaces the
// entire list. Only --import-dir appends to the list of the file.
func TestLists(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte("kv: {etcd_listen: ['127.0.0.1:1'], open: true}\nrest: {open: [kv]}\n"), 0o600))
	parsed := func(args ...string) *pflag.FlagSet {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		bound := Default()
		bound.BindFlags(flags)
		require.NoError(t, flags.Parse(args))
		return flags
	}
	c, err := Load(file, nil, parsed())
	require.NoError(t, err)
	require.Equal(t, []string{"127.0.0.1:1"}, c.KV.EtcdListen)
	require.Equal(t, []string{"kv"}, c.REST.Open)
	require.True(t, c.KV.Open)
	c, err = Load(file, environment("TRIVET_KV_ETCD_LISTEN=127.0.0.1:2,127.0.0.1:3"), parsed())
	require.NoError(t, err)
	require.Equal(t, []string{"127.0.0.1:2", "127.0.0.1:3"}, c.KV.EtcdListen)
	c, err = Load(file, environment("TRIVET_KV_ETCD_LISTEN=127.0.0.1:2"), parsed("--kv-etcd-listen", "127.0.0.1:4", "--kv-etcd-listen", "127.0.0.1:5", "--rest-open="))
	require.NoError(t, err)
	require.Equal(t, []string{"127.0.0.1:4", "127.0.0.1:5"}, c.KV.EtcdListen)
	require.Empty(t, c.REST.Open)
	require.NoError(t, c.Validate())

	require.NoError(t, os.WriteFile(file, []byte("images: {import_dirs: [{path: /a}]}\n"), 0o600))
	c, err = Load(file, nil, parsed("--import-dir=/b", "--import-dir", "/c=acme,other"))
	require.NoError(t, err)
	require.Equal(t, []image.ImportDir{{Path: "/b"}, {Path: "/c", Orgs: []cloud.OrgID{"acme", "other"}}}, c.Images.ImportDirs)
}

func TestUnknownSettingIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte("node_idd: 2\n"), 0o600))
	_, err := Load(file, nil, pflag.NewFlagSet("", pflag.ContinueOnError))
	require.ErrorContains(t, err, "node_idd")
	_, err = Load("", environment("TRIVET_NODE_ID=two"), pflag.NewFlagSet("", pflag.ContinueOnError))
	require.ErrorContains(t, err, "TRIVET_NODE_ID")
}

func TestBadConfigurations(t *testing.T) {
	trio := Members{1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.3"}
	for says, change := range map[string]func(*Config){
		"not an IP address":            func(c *Config) { c.Listen = "localhost" },
		"node_id must be":              func(c *Config) { c.NodeID = 0 },
		"give one of them":             func(c *Config) { c.Cluster, c.Join, c.ClusterKey = trio, []string{"10.0.0.1"}, "k" },
		"is not host or host:port":     func(c *Config) { c.Join, c.ClusterKey = []string{"http://10.0.0.1"}, "k" },
		"trivet-controlplane keygen":   func(c *Config) { c.Cluster = trio },
		"does not list this member, 9": func(c *Config) { c.Cluster, c.ClusterKey, c.NodeID = trio, "k", 9 },
		"have the same address":        func(c *Config) { c.Cluster, c.ClusterKey = Members{1: "127.0.0.1", 2: "127.0.0.1"}, "k" },
		"ports must be":                func(c *Config) { c.Ports.VM = c.Ports.GRPC },
		"accepts every caller":         func(c *Config) { c.Dev, c.Cluster, c.ClusterKey = true, trio, "k" },
		"one member on a loopback":     func(c *Config) { c.Dev, c.Listen = true, "10.0.0.1" },
		"tick must be":                 func(c *Config) { c.Tick = time.Millisecond },
		"log_format must be":           func(c *Config) { c.LogFormat = "xml" },
		"etcd_trust_loopback":          func(c *Config) { c.KV.EtcdListen, c.KV.EtcdTrustLoopback = []string{"10.0.0.1:2379"}, true },
		"kv.etcd_listen":               func(c *Config) { c.KV.EtcdListen = []string{"127.0.0.1"} },
		"etcd_cert and etcd_key":       func(c *Config) { c.KV.EtcdCert = "c" },
		"etcd_client_ca needs":         func(c *Config) { c.KV.EtcdClientCA = "c" },
		"kv.max_request_bytes":         func(c *Config) { c.KV.MaxRequestBytes = 1 << 30 },
		"kv.max_txn_ops":               func(c *Config) { c.KV.MaxTxnOps = 0 },
		"kv.watch_progress":            func(c *Config) { c.KV.WatchProgress = time.Millisecond },
		"kv.compact_age":               func(c *Config) { c.KV.CompactAge = -1 },
		"kv.corrupt_check":             func(c *Config) { c.KV.CorruptCheck = time.Millisecond },
		"kv.token_ttl":                 func(c *Config) { c.KV.TokenTTL = 0 },
		"kv.bcrypt_cost":               func(c *Config) { c.KV.BcryptCost = 99 },
		`rest.open: "credit" is not`:   func(c *Config) { c.REST.Open = []string{"credit"} },
		"identity.issuer":              func(c *Config) { c.Identity.Issuer = "cloud.example" },
		"must be https": func(c *Config) {
			c.Identity.Providers = []oidc.Provider{{Name: "corp", Issuer: "http://idp.example", ClientID: "x"}}
		},
		"corp is listed twice": func(c *Config) {
			p := oidc.Provider{Name: "corp", Issuer: "https://idp.example", ClientID: "x"}
			c.Identity.Providers = []oidc.Provider{p, p}
		},
		`"10.0.0" is not an IP address`:   func(c *Config) { c.Cluster, c.ClusterKey = Members{1: "10.0.0"}, "k" },
		"data_dir is required":            func(c *Config) { c.DataDir = "" },
		"billing: without any price":      func(c *Config) { c.Billing.Enabled = true },
		"billing: vcpu_hour must be":      func(c *Config) { c.Billing.Prices.VCPUHour = -1 },
		"billing: on_empty must be":       func(c *Config) { c.Billing.OnEmpty = "kill" },
		"billing: an hour for tests":      func(c *Config) { c.Billing.TestHour = time.Millisecond },
		"images.import_dirs: a directory": func(c *Config) { c.Images.ImportDirs = []image.ImportDir{{}} },
	} {
		c := Default()
		change(&c)
		require.ErrorContains(t, c.Validate(), says)
	}
	require.NoError(t, (&Config{}).flagsRoundTrip())
}

// flagsRoundTrip sets every flag to the text that it prints as its default, and returns an error if a flag does not
// accept that text.
func (c *Config) flagsRoundTrip() error {
	*c = Default()
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.BindFlags(f)
	var err error
	f.VisitAll(func(f *pflag.Flag) {
		if f.DefValue != "" && err == nil {
			err = f.Value.Set(f.DefValue)
		}
	})
	return err
}

func TestMembersFlag(t *testing.T) {
	var m Members
	require.NoError(t, m.Set("2=10.0.0.2, 1=10.0.0.1"))
	require.Equal(t, "1=10.0.0.1,2=10.0.0.2", m.String())
	for _, bad := range []string{"", "1", "x=10.0.0.1", "1=", "1=a,1=b", "-1=a"} {
		require.Error(t, m.Set(bad), bad)
	}
}

// TestJoinConfig checks the settings of a member that joins. Only such a member may have no ID; the default ID of
// others is 1.
func TestJoinConfig(t *testing.T) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	parsed := Default()
	parsed.BindFlags(flags)
	require.NoError(t, flags.Parse([]string{"--join", "10.0.0.1,10.0.0.2:9999", "--cluster-key", "k", "--listen", "10.0.0.4"}))
	c, err := Load("", nil, flags)
	require.NoError(t, err)
	require.NoError(t, c.Validate())
	require.Zero(t, c.NodeID)
	require.Equal(t, []string{"10.0.0.1:2380", "10.0.0.2:9999"}, c.SeedAddresses())
	require.Equal(t, []string{"10.0.0.1:7443", "10.0.0.2:7443"}, c.AgentAddresses())
	c.JoinToken = "t"
	require.ErrorContains(t, c.Validate(), "give one of them")
	c.ClusterKey = ""
	require.NoError(t, c.Validate())
	c.JoinToken = "" // a data directory that contains the key needs no token
	require.NoError(t, c.Validate())
	c.Join, c.JoinToken, c.NodeID = nil, "t", 4
	require.ErrorContains(t, c.Validate(), "say with join")

	c, err = Load("", environment("TRIVET_JOIN=10.0.0.1", "TRIVET_CLUSTER_KEY=k", "TRIVET_NODE_ID=4"), pflag.NewFlagSet("", pflag.ContinueOnError))
	require.NoError(t, err)
	require.Equal(t, uint64(4), c.NodeID)
	require.Equal(t, []string{"10.0.0.1"}, c.Join)
	c, err = Load("", nil, pflag.NewFlagSet("", pflag.ContinueOnError))
	require.NoError(t, err)
	require.Equal(t, uint64(1), c.NodeID)
}
