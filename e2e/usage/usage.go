// Package usage tells what processes have taken of a machine: CPU, bytes written, memory; and what the machine is. All of
// it comes from /proc. It knows nothing of what the processes do.
//
// Bytes are write_bytes of /proc/PID/io: what the process caused to be sent towards the disk, counted when a page becomes
// dirty. A page that is written again before it went to the disk counts once; file system metadata counts nothing.
// Reading it of another user's process takes root.
package usage

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc (USER_HZ, 100 on every Linux of this architecture).
const tick = 10 * time.Millisecond

// Sample is what processes have used since they started.
type Sample struct {
	CPU     time.Duration // user and system, all threads
	Written uint64        // bytes
}

// Since is what was used between an earlier sample and this one.
func (s Sample) Since(earlier Sample) Sample {
	return Sample{CPU: s.CPU - earlier.CPU, Written: s.Written - earlier.Written}
}

// Of sums over processes. One that is gone is an error: what it used would be missing from a difference.
func Of(pids ...int) (sum Sample, err error) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return Sample{}, fmt.Errorf("read CPU time: %w", err)
		}
		cpu, err := parseStat(stat)
		if err != nil {
			return Sample{}, fmt.Errorf("process %d: %w", pid, err)
		}
		io, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
		if err != nil {
			return Sample{}, fmt.Errorf("read bytes written: %w", err)
		}
		written, err := parseField(io, "write_bytes")
		if err != nil {
			return Sample{}, fmt.Errorf("process %d: %w", pid, err)
		}
		sum.CPU += cpu
		sum.Written += written
	}
	return sum, nil
}

// Tree is what a process, its children and those of its children that are gone have used: for a server that starts a
// process a connection. Of grandchildren only those are in it that a child has waited for.
func Tree(pid int) (sum Sample, err error) {
	// A child that ends between two looks is in the sum twice or not at all: look again until none did.
	for range 10 {
		before, err := Children(pid)
		if err != nil {
			return Sample{}, err
		}
		sum, err = Of(append(before, pid)...)
		if err == nil {
			var reaped time.Duration
			if reaped, err = reapedBy(append(before, pid)...); err == nil {
				sum.CPU += reaped
			}
		}
		after, failed := Children(pid)
		if failed != nil {
			return Sample{}, failed
		}
		if err == nil && slices.Equal(before, after) {
			return sum, nil
		}
	}
	return Sample{}, fmt.Errorf("process %d starts and ends children all the time", pid)
}

// Children are the processes that a process has started and not waited for.
func Children(pid int) (pids []int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return nil, fmt.Errorf("read children: %w", err)
	}
	for _, f := range strings.Fields(string(text)) {
		child, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("read children: %w", err)
		}
		pids = append(pids, child)
	}
	return pids, nil
}

// reapedBy is the CPU time of processes that these have waited for. The kernel has added what they wrote already.
func reapedBy(pids ...int) (sum time.Duration, err error) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, fmt.Errorf("read CPU time: %w", err)
		}
		reaped, err := parseTimes(stat, 13)
		if err != nil {
			return 0, fmt.Errorf("process %d: %w", pid, err)
		}
		sum += reaped
	}
	return sum, nil
}

// Memory is what processes have resident, in bytes, summed: pages that two share count twice.
type Memory struct {
	Resident  uint64
	Anonymous uint64 // without the pages of files, which the kernel can take back
}

// MemoryOf sums over processes.
func MemoryOf(pids ...int) (sum Memory, err error) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return Memory{}, fmt.Errorf("read memory: %w", err)
		}
		for name, to := range map[string]*uint64{"VmRSS": &sum.Resident, "RssAnon": &sum.Anonymous} {
			kib, err := parseField(text, name)
			if err != nil {
				return Memory{}, fmt.Errorf("process %d: %w", pid, err)
			}
			*to += kib << 10
		}
	}
	return sum, nil
}

// parseStat reads user and system time of /proc/PID/stat. The name in parentheses may hold anything.
func parseStat(text []byte) (time.Duration, error) { return parseTimes(text, 11) }

// parseTimes sums two fields, which are counted from the one after the name.
func parseTimes(text []byte, from int) (time.Duration, error) {
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < from+2 {
		return 0, fmt.Errorf("%d fields after the name in stat", len(fields))
	}
	var ticks uint64
	for _, f := range fields[from : from+2] {
		n, err := strconv.ParseUint(f, 10, 63)
		if err != nil {
			return 0, fmt.Errorf("times in stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * tick, nil
}

// parseField reads the number of a line "name: number unit".
func parseField(text []byte, name string) (uint64, error) {
	for line := range strings.Lines(string(text)) {
		key, value, ok := strings.Cut(line, ":")
		if !ok || key != name {
			continue
		}
		fields := strings.Fields(value)
		if len(fields) == 0 {
			break
		}
		return strconv.ParseUint(fields[0], 10, 64)
	}
	return 0, fmt.Errorf("no %s", name)
}

// DiskOf is what the files beneath a directory take of the disk, in bytes. A file that goes away meanwhile counts nothing.
func DiskOf(dir string) (uint64, error) {
	var sum uint64
	err := filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if blocks, ok := blocksOf(e); ok {
			sum += blocks * 512
		}
		return nil
	})
	return sum, err
}
