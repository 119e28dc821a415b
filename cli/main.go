// Command trivet is the command line for operators and tenants of a Trivet cloud.
//
// It speaks gRPC with the control plane and nothing else: it can do what its caller's token can do. This file is the only
// one that knows every command; the commands are in the packages identity, login, image, vm, node, wallet, kv and cluster, on top of
// package session. Below are packages that know no noun: dial (several endpoints as one), account (the saved logins), show
// (tables and JSON), explain (errors), console (guests' output), terminal.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/cluster"
	"github.com/trivet-cloud/trivet/cli/identity"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/kv"
	"github.com/trivet-cloud/trivet/cli/login"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/terminal"
	"github.com/trivet-cloud/trivet/cli/vm"
	"github.com/trivet-cloud/trivet/cli/wallet"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	sh := session.Shell{
		Args: os.Args[1:], Env: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Now: time.Now,
	}
	if terminal.Is(os.Stderr) {
		sh.Progress = os.Stderr
		if terminal.Is(os.Stdin) {
			sh.Ask = func(ctx context.Context, question string, secret bool) (string, error) {
				return terminal.Ask(ctx, os.Stdin, os.Stderr, question, secret)
			}
		}
	}
	// A second interrupt ends the program at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, sh))
}

// run is the whole program.
func run(ctx context.Context, sh session.Shell) int {
	s, root := commands(sh)
	cmd, err := root.ExecuteContextC(ctx)
	return s.Exit(cmd, err)
}

func commands(sh session.Shell) (*session.Session, *cobra.Command) {
	root := &cobra.Command{
		Use:   "trivet",
		Short: "Operate and use a Trivet cloud",
		Long: `Operate and use a Trivet cloud.

Machines, images and nodes are given by name or id. Exit code: 0 done, 1 not done, 2 not understood.`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	s := session.New(sh, root)
	root.AddCommand(login.Commands(s)...)
	root.AddCommand(identity.Commands(s)...)
	// These fail only for a flag that there is not.
	_ = root.RegisterFlagCompletionFunc("org", identity.OrgNames(s))
	_ = root.RegisterFlagCompletionFunc("project", identity.ProjectNames(s))
	root.AddCommand(image.Command(s), vm.Command(s), node.Command(s), wallet.Command(s), kv.Command(s), cluster.Command(s))
	return s, root
}

// version is what the build knows of itself.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}
