package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is the unit of times in /proc (USER_HZ, the same on every Linux of this architecture).
const ticksPerSecond = 100

// cpuOf is what processes have used of the CPUs, in seconds. One that is gone counts nothing.
func cpuOf(pids ...int) float64 {
	var ticks uint64
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		for _, i := range []int{11, 12} { // utime, stime
			n, _ := strconv.ParseUint(fields[i], 10, 64)
			ticks += n
		}
	}
	return float64(ticks) / ticksPerSecond
}

// busyCPU is what everything on this machine has used, in seconds: all but idle and waiting for disks. The kernel counts it
// by ticks, so that it may be some percent less than the exact sum over processes.
func busyCPU() float64 {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(text), "\n")
	var ticks uint64
	for i, f := range strings.Fields(line)[1:] {
		// user nice system idle iowait irq softirq steal; the guests' time after them is in user already.
		if i == 3 || i == 4 || i > 7 {
			continue
		}
		n, _ := strconv.ParseUint(f, 10, 64)
		ticks += n
	}
	return float64(ticks) / ticksPerSecond
}

// calm is how much of one CPU may be in use for a machine to count as left alone, and calmFor how long that is looked at.
const calm, calmFor = 0.25, 500 * time.Millisecond

// awaitCalm waits until the machine does next to nothing, so that what others do on it is not measured. What it waits is
// taken from the run's patience; without any it goes on at once.
func (b *bench) awaitCalm(ctx context.Context) error {
	for b.patience > 0 {
		began, before := time.Now(), busyCPU()
		if err := sleep(ctx, calmFor); err != nil {
			return err
		}
		if busyCPU()-before < calm*time.Since(began).Seconds() {
			return nil
		}
		b.patience -= time.Since(began)
	}
	return nil
}

// ownCPU is what this process has used, in seconds.
func ownCPU() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// memory is a process's resident memory in MB (10^6 bytes): all of it, and what is not a file's.
func memory(pid int) (all, anonymous float64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	read := func(name string) float64 {
		m := regexp.MustCompile(name + `:\s+(\d+) kB`).FindSubmatch(text)
		if m == nil {
			return 0
		}
		n, _ := strconv.ParseUint(string(m[1]), 10, 64)
		return float64(n) * 1024 / 1e6
	}
	return read("VmRSS"), read("RssAnon"), nil
}

func loadavg() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// machine says what figures depend on.
func machine(ctx context.Context, dir string) string {
	first := func(name string, args ...string) string {
		out, err := exec.CommandContext(ctx, name, args...).Output()
		if err != nil {
			return name + " is missing"
		}
		line, _, _ := strings.Cut(string(out), "\n")
		return line
	}
	model := "unknown processor"
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if m := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(text); m != nil {
			model = string(m[1])
		}
	}
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info)
	return fmt.Sprintf("%s. %d × %s, %d MiB, Linux %s; %s; %s; libvirt %s; %s; write and fsync of 4 KiB on this disk: median %s. Load before: %s.",
		time.Now().UTC().Format("2006-01-02 15:04 UTC"), runtime.NumCPU(), model, uint64(info.Totalram)*uint64(info.Unit)>>20,
		kernel(), runtime.Version(), first("qemu-system-x86_64", "--version"), first("virsh", "--version"), filesystem(dir), fsync(dir), loadavg())
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "?"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func filesystem(dir string) string {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err == nil && s.Type == unix.EXT4_SUPER_MAGIC {
		return "ext4"
	} else if err == nil {
		return fmt.Sprintf("file system 0x%x", s.Type)
	}
	return "unknown file system"
}

// fsync is the median time to append 4 KiB and sync it, of 21.
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
	return median(took).Round(10 * time.Microsecond).String()
}

// end kills a process that this program started and waits for it.
func end(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait() // killed, as it should be
}
