package offline

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
)

// keygen returns the command `trivet-controlplane keygen`, which prints a new cluster key.
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
