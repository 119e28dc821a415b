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

// lineLimit bounds a command line; the rest of a longer one is thrown away with it.
const lineLimit = 4096

// tty is the serial port: raw, without echo (an echo would mix with what the guest says), whole lines out and in.
// A nil tty, of a machine without the port, swallows everything and never delivers a line.
type tty struct {
	file *os.File
	mu   sync.Mutex // one line at a time
	// pending is the part of buf that was read and not yet taken. Only the reader of lines touches them.
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

// write puts whole lines on the port. The guest goes on when nobody can take them: QEMU drops what nobody reads.
func (t *tty) write(lines []byte) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = t.file.Write(lines)
}

// drain waits until the last byte has left, before the machine goes.
func (t *tty) drain() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = unix.IoctlSetInt(int(t.file.Fd()), unix.TCSBRK, 1)
}

// next waits for the next command line: ended by CR, LF or both, control bytes removed, empty lines and the guest's own
// lines (a peer that echoes sends them back) passed over. It does not return when the port is gone.
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
				select {} // The port is gone for good; the power button and the heartbeat live on.
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
