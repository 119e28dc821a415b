package ipsec

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Instance returns a text that identifies the running kernel and the network namespace of the calling thread. A restart
// of the host or a new namespace deletes all states and changes the text. So keys that are derived from the text are
// never used again with the same sequence numbers. Instance requires Linux 5.14.
func Instance() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the ID of the boot: %w", err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return "", fmt.Errorf("read the cookie of the network namespace: %w", err)
	}
	return fmt.Sprintf("%s/%x", strings.TrimSpace(string(boot)), cookie), nil
}
