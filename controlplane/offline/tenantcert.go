package offline

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// maxTenantCert is the maximum lifetime of a certificate that tenant-cert creates. Some clients reject certificates
// with a longer lifetime, no matter which authority has signed them.
const maxTenantCert = 825 * 24 * time.Hour

// tenantCert returns the command `trivet-controlplane tenant-cert`. The command creates a certificate for the ports for
// tenants and signs it with the cluster key.
func tenantCert() *cobra.Command {
	var file, dir string
	var hosts []string
	var life time.Duration
	c := &cobra.Command{
		Use: "tenant-cert", Short: "Create a certificate for tenants' ports, signed with the cluster key", Args: cobra.NoArgs,
		Long: `Write tls.crt and tls.key, for --tls-cert and --tls-key, and tls-ca.crt, which clients must trust
(trivet --tls-ca, curl --cacert, etcdctl --cacert). The cluster's certificate authority signs it. Running members load a new
certificate from the same files without a restart. Browsers do not support the authority's key type, Ed25519.`,
		Example: "  trivet-controlplane tenant-cert --cluster-key cluster.key --hosts cloud.example.org,10.0.0.1,10.0.0.2,10.0.0.3 --dir /etc/trivet",
	}
	c.Flags().StringVar(&file, "cluster-key", "", "file with the cluster key")
	c.Flags().StringSliceVar(&hosts, "hosts", nil, "names and IP addresses by which clients call members")
	c.Flags().StringVar(&dir, "dir", ".", "directory for the three files; those that are there are replaced")
	c.Flags().DurationVar(&life, "life", 365*24*time.Hour, "how long it is good, at most 19800h")
	c.MarkFlagRequired("cluster-key")
	c.MarkFlagRequired("hosts")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if life < time.Minute || life > maxTenantCert {
			return fmt.Errorf("--life must be 1m to 19800h, got %s", life)
		}
		key, err := clusterkey.Load(file)
		if err != nil {
			return err
		}
		authority, err := key.Authority()
		if err != nil {
			return err
		}
		made, err := authority.IssueTenants(hosts, time.Now(), life)
		if err != nil {
			return err
		}
		secret, err := x509.MarshalPKCS8PrivateKey(made.PrivateKey)
		if err != nil {
			return fmt.Errorf("encode key: %w", err)
		}
		for _, f := range []struct {
			name, kind string
			der        []byte
			mode       os.FileMode
		}{
			{"tls-ca.crt", "CERTIFICATE", authority.Certificate().Raw, 0o644},
			{"tls.key", "PRIVATE KEY", secret, 0o600},
			{"tls.crt", "CERTIFICATE", made.Certificate[0], 0o644},
		} {
			path := filepath.Join(dir, f.name)
			if err := replaceFile(path, pem.EncodeToMemory(&pem.Block{Type: f.kind, Bytes: f.der}), f.mode); err != nil {
				return fmt.Errorf("write %s: %w", path, err)
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
		}
		return nil
	}
	return c
}

// replaceFile replaces the file at path atomically. The new file gets the owner of the old one, because the member that
// reads the file may run as another user than the one who renews the certificate.
func replaceFile(path string, text []byte, mode os.FileMode) error {
	return atomicfile.Write(path, mode, func(f *os.File) error {
		if before, err := os.Stat(path); err == nil {
			if err := chownLike(f, before); err != nil {
				return err
			}
		}
		_, err := f.Write(text)
		return err
	})
}

// chownLike changes the owner and group of f to those of other.
func chownLike(f *os.File, other os.FileInfo) error {
	s, ok := other.Sys().(*syscall.Stat_t)
	if !ok || int(s.Uid) == os.Geteuid() {
		return nil
	}
	return f.Chown(int(s.Uid), int(s.Gid))
}
