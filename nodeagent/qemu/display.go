package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// ErrNoDisplay means that the VM's process was started by an agent of an earlier version, which gave VMs no display.
var ErrNoDisplay = errors.New("the VM was started without a display: stop it and start it again")

const (
	// maxScreenshot is the maximum size of a PNG file of the display, in bytes.
	maxScreenshot = 32 << 20
	// screenshotName is the comment of the descriptor to which QEMU writes a picture.
	screenshotName = "screenshot"
)

// display adds a VGA adapter and a VNC server. The server does not listen: it gets connections from [Process.OpenVNC]
// only. All of its clients share the display.
func (a *args) display() {
	a.add("-vnc", "none,share=force-shared")
	a.json("-device", object{"driver": "VGA", "id": "display", "bus": "pcie.0", "addr": fmt.Sprintf("0x%x", addrDisplay), "vgamem_mb": 16})
}

// DialSerial connects to the serial port of the guest. QEMU serves one connection at a time. The caller must read from
// the connection, because otherwise the guest's output stops. The output is also in the log [Home.Console].
func (p *Process) DialSerial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socketPath(p.dir, consoleSocket))
	if err != nil {
		return nil, fmt.Errorf("connect to the serial port: %w", err)
	}
	return c, nil
}

// OpenVNC returns a connection to QEMU's VNC server, which needs no password. QEMU gets one end of a pair of sockets
// over its monitor. The error wraps [ErrNoDisplay] if QEMU has no VNC server.
func (p *Process) OpenVNC(ctx context.Context) (net.Conn, error) {
	if !p.record.Spec.Display {
		return nil, ErrNoDisplay
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "vnc"), os.NewFile(uintptr(pair[1]), "vnc of QEMU")
	defer closeAll(ours, theirs)
	// The name is unique, because a second descriptor with the same name would replace the first one.
	name := "vnc" + strconv.FormatUint(p.vncClients.Add(1), 10)
	err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := conn.SendFD(ctx, name, theirs); err != nil {
			return err
		}
		err := conn.Do(ctx, "add_client", object{"protocol": "vnc", "fdname": name, "skipauth": true}, nil)
		if err != nil {
			return errors.Join(err, conn.Do(ctx, "closefd", object{"fdname": name}, nil))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("connect to the display: %w", err)
	}
	return net.FileConn(ours)
}

// Screenshot returns a picture of the display as a PNG file. It makes one picture at a time. The error wraps
// [ErrNoDisplay] if the VM has no display.
func (p *Process) Screenshot(ctx context.Context) ([]byte, error) {
	if !p.record.Spec.Display {
		return nil, ErrNoDisplay
	}
	p.screenshots.Lock()
	defer p.screenshots.Unlock()
	picture, err := p.screenshot(ctx)
	if err != nil {
		return nil, fmt.Errorf("make a picture of the display: %w", err)
	}
	return picture, nil
}

// screenshot makes QEMU write a picture to a file in memory.
func (p *Process) screenshot(ctx context.Context) ([]byte, error) {
	fd, err := unix.MemfdCreate(screenshotName, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), screenshotName)
	defer file.Close()
	// QEMU opens a descriptor of a set only with the mode in which the descriptor was opened.
	writer, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer writer.Close()
	err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		set, err := p.newFDSets(ctx, conn, 1)
		if err != nil {
			return err
		}
		if _, err := conn.AddFD(ctx, set, screenshotName, writer); err != nil {
			return err
		}
		err = conn.Do(ctx, "screendump", object{"filename": fdsetPath(set), "format": "png"}, nil)
		return errors.Join(err, conn.Do(context.WithoutCancel(ctx), "remove-fd", object{"fdset-id": set}, nil))
	})
	if err != nil {
		return nil, err
	}
	picture, err := io.ReadAll(io.LimitReader(io.NewSectionReader(file, 0, maxScreenshot+1), maxScreenshot+1))
	if err == nil && len(picture) > maxScreenshot {
		err = fmt.Errorf("the file is longer than %d bytes", maxScreenshot)
	}
	return picture, err
}
