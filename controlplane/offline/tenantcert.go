package offline

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
)

// maxTenantCert is the longest lifetime of a certificate that tenant-cert makes. Clients reject longer ones from
// any authority.
const maxTenantCert = 825 * 24 * time.Hour

// tenantCert is the command `trivet-controlplane tenant-cert`, which writes a certificate for tenants' ports.
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

// replaceFile replaces the file at path atomically. The new file has the owner of the old one, because the member that reads
// the file may run as another user than the one who renews it.
func replaceFile(path string, text []byte, mode os.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if before, statErr := os.Stat(path); err == nil && statErr == nil {
		err = chownLike(f, before)
	}
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// chownLike gives f the owner of other.
func chownLike(f *os.File, other os.FileInfo) error {
	s, ok := other.Sys().(*syscall.Stat_t)
	if !ok || int(s.Uid) == os.Geteuid() {
		return nil
	}
	return f.Chown(int(s.Uid), int(s.Gid))
}
