package main

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// listenUevents opens the kernel's announcements of devices. It is opened before the first look at the devices that are
// there, so that none falls between.
func listenUevents() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("open uevent socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind uevent socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "uevents"), nil
}

// watchUevents loads the drivers of devices that come later: hotplug.
func (m *machine) watchUevents(events *os.File) {
	buf := make([]byte, 8192) // the kernel's own limit of an announcement is 2 KiB
	for {
		n, err := events.Read(buf)
		var problems []error
		if err != nil {
			// Announcements were lost, or the socket is broken: look at everything once more.
			problems = m.drivers.coldplug()
		} else if modalias, ok := addedModalias(buf[:n]); ok {
			_, problems = m.drivers.ask(modalias)
		}
		for _, problem := range problems {
			m.say("ERROR hotplug: %v", problem)
		}
	}
}

// addedModalias takes the modalias out of an announcement of a new device: NUL-separated KEY=value after a heading.
func addedModalias(event []byte) (string, bool) {
	var added bool
	var modalias string
	for _, field := range strings.Split(string(event), "\x00") {
		if field == "ACTION=add" {
			added = true
		} else if value, ok := strings.CutPrefix(field, "MODALIAS="); ok {
			modalias = value
		}
	}
	return modalias, added && modalias != ""
}
