package config

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// TestPlaintextBeyondLoopbackIsRefused checks that addresses that other hosts can reach require a certificate or
// insecure_plaintext.
func TestPlaintextBeyondLoopbackIsRefused(t *testing.T) {
	const refused = "--insecure-plaintext to do it all the same"
	for name, c := range map[string]struct {
		change func(*Config)
		says   string
	}{
		"default configuration":                                  {func(*Config) {}, ""},
		"another loopback address":                               {func(c *Config) { c.Listen = "127.9.8.7" }, ""},
		"IPv6 loopback address":                                  {func(c *Config) { c.Listen = "::1" }, ""},
		"address of the host":                                    {func(c *Config) { c.Listen = "10.0.0.1" }, "--tls-cert and --tls-key"},
		"all addresses":                                          {func(c *Config) { c.Listen = "0.0.0.0" }, refused},
		"all IPv6 addresses":                                     {func(c *Config) { c.Listen = "::" }, refused},
		"IPv4-mapped address":                                    {func(c *Config) { c.Listen = "::ffff:10.0.0.1" }, refused},
		"IPv4-mapped loopback address":                           {func(c *Config) { c.Listen = "::ffff:127.0.0.1" }, ""},
		"address with insecure_plaintext":                        {func(c *Config) { c.Listen, c.InsecurePlaintext = "10.0.0.1", true }, ""},
		"address with a certificate":                             {func(c *Config) { c.Listen, c.TLS = "10.0.0.1", TLS{"c", "k"} }, ""},
		"certificate without a key":                              {func(c *Config) { c.TLS.Cert = "c" }, "tls: cert and key go together"},
		"key without a certificate":                              {func(c *Config) { c.TLS.Key = "k" }, "tls: cert and key go together"},
		"key without a certificate, insecure_plaintext":          {func(c *Config) { c.TLS.Key, c.InsecurePlaintext = "k", true }, "tls: cert and key go together"},
		"etcd on loopback addresses":                             {func(c *Config) { c.KV.EtcdListen = []string{"127.0.0.1:2379", "localhost:1", "[::1]:2"} }, ""},
		"etcd on an address of the host":                         {func(c *Config) { c.KV.EtcdListen = []string{"127.0.0.1:2379", "10.0.0.1:2379"} }, "--kv-etcd-cert and"},
		"etcd on a host name":                                    {func(c *Config) { c.KV.EtcdListen = []string{"host:2379"} }, refused},
		"etcd on all addresses":                                  {func(c *Config) { c.KV.EtcdListen = []string{":2379"} }, refused},
		"etcd on all addresses with a certificate":               {func(c *Config) { c.KV.EtcdListen, c.KV.EtcdCert = []string{":2379"}, "c" }, ""},
		"etcd without a certificate, ports for tenants with one": {func(c *Config) { c.TLS, c.KV.EtcdListen = TLS{"c", "k"}, []string{":2379"} }, "--kv-etcd-cert and"},
		"etcd on all addresses with insecure_plaintext":          {func(c *Config) { c.KV.EtcdListen, c.InsecurePlaintext = []string{":2379"}, true }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			config := Default()
			c.change(&config)
			if err := config.ValidateTLS(); c.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.says)
			}
		})
	}
}

func TestTLSFromFileEnvironmentAndFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte("tls: {cert: file.crt, key: file.key}\ninsecure_plaintext: true\n"), 0o600))
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	bound := Default()
	bound.BindFlags(flags)
	require.NoError(t, flags.Parse([]string{"--tls-key", "flag.key", "--insecure-plaintext=false"}))
	c, err := Load(file, environment("TRIVET_TLS_CERT=env.crt", "TRIVET_TLS_KEY=env.key", "TRIVET_TLS_CA=the command line's"), flags)
	require.NoError(t, err)
	require.Equal(t, TLS{"env.crt", "flag.key"}, c.TLS)
	require.True(t, c.TLS.Enabled())
	require.Equal(t, "https", c.TLS.Scheme())
	require.False(t, c.InsecurePlaintext)
}

// TestIssuerURLFollowsTLS checks that the issuer URL has the same scheme as the ports for tenants.
func TestIssuerURLFollowsTLS(t *testing.T) {
	c := Default()
	require.Equal(t, "http://127.0.0.1:8083", c.IssuerURL())
	c.TLS = TLS{"c", "k"}
	require.Equal(t, "https://127.0.0.1:8083", c.IssuerURL())
}
