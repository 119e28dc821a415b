// Command storagebench measures volumes and images of a whole cloud of the real programs on this host. In the same run
// it does the same work by hand, with QEMU, QMP, qemu-img and cp. It prints a table and writes it as Markdown;
// BENCHMARKS.md explains what is measured.
//
// The measurements, by the names that -run accepts:
//
//   - io: I/O inside a guest on a MANAGED volume, compared with a QEMU that was started by hand with the agent's
//     arguments.
//   - clone: a volume is made from an image and attached to a running guest, until the guest has read its first bytes,
//     compared with `qemu-img create -b` and QMP.
//   - attach: 20 volumes are attached at once to five running guests, and detached at once, compared with QMP.
//   - boot: 20 VMs are created and started at once. The disk of each is a new volume from the same image. Compared with
//     `qemu-img create -b` and a QEMU that is started by hand with the agent's arguments.
//   - resize: a volume grows while a guest uses it, compared with truncate and QMP.
//   - import: a VMDK image becomes an image of the cloud, compared with `qemu-img convert`.
//   - upload: `trivet image upload`, compared with cp and sha256sum.
//   - snapshot: copies of a volume of 1 GiB and of one of 20 GiB in use, compared with QMP.
//   - rbd: the measurements of io and clone, with a volume in a Ceph cluster of one monitor and one OSD, compared with
//     librbd in QEMU and with rbd(8).
//
// Trivet and its peer are measured one after the other, never at the same time, and the order changes from round to
// round. Everything runs as root in network and mount namespaces of its own, so it works beside a running cloud and
// leaves nothing behind. The exit code does not depend on times: a figure that misses its target appears as missed in
// the table.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/program"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin is the timeout of a complete run, and partWithin that of one part.
const runWithin, partWithin = 20 * time.Minute, 6 * time.Minute

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin   lab.Binaries
	guest string // directory of the small guest
	// rbdHelper is the path of the program trivet-rbd.
	rbdHelper string
	// dir holds all files of this run and is removed at its end.
	dir    string
	parts  []string
	rounds int

	size    size
	results table.Figures
}

// size is the amount of work of a run.
type size struct {
	randoms   int // random reads of a round; a fifth as many writes, each with a flush
	span      int // MiB of the volume that I/O uses
	passes    int // sequential passes over the span in a round
	attached  int // volumes that are attached at once, a multiple of guests
	booted    int // VMs that are started at once
	imageMiB  int // of the images that are imported and uploaded
	maxRounds int // of the parts other than io
}

// sizes holds the amounts of work of a normal run (false) and of a run with the flag -quick (true).
var sizes = map[bool]size{
	false: {randoms: 6000, span: 256, passes: 1, attached: 20, booted: 20, imageMiB: 256, maxRounds: 5},
	true:  {randoms: 1000, span: 16, passes: 1, attached: 20, booted: 20, imageMiB: 32, maxRounds: 1},
}

// parts holds all parts in the order in which they run.
var parts = []struct {
	name string
	run  func(context.Context, *site) error
}{
	{"io", measureIO},
	{"clone", measureClone},
	{"attach", measureAttach},
	{"boot", measureBoot},
	{"resize", measureResize},
	{"import", measureImport},
	{"upload", measureUpload},
	{"snapshot", measureSnapshot},
	{"rbd", measureRBD},
}

func partNames() (names []string) {
	for _, p := range parts {
		names = append(names, p.name)
	}
	return names
}

func main() {
	b := bench{results: table.Figures{}}
	var bin, work, out, run string
	var patience time.Duration
	flag.StringVar(&bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.guest, "guest", ".build/guest", "`directory` of the small guest")
	flag.StringVar(&b.rbdHelper, "rbd-helper", ".build/trivet-rbd", "`file` of the program trivet-rbd, for the part rbd")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-storage.md", "`file` for the table")
	flag.StringVar(&run, "run", strings.Join(partNames(), ","), "`parts` to run")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds; the parts other than io and rbd have five at most")
	flag.BoolVar(&b.Quick, "quick", false, "one round, less work: to see that everything works, not for figures")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(lab.Again(unix.CLONE_NEWNS))
	}
	b.parts, b.size = strings.Split(run, ","), sizes[b.Quick]
	if b.Quick {
		b.rounds = 1
		patience = 0
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(bin, work, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "storagebench:", err)
		os.Exit(1)
	}
}

func (b *bench) check() error { return program.Check(b.parts, partNames(), b.rounds) }

func (b *bench) main(bin, work, out string) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	r, err := program.Open(program.Options{
		Name: "storagebench", Work: work, Paths: []*string{&bin, &out, &b.guest, &b.rbdHelper}, Within: runWithin,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
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
	text := facts + "\n" + b.results.Text(tables, b.parts, unusable) + b.Remark(unusable) + "\n"
	return b.Write(out, text, unusable, "parts")
}

// run starts the cloud and runs the selected parts. It returns an error only if the cloud does not start or stop, or if
// ctx ends.
func (b *bench) run(ctx context.Context) (err error) {
	s, err := newSite(ctx, b)
	if err != nil {
		return fmt.Errorf("start the cloud: %w", err)
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, part := range parts {
		if !slices.Contains(b.parts, part.name) {
			continue
		}
		err := b.RunPart(ctx, part.name, partWithin, func(ctx context.Context) error { return part.run(ctx, s) })
		if err != nil {
			return err
		}
	}
	return nil
}

// versions returns the versions of the peers. A program that is missing is left out.
func versions(ctx context.Context) (all []string) {
	for _, program := range []string{"qemu-system-x86_64", "qemu-img"} {
		out, err := exec.CommandContext(ctx, program, "--version").Output()
		if err == nil {
			first, _, _ := strings.Cut(string(out), "\n")
			all = append(all, strings.TrimSpace(first))
		}
	}
	return all
}
