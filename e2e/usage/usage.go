// Package usage measures the CPU time, bytes written and memory of processes, from /proc, and describes the machine.
//
// Bytes written are the field write_bytes of /proc/PID/io: the bytes of pages that the process made dirty and that are
// therefore sent to the disk. A page that is written again before it reaches the disk counts once; file system metadata
// is not counted. Reading the field of another user's process requires root.
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

// tick is the unit of times in /proc: USER_HZ is 100 per second on x86-64 Linux.
const tick = 10 * time.Millisecond

// Sample holds the CPU time and bytes written of processes since they started.
type Sample struct {
	CPU     time.Duration // user and system time of all threads
	Written uint64        // bytes sent to the disk
}

// Since returns the CPU time and bytes written of the processes between two samples: earlier, and s.
func (s Sample) Since(earlier Sample) Sample {
	return Sample{CPU: s.CPU - earlier.CPU, Written: s.Written - earlier.Written}
}

// Of returns the sum of the usage of processes. It returns an error if one of them has ended, because the difference to
// an earlier sample would then be too small.
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

// treeTime is how long Tree repeats its readings, and treePause the time between two attempts.
const treeTime, treePause = 5 * time.Second, 5 * time.Millisecond

// Tree returns the usage of a process and its children, including children that have ended. It is for a server that
// forks a process per connection. Grandchildren are included only after a child has waited for them.
func Tree(pid int) (sum Sample, err error) {
	// A child that ends between two readings would be counted twice or not at all: repeat until the set of children is
	// the same before and after the readings. The pauses give children time to end, for example after a benchmark has
	// closed its connections.
	for began := time.Now(); time.Since(began) < treeTime; time.Sleep(treePause) {
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
	return Sample{}, fmt.Errorf("process %d has started or ended children at each attempt for %s", pid, treeTime)
}

// Children returns the pids of a process's children that it has not waited for.
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

// reapedBy returns the sum of the CPU time of those children that the processes pids have waited for. The bytes that
// these children wrote are already included in their parent's write_bytes.
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

// Memory is the sum of the resident memory of processes in bytes. A page that two of them share counts twice.
type Memory struct {
	Resident  uint64
	Anonymous uint64 // the part of Resident without file pages, which the kernel can reclaim
}

// MemoryOf returns the sum of the memory of processes. It returns an error if one of them has ended.
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

// parseStat returns the user plus system time in text, the content of /proc/PID/stat. The process name in it, in
// parentheses, may contain any character, even a parenthesis.
func parseStat(text []byte) (time.Duration, error) { return parseTimes(text, 11) }

// parseTimes returns the sum of two consecutive times in the content of /proc/PID/stat: the fields from and from+1,
// counted from 0 after the name in parentheses.
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

// parseField returns the number in the line of text that has the form "name: number unit".
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

// DiskOf returns the disk space that is allocated to the files beneath a directory, in bytes. Files that are removed
// meanwhile are not counted.
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
