// Package guest defines what the small test guest and the programs that watch it share: the line that the guest prints
// when it is ready, its kernel command line, and the data pattern that it writes on command.
//
// The script "build" beside this file builds the guest from Debian packages and the program in guestd; README.md lists
// its content and every line that it prints on its serial port. The package is compiled into both sides, so it does no
// I/O and imports little (every kilobyte of the guest's program costs time at each boot). It must not know anything of
// Trivet: the guest is an ordinary tenant's machine.
//
// Decisions: the guest prints lines of plain text, because they are read from a console log that may begin or end in
// the middle of a line. Every line of its own begins with Prefix. Values never contain blanks.
package guest

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Prefix begins every line that the guest program prints; other output on the serial port is from the firmware or the
// kernel.
const Prefix = "TRIVET GUEST "

// ErrNotReady means that a line is not the guest's banner.
var ErrNotReady = errors.New("not a guest banner")

// Disk is a whole disk as seen by the guest's kernel. A sector is 512 bytes, whatever the disk's own sector size.
type Disk struct {
	Name    string
	Sectors int64
}

// Ready is the banner: the properties of the machine at the time when the guest begins to accept commands and power
// events.
type Ready struct {
	BootID string  // /proc/sys/kernel/random/boot_id, new at every boot
	Up     float64 // seconds since the kernel started, to 10 ms
	CPUs   int     // online processors
	MemKiB int64   // MemTotal, less than the machine's memory
	Disks  []Disk  // sorted by name; empty if the machine has none
}

// String returns the banner as printed on the serial port, without its line end.
func (r Ready) String() string {
	return fmt.Sprintf("%sREADY boot_id=%s up=%.2f cpus=%d mem_kib=%d disks=%s",
		Prefix, r.BootID, r.Up, r.CPUs, r.MemKiB, FormatDisks(r.Disks))
}

// FormatDisks formats a list of disks as name:sectors,name:sectors.
func FormatDisks(disks []Disk) string {
	parts := make([]string, 0, len(disks))
	for _, d := range disks {
		parts = append(parts, d.Name+":"+strconv.FormatInt(d.Sectors, 10))
	}
	return strings.Join(parts, ",")
}

// ParseReady parses a banner from one line of a serial log. It ignores unknown fields, so that an older program can
// read the banner of a newer guest. It returns ErrNotReady if the banner's prefix is missing, or if a field is missing
// or invalid.
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

// ParseDisks is the inverse of FormatDisks; for the empty string it returns no disks.
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
