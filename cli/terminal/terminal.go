// Package terminal prints questions on a terminal and reads the answers, without echo for secrets.
//
// It uses termios directly, which is about twenty lines, instead of a dependency. It restores the terminal's settings
// even if the context ends during a question, because it waits for input with poll(2) and checks the context in
// between.
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

// maxLine is the maximum length of an answer in bytes; Ask returns an error for a longer one.
const maxLine = 4096

// Is reports whether f is a terminal.
func Is(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), getAttributes)
	return err == nil
}

// Ask writes a question to out and reads one line from the terminal in. If secret is set, the terminal does not echo
// the answer. Ask returns the error of ctx if ctx ends first.
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
				err = errors.Join(err, fmt.Errorf("turn the echo on again (run `stty echo`): %w", back))
			}
		}()
	}
	return readLine(ctx, in)
}

// readLine returns the input up to the next newline, without it. It reads byte by byte, so that later input stays in
// the terminal's buffer.
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

// look is the interval, in milliseconds, at which wait checks whether the context has ended.
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
