// Package usage measures what processes use of a machine (CPU, bytes written, memory), and describes the machine. All
// data comes from /proc. The package does not depend on what the processes do.
//
// Bytes written are write_bytes of /proc/PID/io: what the process caused to be sent to the disk, counted when a page
// becomes dirty. A page that is written again before it reaches the disk counts once; file system metadata is not
// counted. Reading the value of another user's process requires root.
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

// Sample holds what processes have used since they started.
type Sample struct {
	CPU     time.Duration // user and system, all threads
	Written uint64        // bytes
}

// Since returns what was used between an earlier sample and s.
func (s Sample) Since(earlier Sample) Sample {
	return Sample{CPU: s.CPU - earlier.CPU, Written: s.Written - earlier.Written}
}

// Of returns the sum over processes. A process that is gone is an error: its usage would be missing from a difference.
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

// Tree returns the usage of a process and its children, including children that have ended: for a server that forks a
// process per connection. Of grandchildren it includes only those that a child has waited for.
func Tree(pid int) (sum Sample, err error) {
	// A child that ends between two readings is counted twice or not at all: repeat until the children did not change.
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

// Children returns the processes that a process has started and not waited for.
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

// reapedBy returns the CPU time of the children that pids have waited for. The kernel already includes their written
// bytes.
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

// Memory is the resident memory of processes in bytes, summed: a page shared by two counts twice.
type Memory struct {
	Resident  uint64
	Anonymous uint64 // without file pages, which the kernel can reclaim
}

// MemoryOf returns the sum over processes.
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

// parseStat returns the user plus system time in /proc/PID/stat. The name in parentheses may contain any character.
func parseStat(text []byte) (time.Duration, error) { return parseTimes(text, 11) }

// parseTimes returns the sum of two consecutive fields, counted from 0 after the name in parentheses.
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

// parseField returns the number in a line "name: number unit".
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

// DiskOf returns the disk space allocated to the files beneath a directory, in bytes. A file that vanishes meanwhile is
// not counted.
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
