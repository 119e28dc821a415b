package main

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxFrame      = 65536   // bytes of a captured frame
	captureBuffer = 4 << 20 // bytes of frames that were received and not read yet
)

// sendCommand sends the Ethernet frames in the standard input, one per line in hexadecimal digits, in their order. It
// sends each frame as often as the argument COPIES says, by default once.
func sendCommand(args []string, in io.Reader, out io.Writer) error {
	if len(args) < 1 || len(args) > 2 {
		return errUsage
	}
	copies := 1
	if len(args) == 2 {
		n, err := strconv.Atoi(args[1])
		if err != nil || n < 1 {
			return fmt.Errorf("%w: %q is no number of copies", errUsage, args[1])
		}
		copies = n
	}
	frames, err := parseFrames(in)
	if err != nil {
		return err
	}
	fd, index, err := openLink(args[0])
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, frame := range frames {
		for range copies {
			if err := sendFrame(fd, index, frame); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(out, "sent %d frames %d times\n", len(frames), copies)
	return nil
}

// sendFrame sends one frame. It waits while the queue of the device is full.
func sendFrame(fd, index int, frame []byte) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index, Halen: 6})
		if !errors.Is(err, unix.ENOBUFS) || time.Now().After(end) {
			return err
		}
	}
}

// parseFrames parses lines of hexadecimal digits. It skips empty lines.
func parseFrames(in io.Reader) ([][]byte, error) {
	var frames [][]byte
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 2*maxFrame+2)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		frame := make([]byte, hex.DecodedLen(len(line)))
		if _, err := hex.Decode(frame, line); err != nil {
			return nil, fmt.Errorf("frame %d: %w", len(frames)+1, err)
		}
		if len(frame) < 14 {
			return nil, fmt.Errorf("frame %d has %d bytes, fewer than an Ethernet header", len(frames)+1, len(frame))
		}
		frames = append(frames, frame)
	}
	return frames, lines.Err()
}

// captureCommand prints the frames that an interface receives, or with "any" all interfaces, one per line in
// hexadecimal digits. It ends after the first frame that contains TEXT, and fails if no such frame arrives within
// SECONDS. Before the first frame it prints the line "capturing", so that the caller knows when the capture has begun.
// The kernel removes the VLAN tag from frames that it shows to programs.
func captureCommand(args []string, _ io.Reader, out io.Writer) error {
	if len(args) != 3 || args[2] == "" {
		return errUsage
	}
	seconds, err := strconv.Atoi(args[1])
	if err != nil || seconds < 1 {
		return fmt.Errorf("%w: %q is no number of seconds", errUsage, args[1])
	}
	fd, _, err := openLink(args[0])
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	tick := unix.NsecToTimeval(int64(100 * time.Millisecond))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	if _, err := fmt.Fprintln(out, "capturing"); err != nil {
		return err
	}
	buffer := make([]byte, maxFrame)
	for end := time.Now().Add(time.Duration(seconds) * time.Second); time.Now().Before(end); {
		n, from, err := unix.Recvfrom(fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if link, ok := from.(*unix.SockaddrLinklayer); !ok || link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if _, err := fmt.Fprintf(out, "%x\n", buffer[:n]); err != nil {
			return err
		}
		if bytes.Contains(buffer[:n], []byte(args[2])) {
			return nil
		}
	}
	return fmt.Errorf("no frame with %q has arrived within %d s", args[2], seconds)
}

// openLink opens a packet socket of an interface and returns it with the index of the interface. For "any", the
// socket receives the frames of all interfaces, and the index is 0.
func openLink(name string) (fd, index int, err error) {
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
	// Without a protocol, the socket receives nothing before bind names the interface. With one, it would have received
	// frames of all interfaces until then.
	fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, fmt.Errorf("open packet socket: %w", err)
	}
	if name != "any" {
		index, err = linkIndex(fd, name)
	}
	if err == nil {
		err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}))
	}
	if err != nil {
		unix.Close(fd)
		return -1, 0, err
	}
	return fd, index, nil
}

func linkIndex(fd int, name string) (int, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, fmt.Errorf("interface %q: %w", name, err)
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request); err != nil {
		return 0, fmt.Errorf("interface %q: %w", name, err)
	}
	return int(request.Uint32()), nil
}
