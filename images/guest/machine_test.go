package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// image is a built guest image: its directory and the content of its manifest.json.
type image struct {
	dir     string
	Cmdline string `json:"cmdline"`
	Files   []struct {
		Name   string `json:"name"`
		Bytes  int64  `json:"bytes"`
		SHA256 string `json:"sha256"`
	} `json:"files"`
}

// build builds the image with the default kernel, unless it is built already, and returns it. The directory is
// $TRIVET_GUEST_DIR, or .build/guest of the repository if that is not set.
func build(t *testing.T) image {
	t.Helper()
	return buildWith(t, "", "linux-image-cloud-amd64")
}

// buildWith does what build does, with another kernel package, and with suffix appended to the directory's name. If a
// tool is missing, it skips the test, or fails it if CI is true.
func buildWith(t *testing.T, suffix, kernel string) image {
	t.Helper()
	dir := os.Getenv("TRIVET_GUEST_DIR")
	if dir == "" {
		dir = filepath.Join("..", "..", ".build", "guest")
	}
	dir += suffix
	for _, tool := range []string{"qemu-system-x86_64", "qemu-img"} {
		if _, err := exec.LookPath(tool); err != nil {
			lacks(t, err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "./build", dir, kernel).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 69 {
		lacks(t, string(out))
	}
	require.NoError(t, err, "%s", out)
	text, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	require.NoError(t, err)
	img := image{dir: dir}
	require.NoError(t, json.Unmarshal(text, &img))
	return img
}

func lacks(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// direct returns the QEMU arguments that boot the image's kernel and initrd directly, without a disk.
func (img image) direct() []string {
	return []string{
		"-kernel", filepath.Join(img.dir, "vmlinuz"), "-initrd", filepath.Join(img.dir, "initrd.lz4"),
		"-append", img.Cmdline,
	}
}

// overlay creates a QCOW2 overlay of 1 GiB over the image's disk, and returns its path.
func (img image) overlay(t *testing.T) string {
	t.Helper()
	base, err := filepath.Abs(filepath.Join(img.dir, "disk.qcow2"))
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "overlay.qcow2")
	out, err := exec.CommandContext(t.Context(),
		"qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, file, "1G").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return file
}

// machine is a running QEMU with connections to its serial port and its QMP monitor.
type machine struct {
	t      *testing.T
	ctx    context.Context
	cmd    *exec.Cmd
	serial *os.File
	lines  chan string // output of the serial port; closed when QEMU has ended
	seen   []string
	qmp    net.Conn
	reply  *bufio.Reader
}

// lanes limits the number of machines that run at a time to two, because the emulation of each uses a whole CPU.
var lanes = make(chan struct{}, 2)

// start runs QEMU with 192 MiB of memory and one processor, which is emulated so that it behaves the same on all hosts.
// QEMU is killed at the end of the test.
func start(t *testing.T, args ...string) *machine {
	t.Helper()
	lanes <- struct{}{}
	t.Cleanup(func() { <-lanes })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)

	monitor, remote := socketPair(t)
	stdin, serialIn, err := os.Pipe()
	require.NoError(t, err)
	serialOut, stdout, err := os.Pipe()
	require.NoError(t, err)
	m := &machine{t: t, ctx: ctx, serial: serialIn, lines: make(chan string, 1024), qmp: monitor, reply: bufio.NewReader(monitor)}
	m.cmd = exec.CommandContext(ctx, "qemu-system-x86_64", append([]string{
		"-nodefaults", "-no-user-config", "-accel", "tcg", "-cpu", "qemu64", "-m", "192", "-smp", "1",
		"-display", "none", "-no-reboot", "-sandbox", "on",
		"-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial",
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
	}, args...)...)
	var complaints strings.Builder
	m.cmd.Stdin, m.cmd.Stdout, m.cmd.Stderr = stdin, stdout, &complaints
	m.cmd.ExtraFiles = []*os.File{remote}
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, m.cmd.Start())
	for _, f := range []*os.File{stdin, stdout, remote} {
		require.NoError(t, f.Close())
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(m.lines)
		for scanner := bufio.NewScanner(serialOut); scanner.Scan(); {
			m.lines <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	t.Cleanup(func() {
		_ = m.cmd.Process.Kill() // the process may have ended already
		for range m.lines {
		}
		<-read
		if m.cmd.ProcessState == nil {
			_ = m.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("serial:\n%s\nqemu:\n%s", strings.Join(m.seen, "\n"), complaints.String())
		}
		_, _, _ = serialIn.Close(), serialOut.Close(), monitor.Close()
	})
	m.qmpRead() // reads QEMU's greeting
	m.do("qmp_capabilities", nil)
	return m
}

func socketPair(t *testing.T) (net.Conn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	local, remote := os.NewFile(uintptr(fds[0]), "monitor"), os.NewFile(uintptr(fds[1]), "qemu's monitor")
	conn, err := net.FileConn(local)
	require.NoError(t, err)
	require.NoError(t, local.Close())
	return conn, remote
}

// hear waits for a line that the guest program prints and that begins with words after Prefix. It returns the rest of
// the line.
func (m *machine) hear(words string) string {
	m.t.Helper()
	for {
		select {
		case line, ok := <-m.lines:
			if !ok {
				m.t.Fatalf("the machine ended before it said %q", words)
			}
			m.seen = append(m.seen, line)
			if rest, ok := strings.CutPrefix(line, Prefix+words); ok {
				return strings.TrimSpace(rest)
			}
		case <-m.ctx.Done():
			m.t.Fatalf("waiting for %q: %v", words, m.ctx.Err())
		}
	}
}

// ready waits for the guest's line READY and returns its content.
func (m *machine) ready() Ready {
	m.t.Helper()
	ready, err := ParseReady(Prefix + "READY " + m.hear("READY"))
	require.NoError(m.t, err)
	m.t.Logf("ready after %.2f s of the guest's time: %+v", ready.Up, ready)
	return ready
}

// tell sends a command line to the guest's serial port.
func (m *machine) tell(line string) {
	m.t.Helper()
	_, err := m.serial.WriteString(line + "\n")
	require.NoError(m.t, err)
}

// ask sends a command line to the guest and waits for a line of the guest that begins with words. It returns the rest
// of that line.
func (m *machine) ask(line, words string) string {
	m.t.Helper()
	m.tell(line)
	return m.hear(words)
}

// ended waits until QEMU has ended, and returns the error of its Wait.
func (m *machine) ended() error {
	for line := range m.lines {
		m.seen = append(m.seen, line)
	}
	return m.cmd.Wait()
}

// count returns how many lines that the guest program has printed so far begin with words after Prefix.
func (m *machine) count(words string) int {
	n := 0
	for _, line := range m.seen {
		if strings.HasPrefix(line, Prefix+words) {
			n++
		}
	}
	return n
}

// message is a message of QEMU's monitor: an event or a reply.
type message struct {
	Event  string          `json:"event"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class, Desc string
	} `json:"error"`
}

func (m *machine) qmpRead() message {
	m.t.Helper()
	deadline, _ := m.ctx.Deadline()
	require.NoError(m.t, m.qmp.SetReadDeadline(deadline))
	line, err := m.reply.ReadBytes('\n')
	require.NoError(m.t, err, "read monitor")
	var msg message
	require.NoError(m.t, json.Unmarshal(line, &msg))
	return msg
}

// do executes a QMP command and fails the test if QEMU refuses it. It discards events that arrive before the reply.
func (m *machine) do(command string, arguments map[string]any) {
	m.t.Helper()
	if arguments == nil {
		arguments = map[string]any{}
	}
	text, err := json.Marshal(map[string]any{"execute": command, "arguments": arguments})
	require.NoError(m.t, err)
	_, err = m.qmp.Write(append(text, '\n'))
	require.NoError(m.t, err)
	for {
		msg := m.qmpRead()
		if msg.Error != nil {
			m.t.Fatalf("%s: %s: %s", command, msg.Error.Class, msg.Error.Desc)
		}
		if msg.Return != nil {
			return
		}
	}
}

// event waits for the QMP event with that name, and discards other messages.
func (m *machine) event(name string) {
	m.t.Helper()
	for m.qmpRead().Event != name {
	}
}
