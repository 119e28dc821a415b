package lab

import (
	"errors"
	"fmt"
	"strings"
)

// External is an external network: a bridge to which the interface eth1 of each host leads, and a namespace with the
// network's router, 203.0.113.1, which stands for the internet.
type External struct{ hosts *Hosts }

// ExternalCIDR is the prefix of External, and ExternalRouter the address of its router.
const (
	ExternalCIDR   = "203.0.113.0/24"
	ExternalRouter = "203.0.113.1"
)

// NewExternal connects hosts to an external network.
func NewExternal(h *Hosts) (*External, error) {
	e := &External{h}
	lines := []string{
		"ip link add ext0 type bridge", "ip link set ext0 up",
		"ip netns add internet", "ip link add xer type veth peer name eth0 netns internet", "ip link set xer master ext0 up",
		"ip -n internet addr add " + ExternalRouter + "/24 dev eth0", "ip -n internet link set lo up", "ip -n internet link set eth0 up",
	}
	for _, id := range h.ids {
		lines = append(lines, fmt.Sprintf("ip link add xe%d type veth peer name eth1 netns m%d", id, id),
			fmt.Sprintf("ip link set xe%d master ext0 up", id), fmt.Sprintf("ip -n m%d link set eth1 up", id))
	}
	for _, line := range lines {
		words := strings.Fields(line)
		if err := tool(words[0], words[1:]...); err != nil {
			return nil, errors.Join(err, e.Close())
		}
	}
	return e, nil
}

// Net is the path of the network namespace of the router.
func (*External) Net() string { return netnsDir + "/internet" }

// Connection is the setting `external` of a host.
func (*External) Connection(id int) map[string]any {
	return map[string]any{"internet": map[string]any{
		"interface": "eth1", "address": fmt.Sprintf("203.0.113.%d/24", 10+id), "gateway": ExternalRouter,
	}}
}

// Close removes the network. The programs that use it must have ended.
func (e *External) Close() error {
	for _, id := range e.hosts.ids {
		// Errors are ignored, because NewExternal may have failed before it created the devices.
		_ = tool("ip", "link", "del", fmt.Sprintf("xe%d", id))
	}
	_ = tool("ip", "link", "del", "xer")
	_ = tool("ip", "link", "del", "ext0")
	return tool("ip", "netns", "del", "internet")
}
