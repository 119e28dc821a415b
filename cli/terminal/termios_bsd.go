//go:build darwin || freebsd || netbsd || openbsd

package terminal

import "golang.org/x/sys/unix"

const (
	getAttributes = unix.TIOCGETA
	setAttributes = unix.TIOCSETA
)
