package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// power is the state of power button handling and shutdown.
type power struct {
	deaf atomic.Bool // if set, the power button is only reported
	once sync.Once   // the first request to shut down or reboot is executed
}

// Sizes and codes of linux/input.h on 64-bit: 16 bytes of time, type, code, value.
const (
	inputEventSize = 24
	evKey          = 1
	keyPower       = 116
)

// watchPower reads every ACPI power button (a machine may have a fixed and a programmed one) and powers the machine off
// at the first press.
func (m *machine) watchPower() {
	names, err := filepath.Glob("/sys/class/input/event*/device/name")
	if err != nil || len(names) == 0 {
		m.say("ERROR start: no input devices, so no power button")
		return
	}
	for _, name := range names {
		if readText(name) != "Power Button" {
			continue
		}
		dev := "/dev/input/" + filepath.Base(filepath.Dir(filepath.Dir(name)))
		f, err := os.Open(dev)
		if err != nil {
			m.say("ERROR start: open power button: %v", err)
			continue
		}
		go m.readButton(f)
	}
}

func (m *machine) readButton(f *os.File) {
	var buf [16 * inputEventSize]byte
	for {
		n, err := f.Read(buf[:])
		if err != nil {
			m.say("ERROR power button: %v", err)
			return
		}
		if !pressed(buf[:n]) {
			continue
		}
		if m.power.deaf.Load() {
			m.say("POWERBUTTON ignored")
			continue
		}
		m.leave("POWERBUTTON", unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
}

// pressed reports whether events contain a press of the power key.
func pressed(events []byte) bool {
	for ; len(events) >= inputEventSize; events = events[inputEventSize:] {
		kind, code := binary.NativeEndian.Uint16(events[16:]), binary.NativeEndian.Uint16(events[18:])
		if kind == evKey && code == keyPower && binary.NativeEndian.Uint32(events[20:]) == 1 {
			return true
		}
	}
	return false
}

// lastWord is the maximum time that leave waits for the serial port: QEMU blocks the port while its reader does not
// read.
const lastWord = 2 * time.Second

// leave prints word, syncs the disks and powers off or restarts the machine. It does not return.
func (m *machine) leave(word string, how int) {
	m.power.once.Do(func() {
		said := make(chan struct{})
		go func() {
			m.say("%s", word)
			m.tty.drain()
			close(said)
		}()
		unix.Sync()
		_ = unix.Unmount(dataDir, 0) // EINVAL if it was not mounted; if a "run" keeps it busy, it is at least synced
		select {
		case <-said:
		case <-time.After(lastWord):
		}
		if err := unix.Reboot(how); err != nil {
			m.say("ERROR leave: %v", err)
		}
	})
	select {}
}

// crash causes a kernel panic; the reaction depends on the kernel command line and the machine's panic device.
func (m *machine) crash() error {
	m.say("CRASH")
	m.tty.drain()
	return os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
}
