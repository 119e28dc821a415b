// Package lease records until when the control plane lets this host run VMs that it may otherwise start on another host.
//
// The lease is measured by CLOCK_BOOTTIME, which nobody can set and which goes on while the host is suspended: a host
// that wakes up after its lease has ended must not run such a VM any longer. The end of the lease is stored in a file, so
// that an agent that was restarted knows the lease of its predecessor. The file is not synced, because after a crash of
// the host no VM runs any more.
package lease

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since the host was booted, including the time for which it was suspended.
func Now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("lease: read CLOCK_BOOTTIME: " + err.Error()) // The clock exists since Linux 2.6.39.
	}
	return time.Duration(t.Nano())
}

// Lease is the lease of this host. Its methods may be called concurrently.
type Lease struct {
	path, boot string

	mu    sync.Mutex
	until time.Duration
}

// file is the format of the file.
type file struct {
	Boot  string        `json:"boot"`
	Until time.Duration `json:"until"`
}

// Open reads the end of the lease from the file at path. If the file does not exist, or was written before the host was
// booted, the lease has ended.
func Open(path string) (*Lease, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	l := &Lease{path: path, boot: string(bytes.TrimSpace(boot))}
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return l, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	var f file
	// A file that cannot be read counts as a lease that has ended.
	if json.Unmarshal(data, &f) == nil && f.Boot == l.boot {
		l.until = f.Until
	}
	return l, nil
}

// Renew moves the end of the lease to the time sent plus the duration lasts, if that is later. The time sent is the
// result of Now from before the acknowledged heartbeat was sent.
func (l *Lease) Renew(sent, lasts time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sent+lasts <= l.until {
		return nil
	}
	l.until = sent + lasts
	data, err := json.Marshal(file{l.boot, l.until})
	if err != nil {
		return fmt.Errorf("write lease: %w", err)
	}
	next := l.path + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return fmt.Errorf("write lease: %w", err)
	}
	if err := os.Rename(next, l.path); err != nil {
		return fmt.Errorf("write lease: %w", err)
	}
	return nil
}

// Valid reports whether the lease has not ended.
func (l *Lease) Valid() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Now() < l.until
}
