package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
)

func blocksOf(e fs.DirEntry) (uint64, bool) {
	info, err := e.Info()
	if err != nil {
		return 0, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return uint64(st.Blocks), true
}

// Commit returns the text "commit" with the hash of the commit that this program was built from, or "unknown", and a
// remark if there were uncommitted changes.
func Commit() string {
	revision, changed := "unknown", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && len(s.Value) >= 7:
				revision = s.Value[:7]
			case s.Key == "vcs.modified" && s.Value == "true":
				changed = " with uncommitted changes"
			}
		}
	}
	return "commit " + revision + changed
}

// Machine returns one line of text with everything on which the results of a benchmark depend: the commit, processor,
// memory, kernel, the given versions of the measured programs, the file system and fsync time of dir, and the load.
func Machine(dir string, versions ...string) string {
	model := "unknown processor"
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if m := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(text); m != nil {
			model = string(m[1])
		}
	}
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info)
	var u unix.Utsname
	_ = unix.Uname(&u)
	what := append([]string{Commit(), runtime.Version()}, versions...)
	return fmt.Sprintf("%s. %d × %s, %d MiB, Linux %s; %s; %s; write and fsync of 4 KiB on this disk: median %s. Load before: %s.",
		time.Now().UTC().Format("2006-01-02 15:04 UTC"), runtime.NumCPU(), model, uint64(info.Totalram)*uint64(info.Unit)>>20,
		unix.ByteSliceToString(u.Release[:]), strings.Join(what, "; "), filesystem(dir), fsync(dir), Load())
}

// Load returns the load averages over 1, 5 and 15 minutes as text, or "unknown".
func Load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

func filesystem(dir string) string {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return "unknown file system"
	}
	if s.Type == unix.EXT4_SUPER_MAGIC {
		return "ext4"
	}
	return fmt.Sprintf("file system 0x%x", s.Type)
}

// fsync returns, as text, the median time of 21 appends of 4 KiB to a file in dir, each followed by an fsync.
func fsync(dir string) string {
	f, err := os.Create(filepath.Join(dir, "fsync"))
	if err != nil {
		return err.Error()
	}
	defer os.Remove(f.Name())
	defer f.Close()
	var took []time.Duration
	for range 21 {
		began := time.Now()
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			return err.Error()
		}
		if err := f.Sync(); err != nil {
			return err.Error()
		}
		took = append(took, time.Since(began))
	}
	return figure.Median(took).Round(10 * time.Microsecond).String()
}

// Busy returns the CPU time that the whole machine has used since boot, without idle and iowait. The kernel counts it
// in ticks, so it may be some percent less than the sum over all processes, which is exact.
func Busy() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parseBusy(string(text))
}

func parseBusy(text string) (time.Duration, error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, errors.New("no line cpu in /proc/stat")
	}
	var ticks uint64
	// The fields are user nice system idle iowait irq softirq steal. The guest times that follow are included in user.
	for i, f := range fields[1:9] {
		if i == 3 || i == 4 {
			continue
		}
		n, err := strconv.ParseUint(f, 10, 63)
		if err != nil {
			return 0, fmt.Errorf("times in /proc/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * tick, nil
}
