package netfilter

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
)

// dumpAttempts is the maximum number of times that DeleteConnections reads the list of connections.
const dumpAttempts = 10

// Selection selects the connections for which it returns true.
type Selection func(*netlink.ConntrackFlow) bool

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (s Selection) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool { return s(flow) }

// DeleteConnections deletes the tracked IPv4 connections that s selects, and returns their number. h is a handle of the
// namespace with a socket for NETLINK_NETFILTER. DeleteConnections reads the list again if the list changed meanwhile
// or a selected connection ended by itself, at most 10 times.
func DeleteConnections(ctx context.Context, h *netlink.Handle, s Selection) (deleted int, err error) {
	for range dumpAttempts {
		var n uint
		n, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.FAMILY_V4, s)
		deleted += int(n)
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return deleted, fmt.Errorf("delete connections: %w", err)
	}
	return deleted, nil
}
