// Command guestd is the whole user space of the small guest: the kernel starts it as process 1 and it never ends.
//
// It loads the drivers that the machine's devices ask for, mounts the data partition, says the banner on the first
// serial port, and from then on answers the power button and the commands that come in as lines on that port. It is one
// program rather than a shell script because every process costs milliseconds under emulation and because a
// script that reads a terminal loses input; busybox is in the image for the "run" command alone.
//
// It must not end (the kernel panics when process 1 does), must not know anything of Trivet, and needs nothing from the
// network. What it says is listed in ../README.md.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/images/guest"

	"golang.org/x/sys/unix"
)

// beat is the time between two heartbeats; they stand on whole multiples of it since the kernel's start.
const beat = 10 * time.Second

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guestd is process 1 of a guest and nothing else")
		os.Exit(2)
	}
	problems := mountBasics()
	tty, err := openTTY("/dev/ttyS0")
	if err != nil {
		problems = append(problems, err)
	}
	events, err := listenUevents()
	if err != nil {
		problems = append(problems, err)
	}
	m := &machine{tty: tty, drivers: loadCatalogue()}
	problems = append(problems, m.drivers.coldplug()...)
	problems = append(problems, mountData()...)
	for _, err := range problems {
		m.say("ERROR start: %v", err)
	}
	// Both listen when they return: whoever reads the banner may press the button at once.
	m.watchPower()
	m.watchInterrupt()
	if events != nil {
		go m.watchUevents(events)
	}
	m.say("%s", strings.TrimPrefix(m.ready().String(), guest.Prefix))
	go m.heartbeat()
	m.serve()
}

// machine is the running guest. Its goroutines live as long as process 1, that is until the machine goes.
type machine struct {
	tty     *tty
	drivers *catalogue
	power   power
}

// say puts one line of the guest's own on the serial port; lines of several goroutines do not mix.
func (m *machine) say(format string, args ...any) {
	m.tty.line(guest.Prefix + fmt.Sprintf(format, args...))
}

func (m *machine) ready() guest.Ready {
	return guest.Ready{BootID: bootID(), Up: uptime().Seconds(), CPUs: onlineCPUs(), MemKiB: memKiB(), Disks: disks()}
}

// heartbeat makes the guest's uptime readable in a log: a guest that was left alone goes on counting.
func (m *machine) heartbeat() {
	for {
		now := uptime()
		time.Sleep(now.Truncate(beat) + beat - now)
		m.say("UP up=%.2f boot_id=%s", uptime().Seconds(), bootID())
	}
}

// watchInterrupt turns Ctrl-Alt-Del, which the kernel hands to process 1 as an interrupt, into an orderly reboot.
func (m *machine) watchInterrupt() {
	keys := make(chan os.Signal, 1)
	signal.Notify(keys, syscall.SIGINT)
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF); err != nil {
		m.say("ERROR start: take ctrl-alt-del: %v", err)
	}
	go func() {
		<-keys
		m.leave("REBOOT", unix.LINUX_REBOOT_CMD_RESTART)
	}()
}

// mountBasics mounts what the kernel leaves to process 1. A part that fails is reported later, when there is a port.
func mountBasics() []error {
	var errs []error
	for _, m := range [...]struct{ source, target, fstype string }{
		{"dev", "/dev", "devtmpfs"},
		{"proc", "/proc", "proc"},
		{"sys", "/sys", "sysfs"},
	} {
		if err := unix.Mount(m.source, m.target, m.fstype, 0, ""); err != nil && err != unix.EBUSY {
			errs = append(errs, fmt.Errorf("mount %s: %w", m.target, err))
		}
	}
	return errs
}

// uptime is the time since the kernel started, time in suspension included, as in /proc/uptime.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func bootID() string { return readText("/proc/sys/kernel/random/boot_id") }

// onlineCPUs counts the kernel's list of online processors, such as 0-3,6.
func onlineCPUs() int { return countList(readText("/sys/devices/system/cpu/online")) }

func countList(list string) int {
	n := 0
	for _, part := range strings.Split(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		if err != nil {
			continue
		}
		b := a
		if isRange {
			if b, err = strconv.Atoi(last); err != nil {
				continue
			}
		}
		n += b - a + 1
	}
	return n
}

func memKiB() int64 {
	for line := range strings.Lines(readText("/proc/meminfo")) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemTotal:" {
			n, _ := strconv.ParseInt(f[1], 10, 64) // the kernel's own text; 0 shows if it ever changes
			return n
		}
	}
	return 0
}

// disks lists the whole disks in the order of their names: block devices that have a device behind them (loop devices have
// none) and are no CD drive.
func disks() []guest.Disk {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil
	}
	var list []guest.Disk
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "sr") {
			continue
		}
		dir := "/sys/block/" + e.Name()
		if _, err := os.Lstat(dir + "/device"); err != nil {
			continue
		}
		sectors, err := strconv.ParseInt(readText(dir+"/size"), 10, 64)
		if err != nil {
			continue
		}
		list = append(list, guest.Disk{Name: e.Name(), Sectors: sectors})
	}
	slices.SortFunc(list, func(a, b guest.Disk) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// readText is for the kernel's small text files: what cannot be read is empty.
func readText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
