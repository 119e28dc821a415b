package facts

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Load is how much memory and processor time of a host are in use, by all programs and VMs.
type Load struct {
	// MemoryBytes is the memory of the host, and AvailableBytes the part that new programs could use without swapping,
	// as the kernel estimates it.
	MemoryBytes, AvailableBytes uint64
	// CPUSeconds is the time that all CPUs together have spent since the host was started, by what they did: a key of
	// CPUModes.
	CPUSeconds map[string]float64
}

// CPUModes lists the kinds of processor time, by the names that the kernel uses:
//
//   - user: programs, including QEMU and its guests
//   - system: the kernel, including interrupts
//   - iowait: idle while a program waits for a disk
//   - steal: taken by the hypervisor, if the host is itself a virtual machine
//   - idle: everything else
var CPUModes = []string{"user", "system", "iowait", "steal", "idle"}

// ReadLoad returns the load of this host, from /proc.
func ReadLoad() (Load, error) {
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Load{}, fmt.Errorf("read memory in use: %w", err)
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return Load{}, fmt.Errorf("read processor time: %w", err)
	}
	return parseLoad(string(meminfo), string(stat))
}

func parseLoad(meminfo, stat string) (l Load, err error) {
	total, err := memoryKiB(meminfo, "MemTotal")
	if err != nil {
		return l, err
	}
	available, err := memoryKiB(meminfo, "MemAvailable")
	if err != nil {
		return l, err
	}
	l.MemoryBytes, l.AvailableBytes = total<<10, available<<10
	l.CPUSeconds, err = parseCPUSeconds(stat)
	return l, err
}

// userHZ is the number of units per second in /proc/stat. It is 100 on all architectures that the agent supports.
const userHZ = 100

// parseCPUSeconds reads the line of /proc/stat with the sum of all CPUs: cpu user nice system idle iowait irq softirq
// steal guest guest_nice. The times user and nice include those of guests.
func parseCPUSeconds(stat string) (map[string]float64, error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return nil, errors.New("read processor time: /proc/stat does not begin with the sum of all CPUs")
	}
	modes := [...]string{"user", "user", "system", "idle", "iowait", "system", "system", "steal"}
	seconds := map[string]float64{}
	for i, mode := range modes {
		n, err := strconv.ParseUint(fields[i+1], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read processor time: %w", err)
		}
		seconds[mode] += float64(n) / userHZ
	}
	return seconds, nil
}
