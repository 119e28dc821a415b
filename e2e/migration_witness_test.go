package e2e

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
)

// witness watches a guest during a migration. The guest counts on its console, and writes numbers to its disk. After the
// disk has confirmed a flush, the guest prints the number on its console. QEMU writes the console to a file on the
// host. The files therefore show which host has run the guest, and which writes the disk has acknowledged. A number
// that is counted twice shows that the guest was continued from an old copy of its memory.
type witness struct {
	g    *faultyGuest
	end  context.CancelFunc
	done sync.WaitGroup
	// first is the first number.
	first    int
	consoles [2]*consoleFile // of the hosts

	mu   sync.Mutex
	runs []run
}

// run is a time in which only one host has printed what its guest says.
type run struct {
	host int
	// counted has the numbers that the guest has counted, and written those that the disk has acknowledged.
	counted, written []int
}

const (
	// countScript makes the guest count on its console, and writeScript makes it write numbers to its disk, each to the
	// sector with this number. Each number is printed as a whole. Without conv=fsync there would be no flush, because
	// sync(1) does not flush the cache of a device without a file system.
	countScript = `(i=%[1]d; while :; do echo "count=$i;"; i=$((i+1)); sleep 0.1; done` +
		` >/dev/console 2>/dev/null </dev/null & echo $! >/tmp/count)` + "\n"
	writeScript = `(i=%[1]d; while printf %%08d $i | dd of=/dev/vda bs=512 seek=$i conv=notrunc,fsync 2>/dev/null; do` +
		` echo "written=$i;"; i=$((i+1)); sleep 0.1; done >/dev/console 2>/dev/null </dev/null & echo $! >/tmp/write)` + "\n"
	// endScript ends the other scripts.
	endScript = "for f in /tmp/count /tmp/write; do [ ! -e $f ] || kill $(cat $f) 2>/dev/null; done\n"
	// readScript prints the numbers in a range of sectors, each with eight digits, from the disk and not from the cache of
	// the guest.
	readScript = "echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda bs=512 skip=%d count=%d 2>/dev/null | tr -d '\\000'"

	// numbersPerCell is larger than the count of numbers that a guest can write in one cell, and sectors is smaller than
	// the size of its disk.
	numbersPerCell, sectors = 5_000, 2_000_000
)

// watch makes the guest count and write, and begins to watch it.
func (g *faultyGuest) watch() *witness {
	w := &witness{g: g, first: 1}
	if g.witness != nil {
		w.first = (g.witness.first + numbersPerCell) % sectors
	}
	for host := range w.consoles {
		w.consoles[host] = &consoleFile{path: filepath.Join(g.home(host), "console.log")}
		w.consoles[host].read() // of earlier migrations
	}
	ctx, cancel := context.WithCancel(g.c.t.Context())
	w.end = cancel
	w.done.Go(func() { w.watchConsoles(ctx) })
	g.m.run(endScript + fmt.Sprintf(countScript+writeScript, w.first))
	g.await("the guest writes to its disk", func() bool { return w.written(g.source) > 1 })
	return w
}

// watchConsoles reads the consoles of both hosts every 20 ms.
func (w *witness) watchConsoles(ctx context.Context) {
	for ctx.Err() == nil {
		w.readConsoles()
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// readConsoles reads the consoles of both hosts.
func (w *witness) readConsoles() {
	last := w.g.source
	if len(w.runs) > 0 {
		last = w.runs[len(w.runs)-1].host
	}
	// The host that has printed last is read after the other one, and its text is added before that of the other one. If
	// the guest moves meanwhile, its last text on the former host is so added before its first one on the new host.
	other := w.consoles[1-last].read()
	w.add(last, w.consoles[last].read())
	w.add(1-last, other)
}

// printed matches a number that the guest prints.
var printed = regexp.MustCompile(`(count|written)=(\d+);`)

// add adds the text on the console of a host.
func (w *witness) add(host int, text string) {
	if text == "" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.runs) == 0 || w.runs[len(w.runs)-1].host != host {
		w.runs = append(w.runs, run{host: host})
	}
	r := &w.runs[len(w.runs)-1]
	for _, m := range printed.FindAllStringSubmatch(text, -1) {
		n, _ := strconv.Atoi(m[2])
		switch {
		case n < w.first: // of the scripts of an earlier cell
		case m[1] == "count":
			r.counted = append(r.counted, n)
		default:
			r.written = append(r.written, n)
		}
	}
}

// written returns how many numbers the disk has acknowledged while the guest ran on a host.
func (w *witness) written(host int) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.runs {
		if r.host == host {
			n += len(r.written)
		}
	}
	return n
}

