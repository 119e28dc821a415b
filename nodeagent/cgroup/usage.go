package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Usage is the resource usage of a group: its total processor time and number of killed processes since the group was
// made, and its current memory.
type Usage struct {
	CPU      time.Duration // processor time, user and system
	Memory   uint64        // bytes of anonymous and shared memory: memory that cannot be dropped, unlike the page cache
	OOMKills uint64        // processes that the kernel killed for exceeding Limits.Memory
}

// Usage returns the resource usage of a group. The error wraps fs.ErrNotExist if the group does not exist.
func (t *Tree) Usage(name string) (Usage, error) {
	u, err := t.usage(name)
	if err != nil {
		return Usage{}, fmt.Errorf("read usage of cgroup %s: %w", name, err)
	}
	return u, nil
}

func (t *Tree) usage(name string) (Usage, error) {
	if t.version == 2 {
		times, err := t.counters(cpu, name, "cpu.stat")
		if err != nil {
			return Usage{}, err
		}
		mem, err := t.counters(memory, name, "memory.stat")
		if err != nil {
			return Usage{}, err
		}
		events, err := t.counters(memory, name, "memory.events")
		if err != nil {
			return Usage{}, err
		}
		return Usage{
			CPU:      time.Duration(times["usage_usec"]) * time.Microsecond,
			Memory:   mem["anon"] + mem["shmem"],
			OOMKills: events["oom_kill"],
		}, nil
	}
	text, err := os.ReadFile(filepath.Join(t.dirs[cpuacct], name, "cpuacct.usage"))
	if err != nil {
		return Usage{}, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return Usage{}, err
	}
	mem, err := t.counters(memory, name, "memory.stat")
	if err != nil {
		return Usage{}, err
	}
	oom, err := t.counters(memory, name, "memory.oom_control")
	if err != nil {
		return Usage{}, err
	}
	return Usage{CPU: time.Duration(ns), Memory: mem["total_rss"] + mem["total_shmem"], OOMKills: oom["oom_kill"]}, nil
}

// counters parses a control file with a key and a number on each line. It skips lines of any other form.
func (t *Tree) counters(controller, name, file string) (map[string]uint64, error) {
	text, err := os.ReadFile(filepath.Join(t.dirs[controller], name, file))
	if err != nil {
		return nil, err
	}
	out := map[string]uint64{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil {
			out[key] = n
		}
	}
	return out, nil
}
