// Package offline contains the commands of trivet-controlplane that need no running member. restore creates a data
// directory from a backup, ForceNewCluster turns the data directory of one member into a new cluster, keygen prints a
// cluster key, and admin-token and tenant-cert create a token and a certificate from the cluster key.
//
// Commands that write to a data directory lock it, so that no member can run in it meanwhile.
package offline

import "github.com/spf13/cobra"

// Commands returns the subcommands of trivet-controlplane that are in this package.
func Commands() []*cobra.Command {
	return []*cobra.Command{keygen(), adminToken(), restore(), tenantCert()}
}
