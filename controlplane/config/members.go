package config

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// InitialMembers returns the members in Cluster or, if Cluster is empty, this member alone.
func (c *Config) InitialMembers() Members {
	if len(c.Cluster) > 0 {
		return c.Cluster
	}
	return Members{c.NodeID: c.Listen}
}

// MemberIDs returns the IDs of the members in InitialMembers, in ascending order.
func (c *Config) MemberIDs() []uint64 { return slices.Sorted(maps.Keys(c.InitialMembers())) }

// Address returns the host:port on which this member serves the given port.
func (c *Config) Address(port uint16) string {
	return net.JoinHostPort(c.Listen, strconv.Itoa(int(port)))
}

// ClientURL returns the URL of the gRPC port of the member at the address host. All members use the same ports.
func (c *Config) ClientURL(host string) string {
	return c.TLS.Scheme() + "://" + net.JoinHostPort(host, strconv.Itoa(int(c.Ports.GRPC)))
}

// SeedAddresses returns the host:port of the peer ports of the members listed in Join and Cluster, without this member.
func (c *Config) SeedAddresses() []string {
	var out []string
	port := strconv.Itoa(int(c.Ports.Peers))
	for _, host := range c.Join {
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), port)
		}
		out = append(out, host)
	}
	for _, id := range slices.Sorted(maps.Keys(c.Cluster)) {
		if id != c.NodeID {
			out = append(out, net.JoinHostPort(c.Cluster[id], port))
		}
	}
	return out
}

// AgentAddresses returns the host:port of the agent ports of the members listed in Join. These ports accept join
// tokens.
func (c *Config) AgentAddresses() (out []string) {
	for _, host := range c.Join {
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		out = append(out, net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(int(c.Ports.Agents))))
	}
	return out
}

// Addresses returns a map from member ID to the address of the member with the given port, as host:port.
func (m Members) Addresses(port uint16) map[uint64]string {
	out := make(map[uint64]string, len(m))
	for id, host := range m {
		out[id] = net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	return out
}

// Members maps member IDs to IP addresses. As a flag it is written as 1=10.0.0.1,2=10.0.0.2.
type Members map[uint64]string

var _ pflag.Value = (*Members)(nil)

// Set implements pflag.Value. It replaces m by the members in text.
func (m *Members) Set(text string) error {
	out := Members{}
	for _, pair := range strings.Split(text, ",") {
		id, host, ok := strings.Cut(strings.TrimSpace(pair), "=")
		n, err := strconv.ParseUint(id, 10, 63)
		if !ok || err != nil || host == "" {
			return fmt.Errorf("want ID=ADDRESS,…, got %q", pair)
		}
		if out[n] != "" {
			return fmt.Errorf("member %d is listed twice", n)
		}
		out[n] = host
	}
	*m = out
	return nil
}

// String implements pflag.Value.
func (m *Members) String() string {
	var pairs []string
	for _, id := range slices.Sorted(maps.Keys(*m)) {
		pairs = append(pairs, fmt.Sprintf("%d=%s", id, (*m)[id]))
	}
	return strings.Join(pairs, ",")
}

// Type implements pflag.Value.
func (m *Members) Type() string { return "ID=ADDRESS,…" }
