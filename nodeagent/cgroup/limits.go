package cgroup

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
)

// Limits are the resource limits of one group.
type Limits struct {
	CPUs   int    // quota in processors, 1 to 1024; the weight is derived from it
	Memory uint64 // bytes, hard; at least 1 MiB
	Tasks  int    // processes and threads; 0 means no limit. Ignored on a host without the pids controller
}

// period is the period of the processor quota, in microseconds. 100 ms is the kernel's default.
const period = 100_000

// Weights in the units of version 2's cpu.weight: 1 to 10000. The kernel's default is 100.
const (
	treeWeight   = 50
	weightPerCPU = 25 // the weight of 288 vCPUs is still below maxWeight
	maxWeight    = 10_000
)

// setting is a controller's file and the value to write to it.
type setting struct {
	controller, file, value string
}

// treeSettings returns the settings of the tree's own group: its weight against the other groups of the host.
func treeSettings(version int) []setting {
	if version == 2 {
		return []setting{{cpu, "cpu.weight", strconv.Itoa(treeWeight)}}
	}
	return []setting{{cpu, "cpu.shares", strconv.Itoa(shares(treeWeight))}}
}

// shares converts a weight of version 2 to cpu.shares of version 1, in which 1024 corresponds to the weight 100.
func shares(weight int) int { return max(2, weight*1024/100) }

func (l Limits) settings(version int) ([]setting, error) {
	switch {
	case l.CPUs < 1 || l.CPUs > 1024:
		return nil, fmt.Errorf("a quota of %d processors is not possible", l.CPUs)
	case l.Memory < 1<<20 || l.Memory > math.MaxInt64:
		return nil, fmt.Errorf("a memory limit of %d bytes is not possible", l.Memory)
	case l.Tasks < 0:
		return nil, fmt.Errorf("a limit of %d tasks is not possible", l.Tasks)
	}
	weight := min(weightPerCPU*l.CPUs, maxWeight)
	quota, bytes, tasks := strconv.Itoa(l.CPUs*period), strconv.FormatUint(l.Memory, 10), "max"
	if l.Tasks > 0 {
		tasks = strconv.Itoa(l.Tasks)
	}
	if version == 2 {
		return []setting{
			{cpu, "cpu.max", fmt.Sprintf("%s %d", quota, period)},
			{cpu, "cpu.weight", strconv.Itoa(weight)},
			{memory, "memory.max", bytes},
			{pids, "pids.max", tasks},
		}, nil
	}
	return []setting{
		{cpu, "cpu.cfs_period_us", strconv.Itoa(period)},
		{cpu, "cpu.cfs_quota_us", quota},
		{cpu, "cpu.shares", strconv.Itoa(shares(weight))},
		{memory, "memory.limit_in_bytes", bytes},
		{pids, "pids.max", tasks},
	}, nil
}

// apply writes settings to the control files of a group. It skips the settings of controllers that the host does not
// have.
func (t *Tree) apply(name string, set []setting) error {
	for _, s := range set {
		dir, ok := t.dirs[s.controller]
		if !ok {
			continue
		}
		if err := write(filepath.Join(dir, name, s.file), s.value); err != nil {
			return fmt.Errorf("set %s to %s: %w", s.file, s.value, err)
		}
	}
	return nil
}

// write writes value to an existing control file. It does not create the file: if the file does not exist, the kernel
// does not support the setting, and write returns an error.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}
