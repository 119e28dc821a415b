// Package terminal asks a person on a terminal, with the echo off for secrets. It knows nothing of what it asks for.
//
// It is twenty lines of termios instead of a dependency. The terminal is left as it was found, also when the question is
// interrupted: the read waits with poll(2) for input, so that the end of a context is seen without a second goroutine.
package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLine bounds an answer, in bytes.
const maxLine = 4096

// Is reports whether f is a terminal.
func Is(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), getAttributes)
	return err == nil
}

// Ask writes the question to out and reads one line from the terminal in. With secret the answer is not echoed.
func Ask(ctx context.Context, in *os.File, out io.Writer, question string, secret bool) (answer string, err error) {
	if _, err := io.WriteString(out, question); err != nil {
		return "", fmt.Errorf("ask %q: %w", question, err)
	}
	if secret {
		fd := int(in.Fd())
		was, err := unix.IoctlGetTermios(fd, getAttributes)
		if err != nil {
			return "", fmt.Errorf("turn the echo off: %w", err)
		}
		quiet := *was
		quiet.Lflag &^= unix.ECHO
		quiet.Lflag |= unix.ICANON | unix.ISIG | unix.ECHONL
		if err := unix.IoctlSetTermios(fd, setAttributes, &quiet); err != nil {
			return "", fmt.Errorf("turn the echo off: %w", err)
		}
		defer func() {
			if back := unix.IoctlSetTermios(fd, setAttributes, was); back != nil {
				err = errors.Join(err, fmt.Errorf("turn the echo on again (stty echo does): %w", back))
			}
		}()
	}
	return readLine(ctx, in)
}

// readLine reads up to the newline. In its usual mode a terminal gives a line at a time, and no more than was asked for.
func readLine(ctx context.Context, in *os.File) (string, error) {
	var line []byte
	one := make([]byte, 1)
	for {
		if err := wait(ctx, int(in.Fd())); err != nil {
			return "", err
		}
		switch n, err := in.Read(one); {
		case errors.Is(err, io.EOF) || err == nil && n == 0:
			return "", fmt.Errorf("read the answer: %w", io.ErrUnexpectedEOF)
		case err != nil:
			return "", fmt.Errorf("read the answer: %w", err)
		}
		if one[0] == '\n' {
			return strings.TrimSuffix(string(line), "\r"), nil
		}
		if line = append(line, one[0]); len(line) > maxLine {
			return "", fmt.Errorf("the answer is longer than %d bytes", maxLine)
		}
	}
}

// look is how often, in milliseconds, the end of the context is looked for.
const look = 100

func wait(ctx context.Context, fd int) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, look)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for the answer: %w", err)
		}
		if n > 0 {
			return nil
		}
	}
}
