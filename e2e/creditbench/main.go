// Command creditbench measures charges in two steps, called pairs here: reserve credit, then commit the reservation. It
// measures one member, compared with the same steps as transactions of one PostgreSQL on the same disk, and three
// members without a comparison. It also measures the verification of tokens, compared with other libraries. It prints a
// table; BENCHMARKS.md holds the results and explains them.
//
// In each round the kinds of servers run one after the other, in alternating order and never at the same time; each
// starts with empty directories. The number of concurrent callers is chosen in the first round, by one rule for all
// kinds: of 2, 4, 16, 64 and 256, the smallest that reaches 95 % of the highest rate. After the load, the sums of each
// ledger are recomputed and must agree with the pairs that succeeded; otherwise the run fails and its figures are
// discarded.
//
// Everything runs as root in its own namespaces (network, mount, IPC, PID), so that all processes end with this
// program, however it ends. The exit code does not depend on times: a figure that misses its target appears as missed
// in the table.
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
	"github.com/trivet-cloud/trivet/e2e/creditbench/postgres"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin is the timeout of a complete run.
const runWithin = 30 * time.Minute

// bench holds the options and results of one run.
type bench struct {
	report.Run
	bin, postgres, identity string // the paths that the flags of these names give
	extra                   []string
	// dir holds all files of this run and is removed at its end.
	dir     string
	parts   []string
	kinds   []string // the kinds of banks to measure, of kindNames
	rounds  int
	profile string

	size    size
	callers map[string]int // the number of concurrent callers by row and kind, which turn.sweep chooses
	results results
}

func main() {
	b := bench{results: results{}, callers: map[string]int{}}
	var work, out, run, only, extra string
	var patience time.Duration
	flag.StringVar(&b.bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.postgres, "postgres", "/usr/lib/postgresql/15/bin", "`directory` of PostgreSQL's programs")
	flag.StringVar(&b.identity, "identity", ".build/identity.test", "`file` with the tests of controlplane/accounts/identity")
	flag.StringVar(&extra, "flags", "", "more `flags` of our members, separated by spaces")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-credit.md", "`file` for the table")
	flag.StringVar(&run, "run", strings.Join(partNames, ","), "`parts` to run")
	flag.StringVar(&only, "only", strings.Join(kindNames, ","), "`kinds` of banks to measure")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds")
	flag.BoolVar(&b.Quick, "quick", false, "one round, a tenth of the work: to see that everything works, not for figures")
	flag.DurationVar(&patience, "patience", 2*time.Minute, "how long to wait, over all rounds, for the machine to be idle")
	flag.StringVar(&b.profile, "perf", "", "write perf profiles of the servers in the first round to `file`.ROW.KIND")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(lab.Again(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID))
	}
	b.parts, b.kinds, b.extra = strings.Split(run, ","), strings.Split(only, ","), strings.Fields(extra)
	b.size = sizes[b.Quick]
	if b.Quick {
		b.rounds = 1
	}
	err := error(nil)
	if b.Calm, err = usage.NewCalm(patience); err == nil {
		err = b.main(work, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "creditbench:", err)
		os.Exit(1)
	}
}

func (b *bench) check() error {
	for _, part := range b.parts {
		if !slices.Contains(partNames, part) {
			return fmt.Errorf("no part %q; there are %s", part, strings.Join(partNames, ", "))
		}
	}
	for _, kind := range b.kinds {
		if !slices.Contains(kindNames, kind) {
			return fmt.Errorf("no kind %q; there are %s", kind, strings.Join(kindNames, ", "))
		}
	}
	if b.rounds < 1 {
		return errors.New("one round at least")
	}
	return nil
}

// enter prepares the new namespaces: it makes mounts private, mounts a new /proc and /dev/shm, and brings up lo.
func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// /proc must show the processes of this PID namespace, and PostgreSQL has its shared memory in /dev/shm.
	for dir, kind := range map[string]string{"/proc": "proc", "/dev/shm": "tmpfs"} {
		if err := unix.Mount(kind, dir, kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	return lab.Loopback()
}

func (b *bench) main(work, out string) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, runWithin)
	defer cancel()
	if err := enter(); err != nil {
		return err
	}
	for _, path := range []*string{&work, &out, &b.bin, &b.identity, &b.profile} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if b.dir, err = os.MkdirTemp(work, "creditbench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if err := os.Chmod(b.dir, 0o755); err != nil {
		return err
	}
	facts := usage.Machine(b.dir, b.version(ctx))
	fmt.Println(facts)
	if err := b.run(ctx); err != nil {
		return err
	}
	unusable, err := b.Unusable()
	if err != nil {
		return err
	}
	text := facts + "\n" + b.text(unusable)
	return b.Write(out, text, unusable, "turns")
}

// text returns the tables, a summary of the verdicts, and the failures. If unusable is not "", it is printed as the
// reason why there are no verdicts.
func (b *bench) text(unusable string) string {
	var all []verdict.Row
	text := ""
	for _, t := range tables {
		if rows := b.results.rows(t, b.parts, b.callers); len(rows) > 0 {
			if unusable != "" {
				rows = verdict.WithoutTargets(rows)
			}
			text += "\n" + verdict.Markdown(t.peer, rows)
			all = append(all, rows...)
		}
	}
	if unusable == "" {
		text += "\n" + verdict.Summary(all) + "\n"
	}
	return text + b.Remark(unusable)
}

// version returns the version of PostgreSQL and its non-default settings, or a text that says why there is none.
func (b *bench) version(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, filepath.Join(b.postgres, "postgres"), "--version").Output()
	if err != nil {
		return "PostgreSQL is missing: " + err.Error()
	}
	return strings.TrimSpace(string(out)) + " with " + postgres.Settings()
}
