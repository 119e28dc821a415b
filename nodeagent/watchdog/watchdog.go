// Package watchdog arms, pets and disarms a watchdog device of Linux (Documentation/watchdog/watchdog-api.rst of the
// kernel). The main type is Device.
//
// An armed watchdog resets the host unless a process pets it in time. The guard process of the agent uses a watchdog
// for VMs that must not run without the host's lease: the host is reset if the QEMU of such a VM cannot be killed.
package watchdog

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Device is an armed watchdog. If the process ends without a call of Disarm, the host is reset.
type Device struct{ f *os.File }

// Open arms the watchdog at path, usually /dev/watchdog. The watchdog resets the host if Pet is not called for the
// duration timeout, which must be whole seconds. Open returns an error and disarms the device again if path is not a
// watchdog, if the watchdog cannot be disarmed, or if it does not accept the timeout. A watchdog that is configured with
// "nowayout" is not even opened, because opening arms it. Only one process can have the device open. For another process
// the error wraps EBUSY.
func Open(path string, timeout time.Duration) (*Device, error) {
	if err := checkDisarms("/sys", path); err != nil {
		return nil, fmt.Errorf("set up watchdog %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open watchdog: %w", err)
	}
	d := &Device{f}
	info, err := unix.IoctlGetWatchdogInfo(int(f.Fd()))
	if err != nil { // Nothing is written to what is not a watchdog.
		_ = f.Close()
		return nil, fmt.Errorf("set up watchdog %s: the device is not a watchdog: %w", path, err)
	}
	if err := d.setTimeout(info, timeout); err != nil {
		_ = d.Disarm()
		return nil, fmt.Errorf("set up watchdog %s: %w", path, err)
	}
	return d, nil
}

// miscMajor and watchdogMinor are the numbers of /dev/watchdog, which is the same device as /dev/watchdog0
// (Documentation/admin-guide/devices.txt of the kernel).
const (
	miscMajor     = 10
	watchdogMinor = 130
)

// checkDisarms returns an error if path is not a character device, or if it is a watchdog that cannot be disarmed. The
// parameter sys is where sysfs is mounted. A kernel without CONFIG_WATCHDOG_SYSFS does not say whether a watchdog can be
// disarmed; checkDisarms then returns nil.
func checkDisarms(sys, path string) error {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFCHR {
		return errors.New("the device is not a watchdog: it is not a character device")
	}
	dir := fmt.Sprintf("dev/char/%d:%d", unix.Major(s.Rdev), unix.Minor(s.Rdev))
	if unix.Major(s.Rdev) == miscMajor && unix.Minor(s.Rdev) == watchdogMinor {
		dir = "class/watchdog/watchdog0"
	}
	text, err := os.ReadFile(filepath.Join(sys, dir, "nowayout"))
	if err == nil && strings.TrimSpace(string(text)) != "0" {
		return errors.New("the driver cannot be disarmed: it is configured with nowayout")
	}
	return nil
}

func (d *Device) setTimeout(info *unix.WatchdogInfo, timeout time.Duration) error {
	fd := int(d.f.Fd())
	if info.Options&unix.WDIOF_MAGICCLOSE == 0 {
		return fmt.Errorf("the driver does not support disarming (magic close)")
	}
	seconds := int(timeout / time.Second)
	if err := unix.IoctlSetPointerInt(fd, unix.WDIOC_SETTIMEOUT, seconds); err != nil {
		return fmt.Errorf("it does not accept a timeout of %d s: %w", seconds, err)
	}
	got, err := unix.IoctlGetInt(fd, unix.WDIOC_GETTIMEOUT)
	if err != nil {
		return err
	}
	if got != seconds {
		return fmt.Errorf("the driver set a timeout of %d s instead of %d s", got, seconds)
	}
	return unix.IoctlWatchdogKeepalive(fd)
}

// Pet restarts the timeout of the watchdog.
func (d *Device) Pet() error {
	if err := unix.IoctlWatchdogKeepalive(int(d.f.Fd())); err != nil {
		return fmt.Errorf("pet watchdog: %w", err)
	}
	return nil
}

// Disarm stops the watchdog and closes the device.
func (d *Device) Disarm() error {
	_, err := d.f.WriteString("V") // Only after this character (WDIOF_MAGICCLOSE), the close stops the watchdog.
	if closeErr := d.f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("disarm watchdog: %w", err)
	}
	return nil
}
