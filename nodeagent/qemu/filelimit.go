package qemu

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// diskFileLimit returns the largest length, in bytes, of the file of a disk with the given virtual size.
func diskFileLimit(size uint64) uint64 { return size + size/16 + 64<<20 }

// fileLimit returns the file size limit with which QEMU is started, in bytes. If the agent cannot raise the limit of a
// running QEMU, the limit leaves room for the largest disk. A compromised QEMU can then fill the file systems of its
// disks.
func (l *Launcher) fileLimit(files Files) uint64 {
	limit := files.fileSizeLimit()
	if l.LargestDisk > 0 && !canRaiseLimits() {
		limit = max(limit, diskFileLimit(l.LargestDisk))
	}
	return limit
}

// canRaiseLimits reports whether the agent has CAP_SYS_RESOURCE, without which prlimit(2) cannot change the limits of a
// process of another user.
var canRaiseLimits = sync.OnceValue(func() bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&head, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
})

var fileSizeLine = regexp.MustCompile(`(?m)^Max file size +(\d+|unlimited) +(\d+|unlimited) `)

// raiseFileLimit raises the file size limit of the running QEMU to that of a disk with size bytes. It never lowers the
// limit. If the limit is too low, the agent needs CAP_SYS_RESOURCE.
func (p *Process) raiseFileLimit(size uint64) error {
	pid, want := p.Record().PID, diskFileLimit(size)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		return fmt.Errorf("read QEMU's file size limit: %w", err)
	}
	found := fileSizeLine.FindSubmatch(text)
	if found == nil {
		return fmt.Errorf("read QEMU's file size limit: /proc/%d/limits does not have it", pid)
	}
	have, err := strconv.ParseUint(string(found[1]), 10, 64)
	if err != nil || have >= want { // err: unlimited
		return nil
	}
	if err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: want, Max: want}, nil); err != nil {
		return fmt.Errorf("raise QEMU's file size limit to %d bytes: %w", want, os.NewSyscallError("prlimit", err))
	}
	return nil
}
