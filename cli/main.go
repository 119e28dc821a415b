// Command trivet is the command line for operators and tenants of a Trivet cloud.
//
// It calls the control plane over gRPC, with the rights of the caller's token. This file lists all commands. The
// packages:
//
//   - identity, login, image, vm, volume, network, node, wallet, kv, cluster and version hold the
//     commands. apply holds `trivet apply`, to which vm, volume and network describe their objects.
//   - session holds what all commands share: global flags, environment, connection, output, exit codes.
//   - list holds what commands that list objects share, and show prints tables and documents such as JSON.
//   - dial (a connection to several endpoints), account (the file of saved logins), explain (error texts), console
//     (filter for guests' serial output), openid (login with an OpenID provider) and terminal (prompts) contain no
//     commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/cluster"
	"github.com/trivet-cloud/trivet/cli/identity"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/instancetype"
	"github.com/trivet-cloud/trivet/cli/kv"
	"github.com/trivet-cloud/trivet/cli/login"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/terminal"
	"github.com/trivet-cloud/trivet/cli/version"
	"github.com/trivet-cloud/trivet/cli/vm"
	"github.com/trivet-cloud/trivet/cli/volume"
	"github.com/trivet-cloud/trivet/cli/wallet"
	buildversion "github.com/trivet-cloud/trivet/shared/version"
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
			sh.Edit = func(ctx context.Context, path string) error { return terminal.Edit(ctx, os.Getenv, path) }
		}
	}
	// Stop catching signals after the first one, so that a second interrupt ends the program at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, sh))
}

// run executes the command line in sh.Args and returns the exit code of the program.
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

A VM, image or host is given by its name or ID.

Exit codes: 0 success, 2 invalid command line or argument, 3 not found, 4 already exists, 5 refused (no permission, a
state that does not allow it, a quota), 6 unreachable, 7 timed out, 130 interrupted, 1 other failure.`,
		Version:       buildversion.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	s := session.New(sh, root)
	root.AddCommand(login.Commands(s)...)
	root.AddCommand(identity.Commands(s)...)
	// Errors are ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a completion.
	_ = root.RegisterFlagCompletionFunc("org", identity.OrgNames(s))
	_ = root.RegisterFlagCompletionFunc("project", identity.ProjectNames(s))
	root.AddCommand(apply.Command(s, "vm", append(network.Kinds(), volume.Kind(), vm.Kind())...))
	root.AddCommand(image.Command(s), vm.Command(s), volume.Command(s), volume.SnapshotCommand(s), volume.ClassCommand(s), instancetype.Command(s), network.Command(s), node.Command(s), wallet.Command(s), kv.Command(s), cluster.Command(s),
		version.Command(s))
	s.Finish(root)
	arrangeHelp(root)
	return s, root
}
