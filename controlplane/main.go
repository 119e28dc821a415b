// Command trivet-controlplane runs one member of the control plane. It replicates the platform's records with the other
// members and serves every API. Without flags it is a cloud of one member on 127.0.0.1.
//
// This package only wires the other packages together. run lists the builders of a member in the order in which they
// run:
//
//   - state.go: the data directory, storage engines, raft and records
//   - services.go: the services, and the list of what each of them adds to the member
//   - servers.go: gRPC and REST servers and their listeners
//   - background.go: leader tasks and loops
//
// supervisor.go stops the process when its disk fails. timerslack.go lets timers fire late, which saves CPU time.
// bootstrap.go determines this member's ID and cluster.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/offline"
	"github.com/trivet-cloud/trivet/shared/version"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "dev" {
		// The program must not inherit the settings below, which are for a member.
		fmt.Fprintln(os.Stderr, "trivet-controlplane:", execDev(os.Args[2:]))
		os.Exit(1)
	}
	setTimerSlack()
	// Only the user of this process may read the member's files. Some libraries create files with mode 0644.
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
	defaults := config.Default()
	root := &cobra.Command{
		Use: "trivet-controlplane", Short: "One member of Trivet's control plane", Args: cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true, Version: version.Version(),
	}
	root.Flags().StringVar(&file, "config", "", "YAML file with the same settings")
	defaults.BindFlags(root.Flags())
	forced := root.Flags().Bool("force-new-cluster", false, "make a cluster of this member alone of its data, when the others are lost for good; once, with a renewed key")
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := config.Load(file, os.LookupEnv, cmd.Flags())
		if err != nil {
			return err
		}
		if err := cmp.Or(c.Validate(), c.ValidateTLS()); err != nil {
			return err
		}
		if *forced {
			if err := offline.ForceNewCluster(cmd.Context(), c, newLog(c)); err != nil {
				return fmt.Errorf("force a new cluster: %w", err)
			}
		}
		return newSupervisor(c).supervise(func(s *supervisor) error { return run(cmd.Context(), c, s, nil) })
	}
	root.AddCommand(offline.Commands()...)
	root.AddCommand(devCommand())
	root.AddCommand(&cobra.Command{
		Use: "version", Short: "Print the version of this program", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.Read().Line("trivet-controlplane"))
			return err
		},
	})
	return root
}
