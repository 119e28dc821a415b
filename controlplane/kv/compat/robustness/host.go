package robustness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// memberHost is the environment of one member: a network namespace, a file system, and at most one process at a time.
type memberHost struct {
	id      int
	dir     string // mount point of the member's file system
	log     string
	process *exec.Cmd
	exited  chan struct{} // closed when process has ended
}

// diskBytes is the size of a host's file system in bytes; its image file is sparse.
const diskBytes = 1 << 30

func address(id int) string { return fmt.Sprintf("10.93.%d.2", id) }

// newMemberHost creates the host of the member id, with its files beneath dir.
func newMemberHost(dir string, id int) (*memberHost, error) {
	h := &memberHost{id: id, dir: filepath.Join(dir, fmt.Sprintf("member-%d", id)), log: filepath.Join(dir, fmt.Sprintf("member-%d.log", id))}
	image := h.dir + ".img"
	if err := os.Mkdir(h.dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return nil, err
	}
	if err := os.Truncate(image, diskBytes); err != nil {
		return nil, err
	}
	err := tools(
		"mkfs.ext4 -q -F -E lazy_itable_init=1,lazy_journal_init=1,nodiscard "+image,
		"mount -o loop "+image+" "+h.dir,
		fmt.Sprintf("ip netns add m%d", id),
		fmt.Sprintf("ip link add v%d type veth peer name eth0 netns m%d", id, id),
		fmt.Sprintf("ip addr add 10.93.%d.1/30 dev v%d", id, id),
		fmt.Sprintf("ip link set v%d up", id),
		fmt.Sprintf("ip -n m%d addr add %s/30 dev eth0", id, address(id)),
		fmt.Sprintf("ip -n m%d link set lo up", id),
		fmt.Sprintf("ip -n m%d link set eth0 up", id),
		fmt.Sprintf("ip -n m%d route add default via 10.93.%d.1", id, id),
	)
	if err != nil {
		return nil, errors.Join(err, h.remove())
	}
	return h, nil
}

// remove removes the host. The host may be incomplete, if newMemberHost failed.
func (h *memberHost) remove() error {
	h.thaw()
	h.kill()
	err := unix.Unmount(h.dir, 0)
	if errors.Is(err, unix.EINVAL) {
		err = nil // it was not mounted
	}
	// The link is deleted before the namespace: deleting the namespace alone would delete the link only after a delay.
	tool("ip", "link", "del", fmt.Sprintf("v%d", h.id))
	tool("ip", "netns", "del", fmt.Sprintf("m%d", h.id))
	return err
}

// start starts the member's process with the command line argv. The member must not be running.
func (h *memberHost) start(argv []string) error {
	log, err := os.OpenFile(h.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	fmt.Fprintf(log, "=== %s %q\n", time.Now().Format(time.StampMilli), argv)
	// ip netns exec would run the member in a copy of this mount namespace, and that copy would keep a failed file
	// system mounted. nsenter does not copy the mount namespace.
	c := exec.Command("nsenter", append([]string{fmt.Sprintf("--net=/run/netns/m%d", h.id), "--"}, argv...)...)
	c.Stdout, c.Stderr, c.Dir = log, log, h.dir
	c.Env = append(os.Environ(), "GOTRACEBACK=all")
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.Start(); err != nil {
		return fmt.Errorf("start member %d: %w", h.id, err)
	}
	h.process, h.exited = c, make(chan struct{})
	go func(ended chan struct{}) {
		c.Wait()
		close(ended)
	}(h.exited)
	return nil
}

// running reports whether the member's process exists and has not ended.
func (h *memberHost) running() bool {
	if h.process == nil {
		return false
	}
	select {
	case <-h.exited:
		return false
	default:
		return true
	}
}

func (h *memberHost) signal(s syscall.Signal) {
	if h.running() {
		h.process.Process.Signal(s)
	}
}

// kill sends SIGKILL to the member and waits until it has ended.
func (h *memberHost) kill() {
	h.signal(syscall.SIGKILL)
	if h.process != nil {
		<-h.exited
	}
}

// stopTimeout is how long a member may take to stop after SIGTERM.
const stopTimeout = 15 * time.Second

// stop sends SIGTERM to the member. A member that does not stop in time is killed, which is an error.
func (h *memberHost) stop() error {
	if h.process == nil {
		return nil
	}
	h.signal(syscall.SIGTERM)
	h.signal(syscall.SIGCONT)
	select {
	case <-h.exited:
		return nil
	case <-time.After(stopTimeout):
		h.kill()
		return fmt.Errorf("member %d did not stop in %s", h.id, stopTimeout)
	}
}

// freeze blocks all writes to the host's file system for the duration hold, and returns immediately. A separate process
// ends the freeze, even if this process ends earlier. This matters because a process that waits for a frozen disk
// cannot be killed.
func (h *memberHost) freeze(hold time.Duration) error {
	c := exec.Command("sh", "-c", fmt.Sprintf("fsfreeze -f %s && sleep %.3f; fsfreeze -u %s", h.dir, hold.Seconds(), h.dir))
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return fmt.Errorf("freeze disk of member %d: %w", h.id, err)
	}
	go c.Wait()
	return nil
}

// thaw ends a freeze, if there is one.
func (h *memberHost) thaw() { tool("fsfreeze", "-u", h.dir) }

// The ioctl that shuts down an ext4 file system immediately, as in a power failure (linux/fs/ext4/ext4.h).
const (
	ext4Shutdown   = 0x8004587d // EXT4_IOC_SHUTDOWN
	ext4NoLogFlush = 2          // EXT4_GOING_FLAGS_NOLOGFLUSH
)

// failPower simulates a power failure: it kills the member and discards data that the member has not synced. It kills
// the member first, since an fsync that runs while the file system shuts down may report success. With a real disk this
// cannot happen.
func (h *memberHost) failPower() error {
	h.kill()
	d, err := os.Open(h.dir)
	if err != nil {
		return err
	}
	err = unix.IoctlSetPointerInt(int(d.Fd()), ext4Shutdown, ext4NoLogFlush)
	d.Close()
	if err != nil {
		return fmt.Errorf("fail the disk of member %d: %w", h.id, err)
	}
	return tools("umount "+h.dir, "mount -o loop "+h.dir+".img "+h.dir)
}

// dropBetween drops the packets from one member to another. The parameters are the IDs of the sending and the receiving
// member.
func dropBetween(from, to int) error {
	return tool("iptables", "-w", "-I", "FORWARD", "-s", address(from), "-d", address(to), "-j", "DROP")
}

// restoreLinks ends the packet loss that dropBetween has caused: it removes all rules that dropBetween added.
func restoreLinks() error { return tool("iptables", "-w", "-F", "FORWARD") }
