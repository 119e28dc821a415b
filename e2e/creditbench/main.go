// Command creditbench measures two-phase transfers of credit (reserve, then commit) of one member beside the same as
// transactions of one PostgreSQL on the same disk, three members for the record, and the judging of tokens beside the
// libraries of others. It prints a table; BENCHMARKS.md holds what came of it and why.
//
// Both kinds take their turn in each round, the other one first each time, and never run at the same time; each turn
// starts from empty directories. How many callers ask at once is looked for in the first round, by one rule for all: of 2,
// 4, 16, 64 and 256 the fewest with 95 % of the highest rate. After the load each ledger is recomputed, and its sums must be
// those of the pairs that were answered: a turn in which they are not is a failure, and no figure of it counts.
//
// Everything runs in namespaces of its own (network, mounts, IPC, processes), as root: what is started ends with this
// program, however that ends. Nothing here asserts a time: a figure that misses its target is a row that says so.
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

	"github.com/trivet-cloud/trivet/e2e/creditbench/postgres"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// runWithin bounds a whole run.
const runWithin = 30 * time.Minute

// bench is one run.
type bench struct {
	bin, postgres, identity string // programs
	extra                   []string
	// dir holds everything of this run and is removed at its end.
	dir      string
	parts    []string
	kinds    []string // of banks
	rounds   int
	quick    bool
	patience time.Duration // left; see usage.AwaitCalm
	profile  string

	size     size
	callers  map[string]int // by row and kind; see turn.sweep
	results  results
	failures []string
}

func say(format string, args ...any) {
	fmt.Printf("%s  %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}

func main() {
	b := bench{results: results{}, callers: map[string]int{}}
	var work, out, run, only, extra string
	flag.StringVar(&b.bin, "bin", "bin", "`directory` of our programs")
	flag.StringVar(&b.postgres, "postgres", "/usr/lib/postgresql/15/bin", "`directory` of PostgreSQL's programs")
	flag.StringVar(&b.identity, "identity", ".build/identity.test", "`file` with the tests of controlplane/accounts/identity")
	flag.StringVar(&extra, "flags", "", "more `flags` of our members, separated by spaces")
	flag.StringVar(&work, "work", ".build", "`directory` on the disk to measure on")
	flag.StringVar(&out, "out", ".build/bench-credit.md", "`file` for the table")
	flag.StringVar(&run, "run", strings.Join(partNames, ","), "`parts` to run")
	flag.StringVar(&only, "only", strings.Join(kindNames, ","), "`kinds` of banks to measure")
	flag.IntVar(&b.rounds, "rounds", 5, "rounds")
	flag.BoolVar(&b.quick, "quick", false, "one round, a tenth of the work: to see that everything works, not for figures")
	flag.DurationVar(&b.patience, "patience", 2*time.Minute, "how long to wait, in all, for others on this machine to leave it alone")
	flag.StringVar(&b.profile, "perf", "", "write perf profiles of the servers in the first round to `file`.ROW.KIND")
	flag.Parse()
	if !lab.Inside() {
		os.Exit(lab.Again(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID))
	}
	b.parts, b.kinds, b.extra = strings.Split(run, ","), strings.Split(only, ","), strings.Fields(extra)
	b.size = sizes[b.quick]
	if b.quick {
		b.rounds = 1
	}
	if err := b.main(work, out); err != nil {
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

// enter makes the namespaces fit to live in.
func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Our own processes, and PostgreSQL's shared memory.
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
	text := facts + "\n" + b.text()
	fmt.Print("\n", text)
	if err := os.WriteFile(out, []byte(text), 0o644); err != nil {
		return err
	}
	if len(b.failures) > 0 {
		return fmt.Errorf("%d turns failed", len(b.failures))
	}
	return nil
}

// text is everything that was found.
func (b *bench) text() string {
	var all []verdict.Row
	text := ""
	for _, t := range tables {
		if rows := b.results.rows(t, b.parts, b.callers); len(rows) > 0 {
			text += "\n" + verdict.Markdown(t.peer, rows)
			all = append(all, rows...)
		}
	}
	text += "\n" + verdict.Summary(all) + "\n"
	if b.quick {
		text += "\n**A quick run: a tenth of what the lines say. The figures are not to be used.**\n"
	}
	if b.patience <= 0 {
		text += "\n**Others used this machine all the while: the figures say more about them than about us.**\n"
	}
	for _, f := range b.failures {
		text += "\n- failed: " + f
	}
	return text
}

// version is PostgreSQL's, with what it is told.
func (b *bench) version(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, filepath.Join(b.postgres, "postgres"), "--version").Output()
	if err != nil {
		return "PostgreSQL is missing: " + err.Error()
	}
	return strings.TrimSpace(string(out)) + " with " + postgres.Settings()
}
