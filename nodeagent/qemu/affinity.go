package qemu

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// vcpuThread matches the name that QEMU gives to the thread of a vCPU (-name debug-threads=on).
var vcpuThread = regexp.MustCompile(`^CPU ([0-9]+)/(KVM|TCG)$`)

// setAffinity makes each vCPU with a dedicated CPU run on this CPU, and all other threads of QEMU on
// Launcher.SharedCPUs, or on all CPUs if SharedCPUs is empty. A thread that QEMU creates later runs on the CPUs of the thread that has created it.
func (p *Process) setAffinity() error {
	r := p.Record()
	dir := fmt.Sprintf("/proc/%d/task", r.PID)
	done := map[int]bool{}
	for again := true; again; { // until no new thread is found
		again = false
		threads, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("set CPUs of QEMU: %w", err)
		}
		for _, t := range threads {
			tid, err := strconv.Atoi(t.Name())
			if err != nil || done[tid] {
				continue
			}
			again, done[tid] = true, true
			if err := p.setThreadAffinity(dir, tid, r.Spec.CPUs); err != nil {
				return fmt.Errorf("set CPUs of QEMU: %w", err)
			}
		}
	}
	return nil
}

// setThreadAffinity sets the CPUs of one thread. The parameter cpus has the dedicated CPU of each vCPU. A thread that has
// ended is no error.
func (p *Process) setThreadAffinity(dir string, tid int, cpus []int) error {
	name, err := os.ReadFile(fmt.Sprintf("%s/%d/comm", dir, tid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	allowed := p.launcher.SharedCPUs
	if m := vcpuThread.FindStringSubmatch(strings.TrimSpace(string(name))); m != nil {
		if i, err := strconv.Atoi(m[1]); err == nil && i < len(cpus) {
			allowed = cpus[i : i+1]
		}
	}
	var set unix.CPUSet
	for _, cpu := range allowed {
		set.Set(cpu)
	}
	if len(allowed) == 0 {
		set.Fill() // The kernel ignores CPUs that do not exist.
	}
	if err := unix.SchedSetaffinity(tid, &set); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}
