// Command migrationbench measures live migrations between two hosts of a whole cloud of the real programs on this
// machine. In the same run it moves the same guest with two alternatives: QEMU started by hand, and `virsh migrate` of
// libvirt. It prints tables and writes them as Markdown; BENCHMARKS.md explains what is measured.
//
// The measurements, by the names that -run accepts:
//
//   - local: the guest's disk is a file of the host, which is copied.
//   - shared: the guest's disk is a volume in a directory that both hosts share.
//
// Each moves idle guests of 256 MiB and of 1 GiB. All guests run under QEMU's emulation (TCG), where Trivet stops a guest
// before it sends the memory. QEMU by hand is measured in both ways: the guest stopped first, and running.
//
// Hosts of Trivet are network namespaces. Trivet and its peers are measured one after the other, and the order changes
// from round to round. Everything runs as root in namespaces of its own (network, mount, IPC, PID), so that all processes
// and namespaces end with this program. The exit code does not depend on times.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/bench/program"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin is the timeout of a complete run, partWithin that of one part, and moveWithin that of one move.
const runWithin, partWithin, moveWithin = 30 * time.Minute, 12 * time.Minute, 2 * time.Minute

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin   lab.Binaries
	guest string // directory of the small guest
	// dir holds all files of this run and is removed at its end.
	dir    string
	parts  []string
	rounds int

	results table.Figures
}

func partNames() (names []string) {
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == secondCommand {
		os.Exit(secondMain(os.Args[2:]))
	}
	b := bench{results: table.Figures{}}
	var bin, work, out, run string
	var patience time.Duration
	flag.StringVar(&bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.guest, "guest", ".build/guest", "`directory` of the small guest")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-migration.md", "`file` for the tables")
	flag.StringVar(&run, "run", strings.Join(partNames(), ","), "`parts` to run")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds")
	flag.BoolVar(&b.Quick, "quick", false, "one round: to see that everything works, not for figures")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(again())
	}
	if lab.IsInit() {
		// Reap child processes as process 1. Otherwise libvirt waits 40 s for each QEMU process that it has killed.
		os.Exit(lab.Init())
	}
	b.parts = strings.Split(run, ",")
	if b.Quick {
		b.rounds, patience = 1, 0
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(bin, work, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "migrationbench:", err)
		os.Exit(1)
	}
}

// again runs this program once more in new namespaces, and returns its exit code.
func again() int {
	undo, err := libvirt.Prepare()
	if err != nil {
		fmt.Fprintln(os.Stderr, "migrationbench:", err)
		return 1
	}
	defer undo()
	return lab.Again(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID)
}

func (b *bench) main(bin, work, out string) (err error) {
	// Child processes are killed when the thread that has started them ends. The main thread does not end.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := program.Check(b.parts, partNames(), b.rounds); err != nil {
		return err
	}
	r, err := program.Open(program.Options{
		Name: "migrationbench", Work: work, Paths: []*string{&bin, &out, &b.guest},
		// /proc must show the processes of this PID namespace.
		Mounts: map[string]string{"/proc": "proc"}, Within: runWithin,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := libvirt.Mount(); err != nil {
		return err
	}
	b.bin, b.dir = lab.In(bin), r.Dir
	facts := usage.Machine(b.dir, versions(r.Context)...)
	fmt.Println(facts)
	if err := b.run(r.Context); err != nil {
		return err
	}
	unusable, err := b.Unusable()
	if err != nil {
		return err
	}
	text := facts + "\n" + b.results.Text(tables(), b.parts, unusable) + b.Remark(unusable) + "\n"
	return b.Write(out, text, unusable, "parts")
}

// run starts the cloud and the peers, and runs the selected parts. It returns an error only if one of these does not
// start or stop, or if ctx ends.
func (b *bench) run(ctx context.Context) (err error) {
	trivet, err := newOurs(ctx, b)
	if err != nil {
		return fmt.Errorf("start the cloud: %w", err)
	}
	defer func() { err = errors.Join(err, trivet.close()) }()
	peers, err := newPeers(ctx, b)
	if err != nil {
		return fmt.Errorf("start the peers: %w", err)
	}
	defer func() { err = errors.Join(err, peers.close()) }()
	for _, k := range kinds {
		if !slices.Contains(b.parts, k.name) {
			continue
		}
		err := b.RunPart(ctx, k.name, partWithin, func(ctx context.Context) error {
			for _, size := range sizes {
				if err := b.measure(ctx, k.name, size, trivet, peers); err != nil {
					return fmt.Errorf("guests of %d MiB: %w", size, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// move holds the measurements of one migration. paused is 0 if it is not known.
type move struct{ total, blackout, paused time.Duration }

// mover is a guest that runs on one of two hosts.
type mover interface {
	// address returns the IP address of the guest.
	address() string
	// migrate moves the guest to the other host. It returns when the guest runs there.
	migrate(ctx context.Context) (move, error)
	// close ends the guest.
	close(ctx context.Context) error
}

// measure boots a guest of Trivet and one for each peer, moves each in each round, and adds the figures.
func (b *bench) measure(ctx context.Context, kind string, size int, trivet *ours, p *peers) (err error) {
	ways := []struct {
		peer string
		near neighbour
		boot func(ctx context.Context, kind string, size int) (mover, error)
	}{
		{"", trivet.neighbour, trivet.boot},
		{byHand, p.neighbour, p.bootStopped},
		{byHandLive, p.neighbour, p.bootLive},
		{byVirsh, p.neighbour, p.bootVirsh},
	}
	var measures []func(int) error
	for _, w := range ways {
		guest, err := w.boot(ctx, kind, size)
		if err != nil {
			return fmt.Errorf("boot %s: %w", nameOf(w.peer), err)
		}
		defer func() { err = errors.Join(err, guest.close(context.WithoutCancel(ctx))) }()
		measures = append(measures, func(round int) error {
			ctx, cancel := context.WithTimeout(ctx, moveWithin)
			defer cancel()
			var m move
			blackout, err := w.near.blackoutOf(ctx, guest.address(), func() (err error) {
				m, err = guest.migrate(ctx)
				return err
			})
			if err != nil {
				return fmt.Errorf("%s: %w", nameOf(w.peer), err)
			}
			m.blackout = blackout
			add(b.results, w.peer, kind, size, m)
			report.Say("%s, %s, %d MiB: %.0f ms, blackout %.0f ms, paused %.0f ms", nameOf(w.peer), kind, size,
				milliseconds(m.total), milliseconds(m.blackout), milliseconds(m.paused))
			return nil
		})
	}
	return b.InTurn(ctx, b.rounds, measures...)
}

// nameOf returns the name of a peer for messages; "" is Trivet.
func nameOf(peer string) string {
	if peer == "" {
		return "Trivet"
	}
	return peer
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// versions returns the versions of the peers. A program that is missing is left out.
func versions(ctx context.Context) (all []string) {
	for _, line := range []string{"qemu-system-x86_64 --version", "virsh --version"} {
		words := strings.Fields(line)
		if out, err := exec.CommandContext(ctx, words[0], words[1:]...).Output(); err == nil {
			first, _, _ := strings.Cut(string(out), "\n")
			if words[0] == "virsh" {
				first = "libvirt " + first
			}
			all = append(all, strings.TrimSpace(first))
		}
	}
	return all
}
