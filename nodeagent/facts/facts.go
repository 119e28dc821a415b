// Package facts finds out what this host is and has: how it can run guests, its size, and what its QEMU offers. It
// looks afresh each time and remembers nothing. It must not know the control plane, the agent's configuration or any
// VM; what is done with a fact (a label, NOT_READY, an argument of QEMU) is the caller's.
//
// # Decisions
//
//   - Acceleration is measured, not asked for. A /dev/kvm that opens, creates a VM and even runs it may interpret
//     kernel code one instruction at a time (nested hosts without hardware support do), and a guest then needs minutes
//     to boot. See [Accel].
//   - What QEMU offers is asked of QEMU itself, in one short-lived process without a machine, confined, and spoken to
//     over an inherited socket, so that no path is made or left.
//   - Storage counts what an unprivileged QEMU can fill: not the blocks a file system reserves for root.
//   - A size that cannot be read is an error. A guess would be placed upon.
package facts

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Resources is an amount of what a guest can be given, in the units of the node's capacity on the wire.
type Resources struct {
	VCPUs      uint32
	MemoryMiB  uint64
	StorageGiB uint64
}

// Host is what this host is and has.
type Host struct {
	Capacity Resources // all of it, whoever uses it
	Arch     string    // as uname says, such as x86_64
	BootID   string    // another one after each boot of the kernel
	QEMU     QEMU
}

// Options says where to look.
type Options struct {
	DataDir string // required: an existing directory on the file system that holds the guests' disks
	Accel   Kind   // required: the accelerator that CPU models are asked for
	QEMU    string // optional: the program's name or path; DefaultQEMU
}

// Read finds out everything. It runs QEMU twice, for a fraction of a second, and takes at most 20 seconds.
func Read(ctx context.Context, o Options) (Host, error) {
	if o.DataDir == "" {
		return Host{}, errors.New("read host facts: no data directory given")
	}
	if o.Accel != KVM && o.Accel != TCG {
		return Host{}, fmt.Errorf("read host facts: unknown accelerator %q", o.Accel)
	}
	var h Host
	var err error
	if h.Capacity, err = capacity(o.DataDir); err != nil {
		return Host{}, err
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return Host{}, fmt.Errorf("read architecture: %w", err)
	}
	h.Arch = unix.ByteSliceToString(uts.Machine[:])
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Host{}, fmt.Errorf("read boot id: %w", err)
	}
	h.BootID = strings.TrimSpace(string(id))
	h.QEMU, err = askQEMU(ctx, o.QEMU, o.Accel)
	return h, err
}

func capacity(dir string) (Resources, error) {
	online, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return Resources{}, fmt.Errorf("count processors: %w", err)
	}
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Resources{}, fmt.Errorf("read memory size: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return Resources{}, fmt.Errorf("read size of the file system of %s: %w", dir, err)
	}
	r := Resources{StorageGiB: storageGiB(fs.Blocks, fs.Bfree, fs.Bavail, uint64(fs.Frsize))}
	if r.VCPUs, err = countCPUs(string(online)); err != nil {
		return Resources{}, err
	}
	r.MemoryMiB, err = memoryMiB(string(meminfo))
	return r, err
}

// countCPUs counts a kernel CPU list such as "0-3,5".
func countCPUs(list string) (uint32, error) {
	var n uint32
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, errA := strconv.ParseUint(from, 10, 16)
		b, errB := strconv.ParseUint(to, 10, 16)
		if errA != nil || errB != nil || b < a {
			return 0, fmt.Errorf("count processors: bad list %q", list)
		}
		n += uint32(b-a) + 1
	}
	return n, nil
}

// memoryMiB reads MemTotal, rounded down. It includes what is set aside as huge pages.
func memoryMiB(meminfo string) (uint64, error) {
	for line := range strings.Lines(meminfo) {
		rest, ok := strings.CutPrefix(line, "MemTotal:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read memory size: %w", err)
		}
		return kib / 1024, nil
	}
	return 0, errors.New("read memory size: no MemTotal")
}

// storageGiB is what users other than root can use of a file system, rounded down. The arguments are statfs's.
func storageGiB(blocks, free, avail, size uint64) uint64 {
	if free > avail {
		blocks -= min(blocks, free-avail)
	}
	high, low := bits.Mul64(blocks, size)
	return high<<34 | low>>30
}
