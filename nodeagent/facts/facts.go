// Package facts reads the properties of this host: how it can run guests, its size, and what its QEMU supports. It
// reads them anew on each call and caches nothing. It does not depend on the control plane, the agent's configuration
// or any VM; the caller decides how to use a fact (a label, NOT_READY, an argument of QEMU).
//
// # Decisions
//
//   - Acceleration is measured. A /dev/kvm that opens, creates a VM and even runs it may interpret kernel code one
//     instruction at a time (nested hosts without hardware support do this), and a guest then needs minutes to boot.
//     See [Accel].
//   - QEMU itself is queried for its features, in one short-lived, sandboxed process without a machine. The connection
//     is an inherited socket, so that no socket file is created.
//   - Storage counts only the space that an unprivileged QEMU can use, without the blocks that a file system reserves
//     for root.
//   - A size that cannot be read is an error, because placement would rely on a guess.
package facts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/pinning"
)

// Resources is an amount of host resources, in the units of NodeCapacity in vmcontroller.v1.
type Resources struct {
	VCPUs      uint32
	MemoryMiB  uint64
	StorageGiB uint64
}

// Host describes this host: its size, its processor architecture, its present boot and its QEMU.
type Host struct {
	Capacity Resources // total, including used resources
	Arch     string    // as uname prints it, such as x86_64
	BootID   string    // changes with each boot of the kernel
	// HugepagesMiB is the memory that the kernel has reserved as huge pages of 2 MiB, in MiB. It is part of
	// Capacity.MemoryMiB.
	HugepagesMiB uint64
	QEMU         QEMU
}

// Options configures Read.
type Options struct {
	DataDir string // required: an existing directory on the file system that holds the guests' disks
	Accel   Kind   // required: the accelerator for which CPU models are listed
	QEMU    string // optional: name or path of the QEMU program; "" means DefaultQEMU
}

// Read returns the properties of this host. It runs QEMU twice, for a fraction of a second, and takes at most 20
// seconds.
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
	if h.HugepagesMiB, err = hugepagesMiB("/sys/kernel/mm/hugepages"); err != nil {
		return Host{}, err
	}
	h.QEMU, err = queryQEMU(ctx, o.QEMU, o.Accel)
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
	var system unix.Statfs_t
	if err := unix.Statfs(dir, &system); err != nil {
		return Resources{}, fmt.Errorf("read size of the file system of %s: %w", dir, err)
	}
	r := Resources{StorageGiB: storageGiB(system.Blocks, system.Bfree, system.Bavail, uint64(system.Frsize))}
	cpus, err := pinning.ParseKernelList(string(online))
	if err != nil {
		return Resources{}, fmt.Errorf("count processors: %w", err)
	}
	r.VCPUs = uint32(len(cpus))
	r.MemoryMiB, err = memoryMiB(string(meminfo))
	return r, err
}

// memoryMiB returns MemTotal from the text of /proc/meminfo, in MiB, rounded down. MemTotal includes memory reserved
// for huge pages.
func memoryMiB(meminfo string) (uint64, error) {
	kib, err := memoryKiB(meminfo, "MemTotal")
	return kib / 1024, err
}

// memoryKiB returns the value of a field of /proc/meminfo, in KiB.
func memoryKiB(meminfo, field string) (uint64, error) {
	for line := range strings.Lines(meminfo) {
		rest, ok := strings.CutPrefix(line, field+":")
		if !ok {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read memory size: %w", err)
		}
		return kib, nil
	}
	return 0, fmt.Errorf("read memory size: no %s", field)
}

// hugepagesMiB returns the size of all huge pages of 2 MiB that the kernel has reserved, in MiB. The parameter dir is the
// kernel's directory of huge pages. A kernel without huge pages of this size has none.
func hugepagesMiB(dir string) (uint64, error) {
	text, err := os.ReadFile(filepath.Join(dir, "hugepages-2048kB", "nr_hugepages"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("count huge pages: %w", err)
	}
	pages, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 40)
	if err != nil {
		return 0, fmt.Errorf("count huge pages: %w", err)
	}
	return 2 * pages, nil
}

// storageGiB returns the space of a file system that users other than root can use, in GiB, rounded down. As in
// statfs(2), blocks, free and avail count blocks of size bytes, and avail omits the blocks that are reserved for root.
func storageGiB(blocks, free, avail, size uint64) uint64 {
	if free > avail {
		blocks -= min(blocks, free-avail)
	}
	high, low := bits.Mul64(blocks, size)
	return high<<34 | low>>30
}
