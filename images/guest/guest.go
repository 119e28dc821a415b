// Package guest holds the words that the small guest and its watchers share: the line the guest says when it is ready,
// the kernel command line it is booted with, and the bytes it writes when it is told to.
//
// The guest itself is built by the script "build" beside this file out of Debian packages and the program in guestd;
// README.md says what it contains and everything it says on its serial port. The package is compiled into both sides, so
// it does no I/O and imports little (every kilobyte of the guest's program is paid for at each boot), and it must not
// know anything of Trivet: the guest is an ordinary tenant's machine and is told nothing about the cloud it runs in.
//
// Decisions: the guest speaks lines of plain text, because its watchers read them out of a console log that may begin or end in the
// middle of one; every line of its own begins with Prefix; values never contain blanks.
package guest

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Prefix begins every line that the guest itself says; whatever else stands on the serial port is firmware or kernel.
const Prefix = "TRIVET GUEST "

// ErrNotReady says that a line is not the guest's banner.
var ErrNotReady = errors.New("not a guest banner")

// Disk is a whole disk as the guest's kernel sees it. Sectors are of 512 bytes whatever the disk's own sector size.
type Disk struct {
	Name    string
	Sectors int64
}

// Ready is the banner: what the guest knows of its machine at the moment when it can take commands and power events.
type Ready struct {
	BootID string  // /proc/sys/kernel/random/boot_id, new at every boot
	Up     float64 // seconds since the kernel started, to 10 ms
	CPUs   int     // online processors
	MemKiB int64   // MemTotal, so less than the machine's memory
	Disks  []Disk  // in the order of their names; empty when the machine has none
}

// String is the banner as it stands on the serial port, without its line end.
func (r Ready) String() string {
	return fmt.Sprintf("%sREADY boot_id=%s up=%.2f cpus=%d mem_kib=%d disks=%s",
		Prefix, r.BootID, r.Up, r.CPUs, r.MemKiB, FormatDisks(r.Disks))
}

// FormatDisks writes a list of disks as name:sectors,name:sectors.
func FormatDisks(disks []Disk) string {
	parts := make([]string, 0, len(disks))
	for _, d := range disks {
		parts = append(parts, d.Name+":"+strconv.FormatInt(d.Sectors, 10))
	}
	return strings.Join(parts, ",")
}

// ParseReady reads a banner from one line of a serial log. Unknown fields are passed over, so that an older watcher can
// read a newer guest; a line without the banner's beginning, or with a field missing or broken, is ErrNotReady.
func ParseReady(line string) (Ready, error) {
	rest, ok := strings.CutPrefix(strings.TrimSpace(line), Prefix+"READY ")
	if !ok {
		return Ready{}, ErrNotReady
	}
	fields := make(map[string]string)
	for _, word := range strings.Fields(rest) {
		if key, value, ok := strings.Cut(word, "="); ok {
			fields[key] = value
		}
	}
	for _, key := range []string{"boot_id", "up", "cpus", "mem_kib", "disks"} {
		if _, ok := fields[key]; !ok {
			return Ready{}, fmt.Errorf("%w: no %s", ErrNotReady, key)
		}
	}
	var r Ready
	var errs [4]error
	r.BootID = fields["boot_id"]
	r.Up, errs[0] = strconv.ParseFloat(fields["up"], 64)
	r.CPUs, errs[1] = strconv.Atoi(fields["cpus"])
	r.MemKiB, errs[2] = strconv.ParseInt(fields["mem_kib"], 10, 64)
	r.Disks, errs[3] = ParseDisks(fields["disks"])
	if err := errors.Join(errs[:]...); err != nil {
		return Ready{}, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return r, nil
}

// ParseDisks reads what FormatDisks wrote; the empty text is no disks.
func ParseDisks(text string) ([]Disk, error) {
	if text == "" {
		return nil, nil
	}
	var disks []Disk
	for _, part := range strings.Split(text, ",") {
		name, sectors, ok := strings.Cut(part, ":")
		if !ok || name == "" {
			return nil, fmt.Errorf("disk %q is not name:sectors", part)
		}
		n, err := strconv.ParseInt(sectors, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("disk %q: %w", part, err)
		}
		disks = append(disks, Disk{Name: name, Sectors: n})
	}
	return disks, nil
}
