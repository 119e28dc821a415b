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

// calm is a fraction of one CPU. The machine must use less than that before a round starts, and other processes must
// use less than that on average during a run. calmFor is the time over which the use is measured before a round.
const calm, calmFor = 0.25, 500 * time.Millisecond

// Calm waits until the machine is idle before each round of a benchmark (Await), and determines whether other processes
// disturbed the run (Disturbed). A benchmark must not use the figures of a disturbed run.
//
// Other processes are those that existed when the Calm was created, except this process and kernel threads. The CPU
// time of a child counts for its parent when the parent has waited for it. For PID 1 it is not counted, because PID 1
// also waits for orphans of the benchmark.
type Calm struct {
	patience time.Duration
	waited   bool // set when Await gave up because patience was used up
	proc     fs.FS
	others   map[int]process
	began    time.Time
}

// process identifies a process and holds the CPU time that it has used.
type process struct {
	started uint64 // start time in ticks since boot; differs from that of a later process with the same PID
	cpu     time.Duration
}

// NewCalm returns a Calm whose calls of Await wait no longer than patience in total. It opens /proc now, so that it
// sees the same processes even if the program mounts another /proc later.
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

// Await waits until the machine is idle, before a round. If the machine is still busy when patience is used up, Await
// returns nil, and Disturbed reports that later. Await returns an error if ctx ends.
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

// Disturbed returns the reason why the figures of the run so far must not be used, or "" if there is none.
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

// used returns the sum of the CPU time that processes have used between two samples. It counts only the processes that
// are in both samples, before and now.
func used(before, now map[int]process) (sum time.Duration) {
	for pid, p := range before {
		if q, ok := now[pid]; ok && q.started == p.started {
			sum += q.cpu - p.cpu
		}
	}
	return sum
}

// processes returns all processes in proc by PID, except kernel threads.
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

// kernelThread is the flag PF_KTHREAD of the kernel's include/linux/sched.h, which marks kernel threads.
const kernelThread = 0x200000

// parseProcess parses text, the content of /proc/PID/stat. thread is true if the process is a kernel thread.
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
	// Indexes of the fields after the name: flags 6, utime 11, stime 12, cutime 13, cstime 14, starttime 19.
	ticks := number(11) + number(12)
	if pid != 1 {
		ticks += number(13) + number(14)
	}
	p = process{started: number(19), cpu: time.Duration(ticks) * tick}
	return p, number(6)&kernelThread != 0, err
}
