// Command trivet-nodeagent runs the virtual machines of one host, as the control plane wants them.
//
// It is the only privileged program of Trivet. It dials the control plane and opens no port that could command it:
// /metrics and /health are all that it serves. Guests outlive it.
//
// run.go builds everything from bottom to top and is the only file that knows all packages; config.go is what an
// operator can say. Under the name of a first argument that is none of an operator's ([launchGuest]) the program is the
// moment between the agent and a QEMU: see package qemu.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
)

// launchGuest is the first argument that makes this program the launcher of a QEMU.
const launchGuest = "launch-guest"

// stopWithin is how long an orderly stop may take. What is under way then is left as after a crash, which every part
// is made for.
const stopWithin = 9 * time.Second

func main() {
	if len(os.Args) > 1 && os.Args[1] == launchGuest {
		qemu.LauncherMain()
	}
	os.Exit(start(os.Args[1:]))
}

// start is the program; it returns its exit code.
func start(args []string) int {
	config, err := load(args, os.LookupEnv, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
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
		log.Warn("something under way did not end in time; it is left as it is")
		os.Exit(0)
	})
	if err := run(ctx, config, log); err != nil {
		log.Error("the agent ends", "err", err)
		return 1
	}
	return 0
}

// logger is JSON under systemd, which takes lines for the journal and sets JOURNAL_STREAM, and text elsewhere.
func logger(format string, out io.Writer) *slog.Logger {
	if _, journal := os.LookupEnv("JOURNAL_STREAM"); format == "json" || format == "" && journal {
		return slog.New(slog.NewJSONHandler(out, nil))
	}
	return slog.New(slog.NewTextHandler(out, nil))
}

// version is what the Go tool recorded of the source.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
