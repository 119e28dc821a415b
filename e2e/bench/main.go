// Command bench measures a whole cloud of the real programs on this host, and in the same run two alternatives: QEMU
// started by hand, and libvirt. It prints a table and writes it as Markdown; BENCHMARKS.md holds and explains the
// results.
//
// The measurements, by the names that -run accepts:
//
//   - start: the time from StartVm until the guest prints that it is ready on its serial port, compared with QEMU
//     started by hand with the agent's arguments, and with `virsh create`.
//   - burst: 20 VMs created and started at once, compared with 20 times `qemu-img create` and `virsh create`; then the
//     memory and CPU of the agent while the VMs idle.
//   - api: the latency of the API with 20,000 VMs in the store and 1,000 requests per second in an open loop, with and
//     without a host that does not respond.
//   - rate: 100 VMs with blank disks created and started at 10 per second, compared with `qemu-img create` and `virsh
//     create`. Only if -run names it.
//   - scale: 1,250 simulated hosts with 20,000 running VMs: the CPU and memory of the members, and the latency of the
//     API while 50 of the hosts die at once, until their VMs run on other hosts. Only if -run names it.
//
// Everything runs as root in its own network and mount namespaces, so it works beside a running cloud and leaves
// nothing behind. Rounds of Trivet and of the alternatives alternate, and medians are compared, because other load on
// the host slows down all of them. The exit code does not depend on times: a figure that misses its target appears as
// missed in the table.
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
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin is the timeout of a complete run, which takes about 12 minutes on two otherwise idle cores.
const runWithin = 25 * time.Minute

// parts lists the measurements that -run can select, in the order in which they run.
var parts = []struct {
	name string
	run  func(context.Context, *bench) error
}{{"start", start}, {"burst", burst}, {"api", api}, {"rate", steadyRate}, {"scale", scale}}

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin   lab.Binaries
	guest string
	// dir holds all files of this run and is removed at its end.
	dir  string
	rows []figure.Row

	rounds, vms, hosts, scaleHosts int
	load                           time.Duration
	profiles                       string
}

func (b *bench) row(r figure.Row) {
	b.rows = append(b.rows, r)
	// Print the row without its target: only at the end of the run is it known whether other load disturbed the run, in
	// which case no row gets a verdict.
	fmt.Print(figure.Markdown(figure.WithoutTargets(b.rows[len(b.rows)-1:])))
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == hostCommand {
		os.Exit(hostMain(os.Args[2:]))
	}
	var b bench
	var bin, work, out, run string
	var patience time.Duration
	flag.StringVar(&bin, "bin", "bin", "`directory` of the programs")
	flag.StringVar(&b.guest, "guest", ".build/guest", "`directory` of the small guest")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench.md", "`file` for the table")
	flag.StringVar(&run, "run", "start,burst,api", "`parts` to run")
	flag.IntVar(&b.rounds, "rounds", 11, "rounds of start")
	flag.IntVar(&b.vms, "vms", 20_000, "VMs recorded for api, or running for scale")
	flag.IntVar(&b.hosts, "hosts", 20, "simulated hosts for api")
	flag.IntVar(&b.scaleHosts, "scale-hosts", 1250, "simulated hosts for scale; 50 of them die")
	flag.DurationVar(&b.load, "load", 30*time.Second, "length of one run of load")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.StringVar(&b.profiles, "perf", "", "write a perf profile of the members under load to this `file`")
	flag.Parse()
	b.bin = lab.In(bin)
	if !lab.Inside() {
		os.Exit(again())
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(work, out, strings.Split(run, ","))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// again runs this program once more in new network and mount namespaces, and returns its exit code.
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
		report.Say("%s begins; load %s", p.name, usage.Load())
		if err := p.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		report.Say("%s took %.0f s", p.name, time.Since(began).Seconds())
	}
	unusable, err := b.Unusable()
	if err != nil {
		return err
	}
	rows := b.rows
	if unusable != "" {
		rows = figure.WithoutTargets(rows)
	}
	return b.Write(out, facts+"\n\n"+figure.Markdown(rows)+b.Remark(unusable), unusable, "parts")
}

// trivet is a running cloud, with the measurements of this program as methods.
type trivet struct{ *onehost.Cloud }

// newCloud starts three members, with their files in the directory name beneath the run's directory, and waits until
// they are ready.
func newCloud(ctx context.Context, b *bench, name string) (*trivet, error) {
	c, err := onehost.Start(ctx, filepath.Join(b.dir, name), b.bin)
	return &trivet{c}, err
}
