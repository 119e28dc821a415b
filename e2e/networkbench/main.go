// Command networkbench measures the network service: the agent's code on a host (packet filter, ports, CPU per packet,
// throughput), compared with plain Linux that is configured by hand and with smaller VPCs, and the control plane with
// many ports on simulated hosts. It prints tables and writes them as Markdown; BENCHMARKS.md holds the results and
// explains them.
//
// Trivet and its peer are measured one after the other, never at the same time, and the order changes from round to
// round. Hosts are network namespaces. Their endpoints are namespaces too, attached by the agent's code as containers
// are, except in the part guests, whose endpoints are VMs.
//
// Everything runs as root in its own namespaces (network, mount, IPC, PID), so that all processes, devices and
// namespaces end with this program, however it ends. The exit code does not depend on times: a figure that misses its
// target appears as missed in the table.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/program"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// runWithin is the timeout of a complete run, and partWithin that of one part.
const runWithin, partWithin = 30 * time.Minute, 8 * time.Minute

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin, guest string // the values of the flags of these names
	// dir holds all files of this run and is removed at its end.
	dir    string
	parts  []string
	rounds int

	size    size
	results table.Figures
}

// size is the amount of work of a run.
type size struct {
	rules      int // that are applied at once
	samples    int // calls of iptables for each size of the table
	ports      int // on one host, in the larger VPC
	few        int // ports on one host, in the smaller VPC
	members    int // of the larger remote group
	changes    int // that are timed in a round
	attached   int // ports that are attached in a round
	batch      int // packets of a batch
	batches    int // in a round
	stream     time.Duration
	megabytes  int // that a guest sends
	hosts      int // that are simulated
	vpcPorts   int // in the VPC of the control plane
	rate       int // creates per second
	rated      time.Duration
	singles    int // creates that are made one by one, to count messages
	agentPorts int
	watched    time.Duration // how long the agent's CPU time is counted
}

// sizes holds the amounts of work of a normal run (false) and of a run with the flag -quick (true).
var sizes = map[bool]size{
	false: {
		rules: 10_000, samples: 50, ports: 1000, few: 100, members: 10_000, changes: 10, attached: 100,
		batch: 20_000, batches: 10, stream: 3 * time.Second, megabytes: 128, hosts: 50, vpcPorts: 10_000, rate: 50, rated: 8 * time.Second, singles: 50,
		agentPorts: 1000, watched: 65 * time.Second,
	},
	true: {
		rules: 1000, samples: 5, ports: 100, few: 10, members: 1000, changes: 3, attached: 10, batch: 2000, batches: 3,
		stream: time.Second, megabytes: 8, hosts: 8, vpcPorts: 500, rate: 50, rated: 2 * time.Second, singles: 5,
		agentPorts: 20, watched: 33 * time.Second,
	},
}

// parts holds all parts in the order in which they run.
var parts = []struct {
	name string
	run  func(context.Context, *bench) error
}{
	{"rules", measureRules},
	{"attach", measureAttach},
	{"packets", measurePackets},
	{"streams", measureStreams},
	{"guests", measureGuests},
	{"agent", measureAgent},
	{"controlplane", measureControlPlane},
}

func partNames() (names []string) {
	for _, p := range parts {
		names = append(names, p.name)
	}
	return names
}

func main() {
	if len(os.Args) > 1 && children[os.Args[1]] != nil {
		os.Exit(runChild(os.Args[1], os.Args[2:]))
	}
	b := bench{results: table.Figures{}}
	var work, out, run string
	var patience time.Duration
	flag.StringVar(&b.bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.guest, "guest", ".build/guest", "`directory` of the small guest")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-network.md", "`file` for the tables")
	flag.StringVar(&run, "run", strings.Join(partNames(), ","), "`parts` to run")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds")
	flag.BoolVar(&b.Quick, "quick", false, "one round, a tenth of the work: to see that everything works, not for figures")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(lab.Again(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID))
	}
	b.parts, b.size = strings.Split(run, ","), sizes[b.Quick]
	if b.Quick {
		b.rounds = 1
		patience = 0
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(work, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "networkbench:", err)
		os.Exit(1)
	}
}

func (b *bench) check() error { return program.Check(b.parts, partNames(), b.rounds) }

func (b *bench) main(work, out string) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	r, err := program.Open(program.Options{
		Name: "networkbench", Work: work, Paths: []*string{&out, &b.bin, &b.guest},
		// /proc must show the processes of this PID namespace, and the namespaces of the run end with their mounts.
		Mounts: map[string]string{"/proc": "proc", nsthread.Dir: "tmpfs"}, Within: runWithin,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	b.dir = r.Dir
	facts := usage.Machine(b.dir, versions(r.Context)...)
	fmt.Println(facts)
	if err := b.run(r.Context); err != nil {
		return err
	}
	return b.report(facts, out)
}

// run runs the selected parts. It returns an error only if ctx ends.
func (b *bench) run(ctx context.Context) error {
	for _, part := range parts {
		if !slices.Contains(b.parts, part.name) {
			continue
		}
		err := b.RunPart(ctx, part.name, partWithin, func(ctx context.Context) error { return part.run(ctx, b) })
		if err != nil {
			return err
		}
	}
	return nil
}

// report prints the tables and writes them to the file out.
func (b *bench) report(facts, out string) error {
	unusable, err := b.Unusable()
	if err != nil {
		return err
	}
	text := facts + "\n" + b.text(unusable)
	return b.Write(out, text, unusable, "parts")
}
