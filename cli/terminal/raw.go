package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Raw turns off the line editing, the echo and the signal keys of a terminal, so that a program gets each key at once.
// The caller must call restore.
func Raw(in *os.File) (restore func() error, err error) {
	fd := int(in.Fd())
	was, err := unix.IoctlGetTermios(fd, getAttributes)
	if err != nil {
		return nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	raw := *was
	raw.Iflag &^= unix.BRKINT | unix.ICRNL | unix.IGNCR | unix.INLCR | unix.INPCK | unix.ISTRIP | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.IEXTEN | unix.ISIG
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, setAttributes, &raw); err != nil {
		return nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	return func() error {
		if err := unix.IoctlSetTermios(fd, setAttributes, was); err != nil {
			return fmt.Errorf("restore the terminal (run `stty sane`): %w", err)
		}
		return nil
	}, nil
}

// Read reads bytes from a terminal or a pipe into buf. It returns the error of ctx if ctx ends first, and io.EOF at the
// end of the input.
func Read(ctx context.Context, in *os.File, buf []byte) (int, error) {
	if err := wait(ctx, int(in.Fd())); err != nil {
		return 0, err
	}
	n, err := in.Read(buf)
	if err == nil && n == 0 || errors.Is(err, unix.EIO) { // a terminal that was hung up
		err = io.EOF
	}
	return n, err
}
