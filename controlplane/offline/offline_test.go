package offline

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
)

// run runs a subcommand with the given arguments and returns what it printed.
func run(args ...string) (string, error) {
	var out bytes.Buffer
	root := &cobra.Command{SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(Commands()...)
	root.SetArgs(args)
	root.SetOut(&out)
	err := root.Execute()
	return out.String(), err
}

func TestKeygen(t *testing.T) {
	out, err := run("keygen")
	require.NoError(t, err)
	_, err = clusterkey.Parse(out)
	require.NoError(t, err)
}

func TestTenantCert(t *testing.T) {
	dir := t.TempDir()
	keyFile := filepath.Join(dir, "cluster.key")
	_, err := clusterkey.LoadOrMake(keyFile)
	require.NoError(t, err)
	tenantCert := func(args ...string) error {
		_, err := run(append([]string{"tenant-cert", "--cluster-key", keyFile, "--dir", dir}, args...)...)
		return err
	}
	require.NoError(t, tenantCert("--hosts", "localhost,10.0.0.1"))
	info, err := os.Stat(filepath.Join(dir, "tls.key"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	before, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	require.NoError(t, err)
	authority, err := os.ReadFile(filepath.Join(dir, "tls-ca.crt"))
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(authority))
	for host, ok := range map[string]bool{"localhost": true, "10.0.0.1": true, "10.0.0.2": false} {
		_, err := before.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host})
		require.Equal(t, ok, err == nil, "%s: %v", host, err)
	}
	require.NoError(t, tenantCert("--hosts", "localhost", "--life", "1h"), "it renews what is there")
	after, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(time.Hour), after.Leaf.NotAfter, time.Minute)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 4)

	require.ErrorContains(t, tenantCert("--hosts", "a b"), "neither a host name")
	require.ErrorContains(t, tenantCert("--hosts", "a", "--life", "20000h"), "--life must be")
	require.ErrorContains(t, tenantCert(), "hosts")
	require.NoError(t, os.Chmod(keyFile, 0o644))
	require.ErrorContains(t, tenantCert("--hosts", "a"), "chmod 600")
}
