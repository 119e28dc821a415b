package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/usage"
)

// ticksPerSecond is the number of clock ticks, the unit of times in /proc, per second (USER_HZ on x86-64 Linux).
const ticksPerSecond = 100

// cpuOf returns the sum of the CPU time that processes have used, in seconds. It skips processes that have ended.
func cpuOf(pids ...int) float64 {
	var ticks uint64
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		for _, i := range []int{11, 12} { // indexes of utime and stime after the process name
			n, _ := strconv.ParseUint(fields[i], 10, 64)
			ticks += n
		}
	}
	return float64(ticks) / ticksPerSecond
}

// busyCPU returns the CPU time that the whole machine has used since boot, in seconds, or 0 if it cannot be read.
func busyCPU() float64 {
	d, err := usage.Busy()
	if err != nil {
		return 0
	}
	return d.Seconds()
}

// ownCPU returns the CPU time that this process has used, in seconds, or 0 if it cannot be read.
func ownCPU() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// memory returns a process's resident memory in MB (10^6 bytes). The result all is the total; the result anonymous is
// the part of it that is not backed by files.
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

// machine returns a description of the hardware and of the versions of software on which the results depend.
func machine(ctx context.Context, dir string) string {
	first := func(name string, args ...string) string {
		out, err := exec.CommandContext(ctx, name, args...).Output()
		if err != nil {
			return name + " is missing"
		}
		line, _, _ := strings.Cut(string(out), "\n")
		return line
	}
	return usage.Machine(dir, first("qemu-system-x86_64", "--version"), "libvirt "+first("virsh", "--version"))
}

// end kills a process that this program has started, and waits until it has ended.
func end(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait() // its error only reports the SIGKILL
}
