package offline

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// adminToken returns the command `trivet-controlplane admin-token`, which prints an administrator's token that is
// signed with the cluster key.
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
