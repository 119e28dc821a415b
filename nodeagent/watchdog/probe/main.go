// Program probe is the init of the guest in the tests of package watchdog. It loads the kernel module of a watchdog,
// arms the watchdog, and pets it for longer than its timeout. The next step depends on the kernel's command line: with
// probe=stop the program stops petting, with probe=disarm it disarms the watchdog. With probe=exit it instead arms the
// watchdog in another process, which then ends. The program prints a line for each step.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/watchdog"
)

const timeout = 2 * time.Second

func main() {
	if len(os.Args) > 1 && os.Args[1] == "arm" { // This process ends with the watchdog armed.
		if _, err := watchdog.Open("/dev/watchdog", timeout); err != nil {
			fmt.Println("PROBE failed:", err)
		}
		return
	}
	if err := probe(); err != nil {
		fmt.Println("PROBE failed:", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func probe() error {
	for _, dir := range []string{"dev", "proc"} {
		if err := os.MkdirAll("/"+dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("dev", "/dev", "devtmpfs", 0, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	for _, name := range []string{"/watchdog.ko", "/softdog.ko"} {
		module, err := os.Open(name)
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(module.Fd()), "", 0); err != nil {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	if _, err := watchdog.Open("/dev/null", timeout); err == nil {
		return fmt.Errorf("/dev/null was accepted as a watchdog")
	}
	commandLine, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	if strings.Contains(string(commandLine), "probe=exit") {
		fmt.Println("PROBE exits")
		out, err := exec.Command("/init", "arm").CombinedOutput()
		fmt.Printf("PROBE has lost the process: %s %v\n", out, err)
		time.Sleep(10 * timeout)
		return fmt.Errorf("the watchdog did not reset the guest")
	}
	d, err := watchdog.Open("/dev/watchdog", timeout)
	if err != nil {
		return err
	}
	if _, err := watchdog.Open("/dev/watchdog", timeout); err == nil {
		return fmt.Errorf("the device was opened twice")
	}
	for began := time.Now(); time.Since(began) < 2*timeout; time.Sleep(timeout / 10) {
		if err := d.Pet(); err != nil {
			return err
		}
	}
	fmt.Println("PROBE has petted")
	if strings.Contains(string(commandLine), "probe=disarm") {
		if err := d.Disarm(); err != nil {
			return err
		}
		time.Sleep(3 * timeout)
		fmt.Println("PROBE lives on")
		return nil
	}
	time.Sleep(10 * timeout)
	return fmt.Errorf("the watchdog did not reset the guest")
}