// stop ends the witness. It may be called more than once.
func (w *witness) stop() {
	w.end()
	w.done.Wait()
	for _, c := range w.consoles {
		c.close()
	}
}

// check returns an error if the guest, which is now on the host node after the cell x, has run on two hosts at once, or
// if its disk lacks a number that it has acknowledged.
func (w *witness) check(x cell, node int) error {
	w.g.await("the guest prints on its host", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.runs[len(w.runs)-1].host == node
	})
	w.g.m.run(endScript)
	w.end()
	w.done.Wait()
	w.readConsoles()
	digits := w.g.m.run(fmt.Sprintf(readScript, w.first, w.last()-w.first+1))
	if err := w.checkRuns(x, node); err != nil {
		return err
	}
	on := map[int]bool{}
	for ; len(digits) >= 8; digits = digits[8:] {
		n, err := strconv.Atoi(digits[:8])
		require.NoError(w.g.c.t, err)
		on[n] = true
	}
	acknowledged, lost := 0, 0
	for i, r := range w.runs {
		for _, n := range r.written {
			switch {
			case on[n]:
				acknowledged++
			case w.canLose(x) && i == 1:
				lost++
			default:
				return fmt.Errorf("the disk has lost %d, which it has acknowledged on %s; it has acknowledged %v", n, w.g.c.hosts[r.host].Name, w.runs)
			}
		}
	}
	w.g.c.t.Logf("%d acknowledged writes are on the disk; %d were lost with the target", acknowledged, lost)
	return nil
}

// cameBack reports whether the guest has run on the target, and then on the source again, in a cell in which it may.
func (w *witness) cameBack(x cell) bool { return x.mayComeBack() && len(w.runs) == 3 }

// canLose reports whether the disk may lack writes that it acknowledged on the target. This is so if the guest has run
// on the target, the source has then continued the guest from its state at the switchover, and the disk is not a
// volume.
func (w *witness) canLose(x cell) bool { return w.cameBack(x) && !w.g.disk.volume }

// checkRuns returns an error unless the runs can be those of one guest that moved once.
func (w *witness) checkRuns(x cell, node int) error {
	want := []int{w.g.source}
	switch {
	case w.cameBack(x):
		want = []int{w.g.source, w.g.target, w.g.source}
	case node == w.g.target:
		want = append(want, w.g.target)
	}
	var have []int
	counted := 0
	for i, r := range w.runs {
		have = append(have, r.host)
		if i == 2 && w.canLose(x) {
			counted = slices.Max(append(w.runs[0].counted, 0)) // The guest has the memory of the switchover again.
		}
		for _, n := range r.counted {
			if n <= counted {
				return fmt.Errorf("the guest has counted %d twice, on %s after %d: it was continued from an old memory", n, w.g.c.hosts[r.host].Name, counted)
			}
			counted = n
		}
	}
	if !slices.Equal(want, have) {
		return fmt.Errorf("the guest ran on the hosts %v in this order, not on %v; it printed %v", have, want, w.runs)
	}
	return nil
}

// last returns the largest number that the disk has acknowledged.
func (w *witness) last() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.first
	for _, r := range w.runs {
		last = slices.Max(append(r.written, last))
	}
	return last
}

// consoleFile reads the console log of a VM on a host. The host may remove the file and create it again.
type consoleFile struct {
	path string
	file *os.File
	info os.FileInfo
	at   int64
	rest string // the beginning of a number whose end was not read yet
}

// read returns what was added to the file since the last call.
func (c *consoleFile) read() (text string) {
	for {
		if c.file != nil {
			added, _ := io.ReadAll(io.NewSectionReader(c.file, c.at, 1<<30))
			c.at += int64(len(added))
			text += string(added)
		}
		now, err := os.Stat(c.path)
		if err != nil || c.file != nil && os.SameFile(now, c.info) {
			break
		}
		c.close()
		if c.file, err = os.Open(c.path); err != nil {
			c.file = nil
			break
		}
		c.info, c.at, c.rest = now, 0, ""
	}
	if text == "" {
		return ""
	}
	text = c.rest + text
	c.rest = unfinished.FindString(text)
	return text
}

// unfinished matches a number at the end of a text.
var unfinished = regexp.MustCompile(`[a-z]*=?\d*$`)

func (c *consoleFile) close() {
	if c.file != nil {
		_ = c.file.Close()
	}
	c.file = nil
}
