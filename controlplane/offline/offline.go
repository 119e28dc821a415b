// Package offline holds the commands of trivet-controlplane that need no running member: restore makes a data directory
// from a backup, ForceNewCluster turns the data directory of one member into a new cluster, and keygen, admin-token and
// tenant-cert make files from the cluster key.
//
// Commands that write to a data directory hold its lock, so that no member runs in it meanwhile.
package offline

import "github.com/spf13/cobra"

// Commands returns the subcommands of trivet-controlplane.
func Commands() []*cobra.Command {
	return []*cobra.Command{keygen(), adminToken(), restore(), tenantCert()}
}
