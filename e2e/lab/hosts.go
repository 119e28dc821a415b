package lab

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Hosts is a set of network namespaces, one per member, each connected by its own veth pair to the network namespace of
// the process that called NewHosts. That namespace forwards the traffic between members, so Cut can drop it there. When
// it ends, the members' namespaces end too.
type Hosts struct{ ids []int }

// NewHosts creates one network namespace per member id. The calling process must be in its own network and mount
// namespaces; see Again.
func NewHosts(ids ...int) (*Hosts, error) {
	if err := PrivateNetns(); err != nil {
		return nil, err
	}
	h := &Hosts{ids: ids}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("let packets be forwarded: %w", err), h.Close())
	}
	for _, id := range ids {
		for _, line := range []string{
			fmt.Sprintf("ip netns add m%d", id),
			fmt.Sprintf("ip link add v%d type veth peer name eth0 netns m%d", id, id),
			fmt.Sprintf("ip addr add 10.94.%d.1/30 dev v%d", id, id),
			fmt.Sprintf("ip link set v%d up", id),
			fmt.Sprintf("ip -n m%d addr add %s/30 dev eth0", id, h.Address(id)),
			fmt.Sprintf("ip -n m%d link set lo up", id),
			fmt.Sprintf("ip -n m%d link set eth0 up", id),
			fmt.Sprintf("ip -n m%d route add default via 10.94.%d.1", id, id),
		} {
			words := strings.Fields(line)
			if err := tool(words[0], words[1:]...); err != nil {
				return nil, errors.Join(err, h.Close())
			}
		}
	}
	return h, nil
}

// netnsDir is the directory with a file for each network namespace that has a name. `ip netns` mounts them there.
const netnsDir = "/run/netns"

// PrivateNetns mounts an empty file system over netnsDir, so that the process and its children see only the named
// network namespaces that they create, and node agents remove no namespaces of other clouds. The calling process must
// have called PrivateMounts.
func PrivateNetns() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", netnsDir, err)
	}
	if err := unix.Mount("tmpfs", netnsDir, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", netnsDir, err)
	}
	return nil
}

// Address returns the IPv4 address of a member in its namespace.
func (h *Hosts) Address(id int) string { return fmt.Sprintf("10.94.%d.2", id) }

// Net returns the path of a member's network namespace, for Program.Net.
func (h *Hosts) Net(id int) string { return fmt.Sprintf("%s/m%d", netnsDir, id) }

// Cut drops all packets that one member sends to another. Packets in the other direction still arrive.
func (h *Hosts) Cut(from, to int) error {
	return tool("iptables", "-w", "-I", "FORWARD", "-s", h.Address(from), "-d", h.Address(to), "-j", "DROP")
}

// Heal undoes every Cut.
func (h *Hosts) Heal() error { return tool("iptables", "-w", "-F", "FORWARD") }

// Close removes the namespaces and their links. The programs in them must have ended.
func (h *Hosts) Close() error {
	for _, id := range h.ids {
		// Errors are ignored: NewHosts may have failed before it created them, and whatever remains is removed by the
		// kernel when the caller's own namespaces end.
		_ = tool("ip", "link", "del", fmt.Sprintf("v%d", id))
		_ = tool("ip", "netns", "del", fmt.Sprintf("m%d", id))
	}
	if err := unix.Unmount(netnsDir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", netnsDir, err)
	}
	return nil
}
