package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/trivet-cloud/trivet/images/guest"

	"golang.org/x/sys/unix"
)

// lineLimit is the maximum length of a command line in bytes; the rest of a longer line is discarded.
const lineLimit = 4096

// tty is the serial port: raw, without echo (an echo would mix with the guest's output), and read and written in whole
// lines. A nil tty, of a machine without the port, discards output and never returns a line.
type tty struct {
	file *os.File
	mu   sync.Mutex // one line at a time
	// pending is the part of buf that was read but not processed yet. Both are used only by the goroutine that reads
	// lines.
	buf     [1024]byte
	pending []byte
}

func openTTY(path string) (*tty, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	mode, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("read mode of %s: %w", path, err)
	}
	mode.Iflag = unix.IGNBRK
	mode.Oflag = 0
	mode.Lflag = 0
	mode.Cflag = mode.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8 | unix.CREAD | unix.CLOCAL
	mode.Cc[unix.VMIN], mode.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, mode); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("set mode of %s: %w", path, err)
	}
	return &tty{file: os.NewFile(uintptr(fd), path)}, nil
}

// line writes one line.
func (t *tty) line(text string) { t.write([]byte(text + "\r\n")) }

// write writes whole lines to the port. Errors are ignored: QEMU drops output that nobody reads.
func (t *tty) write(lines []byte) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = t.file.Write(lines)
}

// drain waits until the last byte has been sent, before the machine stops.
func (t *tty) drain() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = unix.IoctlSetInt(int(t.file.Fd()), unix.TCSBRK, 1)
}

// next returns the next command line. Lines end with CR, LF or both. next removes control bytes and skips empty lines
// and the guest's own lines (which a peer with echo sends back). It does not return if the port fails.
func (t *tty) next() string {
	if t == nil {
		select {}
	}
	for {
		raw := t.readLine()
		line := strings.TrimSpace(strings.Map(func(r rune) rune {
			if r < ' ' || r == 0x7f {
				return -1
			}
			return r
		}, string(raw)))
		if line != "" && !strings.HasPrefix(line, strings.TrimSpace(guest.Prefix)) {
			return line
		}
	}
}

func (t *tty) readLine() []byte {
	var line []byte
	for {
		if len(t.pending) == 0 {
			n, err := t.file.Read(t.buf[:])
			if err != nil {
				select {} // The port has failed for good; the power button and the heartbeat still work.
			}
			t.pending = t.buf[:n]
		}
		end := bytes.IndexAny(t.pending, "\r\n")
		part := t.pending
		if end >= 0 {
			part, t.pending = t.pending[:end], t.pending[end+1:]
		} else {
			t.pending = nil
		}
		line = append(line, part[:min(len(part), lineLimit-len(line))]...)
		if end >= 0 {
			return line
		}
	}
}
