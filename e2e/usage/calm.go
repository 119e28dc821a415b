package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"
)

// calm is the largest share of one CPU that other processes may use before a round and, on average, during a run;
// calmFor is the time over which it is measured before a round.
const calm, calmFor = 0.25, 500 * time.Millisecond

// Calm waits for an idle machine before each round of a benchmark and finds out whether other processes disturbed the
// run. A benchmark gives no verdict on a disturbed run.
//
// The other processes are those that existed when the Calm was made, without this process and the kernel's threads.
// What their children use is counted when they wait for them, except for PID 1, which also waits for orphans of the
// benchmark.
type Calm struct {
	patience time.Duration
	waited   bool // patience was used up
	proc     fs.FS
	others   map[int]process
	began    time.Time
}

// process identifies a process and holds the CPU time that it has used.
type process struct {
	started uint64 // ticks after the kernel's start; tells a process from a later one with the same PID
	cpu     time.Duration
}

// NewCalm returns a Calm that waits no longer than patience, summed over all rounds. It reads /proc as mounted at the
// time of the call, also if another /proc is mounted later.
func NewCalm(patience time.Duration) (*Calm, error) {
	proc, err := os.OpenRoot("/proc")
	if err != nil {
		return nil, err
	}
	self, err := proc.Readlink("self")
	if err != nil {
		return nil, err
	}
	c := &Calm{patience: patience, proc: proc.FS(), began: time.Now()}
	if c.others, err = processes(c.proc); err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(self)
	delete(c.others, pid)
	return c, err
}

// Await returns when the machine is idle, at once if no patience is left, or with an error when ctx ends.
func (c *Calm) Await(ctx context.Context) error {
	for c.patience > 0 {
		began := time.Now()
		before, err := Busy()
		if err != nil {
			return err
		}
		select {
		case <-time.After(calmFor):
		case <-ctx.Done():
			return ctx.Err()
		}
		after, err := Busy()
		if err != nil {
			return err
		}
		if (after - before).Seconds() < calm*time.Since(began).Seconds() {
			return nil
		}
		c.patience -= time.Since(began)
	}
	c.waited = true
	return nil
}

// Disturbed returns why the figures of the run so far must not be used, or "" if they may.
func (c *Calm) Disturbed() (string, error) {
	now, err := processes(c.proc)
	if err != nil {
		return "", err
	}
	if share := used(c.others, now).Seconds() / time.Since(c.began).Seconds(); share >= calm {
		return fmt.Sprintf("other processes used %.0f %% of a core during the run", 100*share), nil
	}
	if c.waited {
		return "the machine was not idle before a round", nil
	}
	return "", nil
}

// used returns the CPU time that the processes of before have used until now. A process that ended is not counted.
func used(before, now map[int]process) (sum time.Duration) {
	for pid, p := range before {
		if q, ok := now[pid]; ok && q.started == p.started {
			sum += q.cpu - p.cpu
		}
	}
	return sum
}

// processes returns all processes but kernel threads.
func processes(proc fs.FS) (map[int]process, error) {
	entries, err := fs.ReadDir(proc, ".")
	if err != nil {
		return nil, err
	}
	found := map[int]process{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		text, err := fs.ReadFile(proc, e.Name()+"/stat")
		if err != nil {
			continue // the process has ended
		}
		p, thread, err := parseProcess(pid, string(text))
		if err != nil {
			return nil, fmt.Errorf("process %d: %w", pid, err)
		}
		if !thread {
			found[pid] = p
		}
	}
	return found, nil
}

// kernelThread is PF_KTHREAD of the kernel's include/linux/sched.h.
const kernelThread = 0x200000

// parseProcess parses /proc/PID/stat, and reports whether it is a kernel thread's.
func parseProcess(pid int, text string) (p process, thread bool, err error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return p, false, fmt.Errorf("%d fields after the name in stat", len(fields))
	}
	number := func(i int) uint64 {
		n, failed := strconv.ParseUint(fields[i], 10, 64)
		err = errors.Join(err, failed)
		return n
	}
	// Positions after the name: flags 6, utime 11, stime 12, cutime 13, cstime 14, starttime 19.
	ticks := number(11) + number(12)
	if pid != 1 {
		ticks += number(13) + number(14)
	}
	p = process{started: number(19), cpu: time.Duration(ticks) * tick}
	return p, number(6)&kernelThread != 0, err
}
