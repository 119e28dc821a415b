// Command kvbench measures, in one run, the key-value store of three Trivet members and that of three etcd servers, and
// prints a table that compares them. BENCHMARKS.md holds the results and explains them.
//
// figures.go lists the measurements. They are made in groups; for each group, the servers are started once per round,
// with empty directories. In each round, Trivet and etcd run one after the other, in alternating order and never at the
// same time, so that background work of one does not slow down the other. The load comes from etcd's own program
// `benchmark` where that can express the measurement.
//
// Everything runs as root in its own network and mount namespaces, on 127.0.0.1 to .3, and leaves nothing behind. The
// exit code does not depend on times: a figure that misses its target appears as missed in the table.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin is the timeout of a complete run.
const runWithin = 4 * time.Hour

// The two kinds of servers that are compared, as named by the flag -only and in the results.
const (
	ours = "trivet"
	etcd = "etcd"
)

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin, etcd string // the directories of Trivet's and of etcd's programs
	extra     []string
	// dir holds all files of this run and is removed at its end.
	dir     string
	wanted  []string // the names of the rows to measure, of those that rowNames returns
	kinds   []string
	rounds  int
	profile string

	results results
}

func main() {
	b := bench{results: results{}}
	var work, out, run, only, extra string
	var patience time.Duration
	flag.StringVar(&b.bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.etcd, "etcd", ".build/etcd", "`directory` of etcd and benchmark")
	flag.StringVar(&extra, "flags", "", "more `flags` of our members, separated by spaces")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-kv.md", "`file` for the table")
	flag.StringVar(&run, "run", strings.Join(rowNames(), ","), "`rows` to measure")
	flag.StringVar(&only, "only", ours+","+etcd, "`kinds` to measure")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds of the rows that take seconds; those that load gigabytes have their own number, at most this")
	flag.BoolVar(&b.Quick, "quick", false, "one round, a tenth of the work: to see that everything works, not for figures")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.StringVar(&b.profile, "perf", "", "write perf profiles of the servers in the first round to `file`.ROW.KIND")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(lab.Again(unix.CLONE_NEWNS))
	}
	b.wanted, b.kinds, b.extra = strings.Split(run, ","), strings.Split(only, ","), strings.Fields(extra)
	if b.Quick {
		b.rounds = 1
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(work, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvbench:", err)
		os.Exit(1)
	}
}

func (b *bench) check() error {
	for _, row := range b.wanted {
		if !slices.Contains(rowNames(), row) {
			return fmt.Errorf("no row %q; there are %s", row, strings.Join(rowNames(), ", "))
		}
	}
	for _, kind := range b.kinds {
		if kind != ours && kind != etcd {
			return fmt.Errorf("no kind %q; there are %s and %s", kind, ours, etcd)
		}
	}
	if b.rounds < 1 {
		return errors.New("one round at least")
	}
	return nil
}

func (b *bench) main(work, out string) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, runWithin)
	defer cancel()
	// Keep later mounts from propagating to other mount namespaces.
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := lab.Loopback(); err != nil {
		return err
	}
	for _, path := range []*string{&work, &out, &b.bin, &b.etcd, &b.profile} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if b.dir, err = os.MkdirTemp(work, "kvbench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if err := os.Chmod(b.dir, 0o755); err != nil {
		return err
	}
	facts := usage.Machine(b.dir, b.version(ctx))
	fmt.Println(facts)
	for _, g := range groups {
		if !g.wanted(b) {
			continue
		}
		if err := b.runGroup(ctx, g); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
	}
	rows := b.results.rows(b.wanted)
	unusable, err := b.Unusable()
	if err != nil {
		return err
	}
	text := facts + "\n\n"
	if unusable == "" {
		text += verdict.Markdown(etcd, rows) + "\n" + verdict.Summary(rows) + "\n"
	} else {
		text += verdict.Markdown(etcd, verdict.WithoutTargets(rows))
	}
	text += b.Remark(unusable)
	return b.Write(out, text, unusable, "turns")
}

// version returns the first line of the output of `etcd --version`, or a text that says why there is none.
func (b *bench) version(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, filepath.Join(b.etcd, "etcd"), "--version").Output()
	if err != nil {
		return "etcd is missing: " + err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}
