// Command bench measures a whole cloud of the real programs on this host, beside a peer in the same run: QEMU started by
// hand, and libvirt. It prints a table and writes it as Markdown; BENCHMARKS.md holds what came of it and why.
//
// What is measured, by the names that -run takes:
//
//   - start: from StartVm to the guest's banner on the serial port, against the agent's own arguments started by hand and
//     against `virsh create`.
//   - burst: 20 VMs created and started at once, against 20 times `qemu-img create` and `virsh create`; then what the
//     agent needs while they idle.
//   - api: 20,000 VMs recorded, 1,000 requests a second in an open loop, with and without a host that hangs.
//
// Everything runs in a network and a mount namespace of its own, so that it works beside a running cloud, as root; and
// nothing is left behind. Rounds of ours and of the peer alternate, and medians are compared: a host that is busy slows
// both. Nothing here asserts a time: a figure that misses its target is a row that says so.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin bounds a whole run, which takes about 12 minutes on two cores that do nothing else.
const runWithin = 25 * time.Minute

// parts in the order in which they run.
var parts = []struct {
	name string
	run  func(context.Context, *bench) error
}{{"start", start}, {"burst", burst}, {"api", api}}

// bench is one run.
type bench struct {
	bin   lab.Binaries
	guest string
	// dir holds everything of this run and is removed at its end.
	dir  string
	rows []figure.Row

	rounds, vms, hosts int
	load               time.Duration
	patience           time.Duration // left; see usage.AwaitCalm
	profiles           string
}

func (b *bench) row(r figure.Row) {
	b.rows = append(b.rows, r)
	fmt.Print(figure.Markdown(b.rows[len(b.rows)-1:]))
}

func say(format string, args ...any) {
	fmt.Printf("%s  %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == hostCommand {
		os.Exit(hostMain(os.Args[2:]))
	}
	var b bench
	var bin, work, out, run string
	flag.StringVar(&bin, "bin", "bin", "`directory` of the programs")
	flag.StringVar(&b.guest, "guest", ".build/guest", "`directory` of the small guest")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench.md", "`file` for the table")
	flag.StringVar(&run, "run", "start,burst,api", "`parts` to run")
	flag.IntVar(&b.rounds, "rounds", 11, "rounds of start")
	flag.IntVar(&b.vms, "vms", 20_000, "VMs recorded for api")
	flag.IntVar(&b.hosts, "hosts", 20, "simulated hosts for api")
	flag.DurationVar(&b.load, "load", 30*time.Second, "length of one run of load")
	flag.DurationVar(&b.patience, "patience", 2*time.Minute, "how long to wait, in all, for others on this machine to leave it alone")
	flag.StringVar(&b.profiles, "perf", "", "write a perf profile of the members under load to this `file`")
	flag.Parse()
	b.bin = lab.In(bin)
	if !lab.Inside() {
		os.Exit(again())
	}
	if err := b.main(work, out, strings.Split(run, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// again runs this program in namespaces of its own.
func again() int {
	undo, err := libvirt.Prepare()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	defer undo()
	return lab.Again(unix.CLONE_NEWNS)
}

func (b *bench) main(work, out string, wanted []string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, runWithin)
	defer cancel()
	if err := libvirt.Mount(); err != nil {
		return err
	}
	if err := lab.Loopback(); err != nil {
		return err
	}
	for _, path := range []*string{&work, &out, &b.guest} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if b.dir, err = os.MkdirTemp(work, "bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if err := os.Chmod(b.dir, 0o755); err != nil {
		return err
	}
	facts := machine(ctx, b.dir)
	fmt.Println(facts)
	for _, p := range parts {
		if !slices.Contains(wanted, p.name) {
			continue
		}
		began := time.Now()
		say("%s begins; load %s", p.name, usage.Load())
		if err := p.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		say("%s took %.0f s", p.name, time.Since(began).Seconds())
	}
	if b.patience <= 0 {
		say("others used this machine all the while: the figures say more about them than about us")
	}
	table := figure.Markdown(b.rows)
	fmt.Print("\n", table)
	return os.WriteFile(out, []byte(facts+"\n\n"+table), 0o644)
}
