package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/images/guest"

	"golang.org/x/sys/unix"
)

// Limits and defaults of the commands.
const (
	defaultLen = 1 << 20          // default number of bytes for write and sum
	maxLen     = 256 << 20        // bytes
	maxSpewKiB = 64 << 10         // KiB
	maxOutput  = 1 << 20          // bytes of output of a "run"; the rest is dropped
	runTimeout = 60 * time.Second // of a "run"
)

// verb is a command: its usage, the minimum and maximum number of arguments, and its function.
type verb struct {
	usage    string
	min, max int
	do       func(m *machine, args []string) error
}

// verbs holds all commands except "run", which takes the rest of its line verbatim.
var verbs = map[string]verb{
	"id":     {"id", 0, 0, (*machine).doID},
	"disks":  {"disks", 0, 0, (*machine).doDisks},
	"write":  {"write DEV SEED [OFFSET [LENGTH]]", 2, 4, (*machine).doWrite},
	"sum":    {"sum DEV [OFFSET [LENGTH]]", 1, 3, (*machine).doSum},
	"spew":   {"spew KIB", 1, 1, (*machine).doSpew},
	"deaf":   {"deaf", 0, 0, (*machine).doDeaf},
	"off":    {"off", 0, 0, (*machine).doOff},
	"reboot": {"reboot", 0, 0, (*machine).doReboot},
	"crash":  {"crash", 0, 0, func(m *machine, _ []string) error { return m.crash() }},
}

// serve executes commands one after the other and does not return.
func (m *machine) serve() {
	for {
		line := m.tty.next()
		if err := m.obey(line); err != nil {
			m.say("ERROR %s: %v", firstWord(line), err)
		}
	}
}

func (m *machine) obey(line string) error {
	name := firstWord(line)
	if name == "run" {
		return m.run(strings.TrimSpace(strings.TrimPrefix(line, name)))
	}
	v, ok := verbs[name]
	if !ok {
		return errors.New("unknown command; there are crash, deaf, disks, id, off, reboot, run, spew, sum, write")
	}
	args := strings.Fields(line)[1:]
	if len(args) < v.min || len(args) > v.max {
		return fmt.Errorf("usage: %s", v.usage)
	}
	return v.do(m, args)
}

func firstWord(line string) string {
	word, _, _ := strings.Cut(line, " ")
	return word
}

func (m *machine) doID([]string) error {
	m.say("ID boot_id=%s up=%.2f", bootID(), uptime().Seconds())
	return nil
}

func (m *machine) doDisks([]string) error {
	m.say("DISKS disks=%s", guest.FormatDisks(disks()))
	return nil
}

func (m *machine) doWrite(args []string) error {
	e, err := parseExtent(args[0], args[2:])
	if err != nil {
		return err
	}
	sum, err := e.write(args[1])
	if err != nil {
		return err
	}
	m.say("WROTE %v seed=%s sha256=%s", e, args[1], sum)
	return nil
}

func (m *machine) doSum(args []string) error {
	e, err := parseExtent(args[0], args[1:])
	if err != nil {
		return err
	}
	sum, err := e.sum()
	if err != nil {
		return err
	}
	m.say("SUM %v sha256=%s", e, sum)
	return nil
}

// parseExtent parses DEV [OFFSET [LENGTH]], in bytes; DEV with or without /dev/.
func parseExtent(dev string, rest []string) (extent, error) {
	e := extent{dev: strings.TrimPrefix(dev, "/dev/"), len: defaultLen}
	for i, p := range []*int64{&e.off, &e.len} {
		if i >= len(rest) {
			break
		}
		n, err := strconv.ParseInt(rest[i], 10, 64)
		if err != nil || n < 0 || n%guest.SectorSize != 0 {
			return extent{}, fmt.Errorf("%q is not a multiple of %d bytes", rest[i], guest.SectorSize)
		}
		*p = n
	}
	if e.len > maxLen {
		return extent{}, fmt.Errorf("at most %d bytes at once", maxLen)
	}
	return e, nil
}

// doSpew writes numbered lines of 64 bytes to the port, for tests of the console log.
func (m *machine) doSpew(args []string) error {
	kib, err := strconv.Atoi(args[0])
	if err != nil || kib < 1 || kib > maxSpewKiB {
		return fmt.Errorf("%q is not from 1 to %d KiB", args[0], maxSpewKiB)
	}
	var block []byte
	for k := range kib {
		block = block[:0]
		for i := range 16 {
			block = fmt.Appendf(block, "%-62s\r\n", fmt.Sprintf("%sSPEW line=%08d", guest.Prefix, k*16+i))
		}
		m.tty.write(block)
	}
	m.say("SPEWED kib=%d", kib)
	return nil
}

func (m *machine) doDeaf([]string) error {
	m.power.deaf.Store(true)
	m.say("DEAF")
	return nil
}

func (m *machine) doOff([]string) error {
	m.leave("OFF", unix.LINUX_REBOOT_CMD_POWER_OFF)
	return nil
}

func (m *machine) doReboot([]string) error {
	m.leave("REBOOT", unix.LINUX_REBOOT_CMD_RESTART)
	return nil
}

// run executes a line with busybox's shell. It prints the output, each line with the guest's prefix, and the exit code.
func (m *machine) run(script string) error {
	if script == "" {
		return errors.New("usage: run SHELL LINE")
	}
	if _, err := os.Lstat("/bin/ls"); err != nil {
		// The applets' links cost boot time, so they are created by the first "run".
		if out, err := exec.Command("/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
			return fmt.Errorf("install applets: %w: %s", err, out)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script)
	cmd.Env = []string{"PATH=/bin:/sbin", "HOME=/"}
	cmd.WaitDelay = time.Second // a child left behind may hold the pipe
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	reap()
	for line := range strings.Lines(out.kept.String()) {
		m.say("OUT %s", strings.TrimRight(line, "\r\n"))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("ended after %v", runTimeout)
	}
	if cmd.ProcessState == nil {
		return err
	}
	m.say("RAN rc=%d", cmd.ProcessState.ExitCode())
	return nil
}

// output keeps the first maxOutput bytes and discards the rest, so that a full pipe does not block the process.
type output struct{ kept bytes.Buffer }

func (o *output) Write(p []byte) (int, error) {
	o.kept.Write(p[:min(len(p), maxOutput-o.kept.Len())])
	return len(p), nil
}

// reap waits for orphans, which process 1 inherits. It must be called only between commands: a command waits for its
// own child.
func reap() {
	for {
		if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
			return
		}
	}
}
