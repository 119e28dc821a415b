package main

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// listenUevents opens a socket for the kernel's device events. It must be opened before coldplug, so that no device is
// missed.
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

// watchUevents loads the drivers of devices that are added later (hotplug), and configures network interfaces.
func (m *machine) watchUevents(events *os.File) {
	buf := make([]byte, 8192) // the kernel's own limit of an event is 2 KiB
	for {
		n, err := events.Read(buf)
		var problems []error
		if err != nil {
			// Events were lost, or the socket is broken: check all devices again.
			problems = m.drivers.coldplug()
			m.configureNICs()
		} else if modalias, ok := addedModalias(buf[:n]); ok {
			_, problems = m.drivers.ask(modalias)
		} else if name, action := changedNIC(buf[:n]); action == "add" {
			m.addNIC(name)
		} else if action == "remove" {
			m.removeNIC(name)
		}
		for _, problem := range problems {
			m.say("ERROR hotplug: %v", problem)
		}
	}
}

// addedModalias returns the modalias in an event of a new device. An event is a header and KEY=value fields, separated
// by NUL.
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

// changedNIC returns the name of the network interface in an event, and the event's action, such as add or remove. The
// action is empty if the event is not about a network interface.
func changedNIC(event []byte) (name, action string) {
	fields := map[string]string{}
	for _, field := range strings.Split(string(event), "\x00") {
		if key, value, ok := strings.Cut(field, "="); ok {
			fields[key] = value
		}
	}
	if fields["SUBSYSTEM"] != "net" || fields["INTERFACE"] == "" {
		return "", ""
	}
	return fields["INTERFACE"], fields["ACTION"]
}
