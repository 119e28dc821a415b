// Command guestd is the whole user space of the small test guest: the kernel starts it as process 1 and it never
// exits.
//
// It loads the drivers for the machine's devices, mounts the data partition and prints the banner on the first
// serial port. From then on it handles the power button and executes commands, which it reads as lines from that
// port. It is one program rather than a shell script, because every process costs milliseconds under emulation and
// because a script that reads a terminal loses input. Busybox is in the image for the "run" command, and for the
// DHCP client and the HTTP server of a machine with network interfaces. Other processes of the guest start
// guestd with the name of a tool (see programs) as the first argument; busybox lacks these tools.
//
// It must not exit as process 1 (the kernel would panic), and must not know anything of Trivet. ../README.md lists
// its output.
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

// beat is the time between two heartbeats, which are aligned to multiples of it since the kernel's start.
const beat = 10 * time.Second

func main() {
	if os.Getpid() != 1 {
		os.Exit(runProgram(os.Args[1:]))
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
	// Both calls return only once they receive events: a reader of the banner may press the button at once.
	m.watchPower()
	m.watchInterrupt()
	if events != nil {
		go m.watchUevents(events)
	}
	m.say("%s", strings.TrimPrefix(m.ready().String(), guest.Prefix))
	go m.heartbeat()
	m.configureNICs() // after the banner, which does not wait for the network
	m.serve()
}

// machine is the running guest. Its goroutines run until the machine stops.
type machine struct {
	tty     *tty
	drivers *catalogue
	power   power
	net     network
}

// say prints one line with Prefix on the serial port. Lines of several goroutines do not mix.
func (m *machine) say(format string, args ...any) {
	m.tty.line(guest.Prefix + fmt.Sprintf(format, args...))
}

func (m *machine) ready() guest.Ready {
	return guest.Ready{BootID: bootID(), Up: uptime().Seconds(), CPUs: onlineCPUs(), MemKiB: memKiB(), Disks: disks()}
}

// heartbeat prints the uptime at regular times, so that a log shows whether the guest kept running.
func (m *machine) heartbeat() {
	for {
		now := uptime()
		time.Sleep(now.Truncate(beat) + beat - now)
		m.say("UP up=%.2f boot_id=%s", uptime().Seconds(), bootID())
	}
}

// watchInterrupt turns Ctrl-Alt-Del, which the kernel sends to process 1 as SIGINT, into an orderly reboot.
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

// mountBasics mounts the file systems that the kernel leaves to process 1. The caller reports the errors later, once
// the serial port is open.
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

// uptime returns the time since the kernel started, including time in suspension, as in /proc/uptime.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func bootID() string { return readText("/proc/sys/kernel/random/boot_id") }

// onlineCPUs returns the number of CPUs in the kernel's list of online processors, such as 0-3,6.
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
			n, _ := strconv.ParseInt(f[1], 10, 64) // the kernel's own format; 0 if it is invalid
			return n
		}
	}
	return 0
}

// disks returns the whole disks, sorted by name: block devices that have a device behind them (loop devices have
// none) and are not CD drives.
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

// readText returns the content of one of the kernel's small text files, "" if it cannot be read.
func readText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
