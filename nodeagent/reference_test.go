package main

import (
	"flag"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/docs/docstest"
)

var rewrite = flag.Bool("rewrite", false, "write docs/daemons")

// TestReference compares docs/daemons/trivet-nodeagent.md with the flags of the program.
func TestReference(t *testing.T) {
	c := &cobra.Command{
		Use: "trivet-nodeagent", Short: "Agent of a host that runs the VMs of a Trivet cloud", Args: cobra.NoArgs, Run: func(*cobra.Command, []string) {},
		Long: `Run the VMs that the control plane assigns to this host. The agent connects to the control plane. It accepts no
commands from the network, and serves only /metrics and /health. Guests keep running when it stops.

Each flag is also a key of the configuration file and an environment variable.`,
	}
	flags, _, _ := newFlags()
	flags.VisitAll(func(f *pflag.Flag) { c.Flags().AddFlag(f) })
	docstest.Reference(t, "../docs/daemons", c, false, *rewrite)
}
