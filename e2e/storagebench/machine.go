package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/usage"
	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// machine is a running guest with its serial port. The zero value is a machine that does not run.
type machine struct {
	pid     int // of QEMU
	console net.Conn
	lines   chan string // what the guest prints; closed when the console has ended

	// Only of a guest of Trivet: the IDs of the VM and of the volume that is its first disk.
	vm, volume string

	// Only of a guest that was started by hand.
	cmd *exec.Cmd
	qmp *qmp.Conn
	dir string
}

// openMachine waits until a VM of Trivet has booted, and connects to its serial port.
func openMachine(ctx context.Context, c *onehost.Cloud, vm string) (*machine, error) {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	if _, err := onehost.AwaitBanner(ctx, c.Serial(vm), 0); err != nil {
		return &machine{}, err
	}
	record, err := c.Record(vm)
	if err != nil {
		return &machine{}, err
	}
	m := &machine{vm: vm, pid: record.PID}
	return m, m.open(ctx, filepath.Join(c.VMDir(vm), "console.sock"))
}

// startByHand starts QEMU, waits until the guest has booted, and connects to its serial port and monitor.
func startByHand(ctx context.Context, h *onehost.ByHand) (_ *machine, err error) {
	m := &machine{dir: h.Dir}
	// QEMU runs longer than the part that starts it.
	if m.cmd, err = h.Start(context.WithoutCancel(ctx)); err != nil {
		return &machine{}, err
	}
	m.pid = m.cmd.Process.Pid
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	if _, err := onehost.AwaitBanner(ctx, h.Log(), 0); err != nil {
		return m, err
	}
	monitor, err := onehost.Dial(ctx, h.QMP())
	if err != nil {
		return m, err
	}
	if m.qmp, err = qmp.New(ctx, monitor); err != nil {
		return m, err
	}
	return m, m.open(ctx, h.Console())
}

// open connects to the serial port.
func (m *machine) open(ctx context.Context, path string) (err error) {
	if m.console, err = onehost.Dial(ctx, path); err != nil {
		return err
	}
	m.lines = make(chan string, 1024)
	go func() {
		defer close(m.lines)
		for scanner := bufio.NewScanner(m.console); scanner.Scan(); {
			m.lines <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	return nil
}

// close disconnects from the guest, and kills QEMU if it was started by hand.
func (m *machine) close() {
	if m.console != nil {
		_ = m.console.Close()
		for range m.lines {
		}
	}
	if m.qmp != nil {
		_ = m.qmp.Close()
	}
	if m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait() // its error only reports the SIGKILL
	}
}

// errGuest means that the guest could not execute a command.
var errGuest = errors.New("the guest reports an error")

// ask writes a command to the guest and waits for a line that begins with answer. It returns the rest of that line. The
// error wraps errGuest if the guest prints an error instead.
func (m *machine) ask(ctx context.Context, command, answer string) (string, error) {
	if _, err := io.WriteString(m.console, command+"\n"); err != nil {
		return "", err
	}
	return m.await(ctx, answer, nil)
}

// await waits for a line that begins with answer, and calls before with each line of the guest that comes earlier.
func (m *machine) await(ctx context.Context, answer string, before func(line string)) (string, error) {
	for {
		select {
		case line, ok := <-m.lines:
			text, mine := strings.CutPrefix(line, guest.Prefix)
			rest, found := strings.CutPrefix(text, answer)
			switch {
			case !ok:
				return "", errors.New("the console of the guest has ended")
			case !mine:
			case found:
				return rest, nil
			case strings.HasPrefix(text, "ERROR "):
				return "", fmt.Errorf("%w: %s", errGuest, text)
			case before != nil:
				before(text)
			}
		case <-ctx.Done():
			return "", fmt.Errorf("wait for %q of the guest: %w", answer, ctx.Err())
		}
	}
}

// load holds the results of a load on a disk of a guest.
type load struct {
	operations float64
	bytes      float64
	elapsed    time.Duration // measured by the guest
	cpu        time.Duration // of QEMU
}

// load runs the program diskload in the guest.
func (m *machine) load(ctx context.Context, args ...any) (l load, err error) {
	before, err := usage.Of(m.pid)
	if err != nil {
		return l, err
	}
	if _, err := fmt.Fprintln(m.console, append([]any{"run /init diskload"}, args...)...); err != nil {
		return l, err
	}
	var out string
	code, err := m.await(ctx, "RAN rc=", func(line string) {
		if text, ok := strings.CutPrefix(line, "OUT "); ok {
			out = text
		}
	})
	if err != nil {
		return l, err
	}
	after, err := usage.Of(m.pid)
	if err != nil {
		return l, err
	}
	if code != "0" {
		return l, fmt.Errorf("diskload: exit code %s: %s", code, out)
	}
	l, err = parseLoad(out)
	l.cpu = after.Since(before).CPU
	return l, err
}

// parseLoad parses the line that diskload prints.
func parseLoad(line string) (l load, err error) {
	fields := map[string]float64{}
	for word := range strings.FieldsSeq(line) {
		name, value, _ := strings.Cut(word, "=")
		if fields[name], err = strconv.ParseFloat(value, 64); err != nil {
			return l, fmt.Errorf("diskload printed %q: %w", line, err)
		}
	}
	l.operations, l.bytes, l.elapsed = fields["ops"], fields["bytes"], time.Duration(fields["us"])*time.Microsecond
	if l.operations == 0 || l.bytes == 0 || l.elapsed == 0 {
		return l, fmt.Errorf("diskload printed %q", line)
	}
	return l, nil
}

// sectors returns the size of a disk of the guest in sectors, or 0 if the guest does not have the disk.
func (m *machine) sectors(ctx context.Context, disk string) (int64, error) {
	list, err := m.ask(ctx, "disks", "DISKS disks=")
	if err != nil {
		return 0, err
	}
	for entry := range strings.SplitSeq(list, ",") {
		if size, ok := strings.CutPrefix(entry, disk+":"); ok {
			return strconv.ParseInt(size, 10, 64)
		}
	}
	return 0, nil
}

// awaitSectors waits until a disk of the guest has this size in sectors.
func (m *machine) awaitSectors(ctx context.Context, disk string, want int64) error {
	for {
		got, err := m.sectors(ctx, disk)
		if err != nil || got == want {
			return err
		}
	}
}

// awaitRead waits until the guest has the disk and has read its first 4 KiB.
func (m *machine) awaitRead(ctx context.Context, disk string) error {
	for {
		_, err := m.ask(ctx, "sum "+disk+" 0 4096", "SUM ")
		if !errors.Is(err, errGuest) {
			return err
		}
		if ctx.Err() != nil {
			return err
		}
	}
}
