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

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/offline"
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
			if err := offline.ForceNewCluster(cmd.Context(), c, newLog(c)); err != nil {
				return fmt.Errorf("force a new cluster: %w", err)
			}
		}
		return newSupervisor(c).supervise(func(f *supervisor) error { return run(cmd.Context(), c, f, nil) })
	}
	root.AddCommand(offline.Commands()...)
	return root
}

// version is the module's, as the build stamped it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
