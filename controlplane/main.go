// Command trivet-controlplane is one member of the control plane: it holds the records, decides, and serves every API.
// Without flags it is a whole cloud of one member on 127.0.0.1.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func main() {
	// Whatever a member writes is its own: the libraries beneath it create files that all may read.
	syscall.Umask(0o077)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "trivet-controlplane:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var file string
	flagged := config.Default()
	root := &cobra.Command{
		Use: "trivet-controlplane", Short: "One member of Trivet's control plane", Args: cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true, Version: version(),
	}
	root.Flags().StringVar(&file, "config", "", "YAML file with the same settings")
	flagged.BindFlags(root.Flags())
	forced := root.Flags().Bool("force-new-cluster", false, "make a cluster of this member alone of its data, when the others are lost for good; once, with a renewed key")
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := config.Load(file, os.Environ(), cmd.Flags())
		if err != nil {
			return err
		}
		if dirs := flagged.Images.ImportDirs; len(dirs) > 0 {
			c.Images.ImportDirs = dirs
		}
		if err := cmp.Or(c.Validate(), c.ValidateTLS()); err != nil {
			return err
		}
		if *forced {
			if err := forceNew(cmd.Context(), c); err != nil {
				return fmt.Errorf("force a new cluster: %w", err)
			}
		}
		return newSupervisor(c).supervise(func(f *supervisor) error { return run(cmd.Context(), c, f, nil) })
	}
	root.AddCommand(keygen(), adminToken(), restore(), tenantCert())
	return root
}

func keygen() *cobra.Command {
	var renew string
	c := &cobra.Command{
		Use: "keygen", Short: "Print a new cluster key, for a file that all members get", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			key := clusterkey.Generate()
			if renew != "" {
				old, err := clusterkey.Load(renew)
				if err != nil {
					return err
				}
				key = old.Renewed()
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), key.Encode())
			return err
		},
	}
	c.Flags().StringVar(&renew, "renew", "", "print the key of a new cluster that can read what this key's has sealed: for restore and --force-new-cluster")
	return c
}

func adminToken() *cobra.Command {
	var file, org, project string
	var ttl time.Duration
	c := &cobra.Command{
		Use: "admin-token", Short: "Print a token of the administrator, on a host that holds the cluster key", Args: cobra.NoArgs,
	}
	c.Flags().StringVar(&file, "cluster-key", "", "file with the cluster key")
	c.Flags().StringVar(&org, "org", "", "org that the token acts in")
	c.Flags().StringVar(&project, "project", "", "project that the token acts in")
	c.Flags().DurationVar(&ttl, "ttl", time.Hour, "lifetime, at most 720h")
	c.MarkFlagRequired("cluster-key")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if ttl <= 0 || ttl > token.MaxTTL*time.Second {
			return fmt.Errorf("--ttl must be up to 720h, got %s", ttl)
		}
		key, err := clusterkey.Load(file)
		if err != nil {
			return err
		}
		scope := cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)}
		text, err := identity.HostToken(key, scope, clock.Wall(), ttl)
		if err != nil {
			return err
		}
		fmt.Fprintln(cmd.OutOrStdout(), text)
		return nil
	}
	return c
}

// version is the module's, as the build stamped it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
