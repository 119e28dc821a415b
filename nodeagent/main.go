// Command trivet-nodeagent runs the virtual machines that the control plane assigns to this host.
//
// It is the only privileged program of Trivet. It connects to the control plane and accepts no commands from the
// network: it serves only /metrics and /health. Guests keep running when it stops.
//
// run.go constructs all parts in dependency order and is the only file that imports all packages; config.go defines the
// settings. If the first argument is [launchGuest], which the agent itself passes, the program acts as the launcher
// that sets up a process and executes QEMU: see package qemu. With [guardLease] it acts as the guard process,
// and with [migrationTunnel] as the tunnel process of a migration: see package tunnel.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	"github.com/trivet-cloud/trivet/shared/version"
)

// launchGuest is the first argument that makes this program act as the launcher of one QEMU.
const launchGuest = "launch-guest"

// stopWithin is the maximum duration of an orderly stop. After it the program exits. The next start recovers operations
// that were in progress, as after a crash.
const stopWithin = 9 * time.Second

func main() {
	if len(os.Args) > 1 && os.Args[1] == launchGuest {
		qemu.LauncherMain()
	}
	if len(os.Args) > 1 && os.Args[1] == guardLease {
		os.Exit(guardMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == migrationTunnel {
		os.Exit(tunnel.Main())
	}
	os.Exit(start(os.Args[1:]))
}

// start runs the program and returns its exit code.
func start(args []string) int {
	config, err := load(args, os.LookupEnv, os.Stderr)
	switch {
	case errors.Is(err, errVersion):
		fmt.Println(version.Read().Line("trivet-nodeagent"))
		return 0
	case errors.Is(err, pflag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(os.Stderr, "trivet-nodeagent:", err)
		return 2
	}
	log := logger(config.LogFormat, os.Stderr)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, func() {
		stop() // a second signal ends the program at once
		time.Sleep(stopWithin)
		log.Warn("work in progress did not end in time and was abandoned")
		os.Exit(0)
	})
	if err := run(ctx, config, log); err != nil {
		log.Error("agent failed", "err", err)
		return 1
	}
	return 0
}

// logger returns a logger that writes in the given format, json or text. If format is empty, it writes JSON under
// systemd, which sets JOURNAL_STREAM, and text elsewhere.
func logger(format string, out io.Writer) *slog.Logger {
	if _, journal := os.LookupEnv("JOURNAL_STREAM"); format == "json" || format == "" && journal {
		return slog.New(slog.NewJSONHandler(out, nil))
	}
	return slog.New(slog.NewTextHandler(out, nil))
}
