package nettest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Writes records the changes of devices, addresses, routes, rules, neighbours, forwarding entries, queueing disciplines
// and nftables in a namespace, as the kernel announces them. It omits changes that the kernel makes because of traffic:
// dynamic neighbours and learned forwarding entries. It also omits the settings of bridge ports. The kernel announces
// these again, without a change, when the bridge's forward delay (by default 15 s) has passed since a port was set up.
type Writes struct {
	t       *testing.T
	sockets [2]int // routing and netfilter
}

// groups are the multicast groups of each netlink family that Writes receives.
var groups = [2]struct {
	protocol int
	groups   []int
}{
	{unix.NETLINK_ROUTE, []int{
		unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_TC, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE,
	}},
	{unix.NETLINK_NETFILTER, []int{unix.NFNLGRP_NFTABLES}},
}

// WatchWrites begins to record the changes in a namespace. The recording ends with the test.
func WatchWrites(t *testing.T, namespace string) *Writes {
	t.Helper()
	w := &Writes{t: t, sockets: [2]int{-1, -1}}
	t.Cleanup(func() {
		for _, fd := range w.sockets {
			unix.Close(fd)
		}
	})
	for i, g := range groups {
		require.NoError(t, nsthread.InNamed(namespace, func() (err error) {
			w.sockets[i], err = subscribe(g.protocol, g.groups)
			return err
		}))
	}
	return w
}

// subscribe opens a netlink socket that receives the messages of the groups, in the network namespace of the calling
// thread.
func subscribe(protocol int, groups []int) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return -1, err
	}
	// A change of many elements is many messages.
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	for _, g := range groups {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g))
	}
	return fd, err
}

// Take returns a line for each change since the last call. The kernel announces changes before the call that makes them
// returns, so Take has all changes of calls that have returned.
func (w *Writes) Take() (lines []string) {
	w.t.Helper()
	buffer := make([]byte, 1<<20)
	for i, fd := range w.sockets {
		for {
			n, _, err := unix.Recvfrom(fd, buffer, 0)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			require.NoError(w.t, err, "changes were lost")
			messages, err := syscall.ParseNetlinkMessage(buffer[:n])
			require.NoError(w.t, err)
			for _, m := range messages {
				if line := describe(groups[i].protocol, m); line != "" {
					lines = append(lines, line)
				}
			}
		}
	}
	return lines
}

// Settle discards changes until the kernel has announced none for three seconds. It fails the test after 60 seconds.
// The kernel announces the operational state of a device up to a second after the carrier is on, and for at most 100
// devices in a second.
func (w *Writes) Settle() {
	w.t.Helper()
	const quiet = 3 * time.Second
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		w.Take()
		time.Sleep(quiet)
		if len(w.Take()) == 0 {
			return
		}
	}
	w.t.Fatal("the kernel announces changes all the time")
}

// kinds are the names of messages of NETLINK_ROUTE.
var kinds = map[uint16]string{
	unix.RTM_NEWLINK: "link", unix.RTM_DELLINK: "delete link",
	unix.RTM_NEWADDR: "address", unix.RTM_DELADDR: "delete address",
	unix.RTM_NEWROUTE: "route", unix.RTM_DELROUTE: "delete route",
	unix.RTM_NEWRULE: "rule", unix.RTM_DELRULE: "delete rule",
	unix.RTM_NEWNEIGH: "neighbour", unix.RTM_DELNEIGH: "delete neighbour",
}

// describe returns a line for a message, or "" for a message that Writes omits.
func describe(protocol int, m syscall.NetlinkMessage) string {
	if protocol == unix.NETLINK_NETFILTER {
		return fmt.Sprintf("nftables message %d", m.Header.Type&0xff)
	}
	kind := kinds[m.Header.Type]
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) > 0 && m.Data[0] == unix.AF_BRIDGE {
			return ""
		}
		return fmt.Sprintf("%s of device %s", kind, deviceName(m))
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		const permanent = unix.NUD_PERMANENT | unix.NUD_NOARP
		if len(m.Data) < unix.SizeofNdMsg || binary.NativeEndian.Uint16(m.Data[8:])&permanent == 0 {
			return ""
		}
		if m.Data[0] == unix.AF_BRIDGE {
			return kind + " of a bridge"
		}
		return kind
	}
	if kind == "" {
		return fmt.Sprintf("routing message %d", m.Header.Type)
	}
	return kind
}

func deviceName(m syscall.NetlinkMessage) string {
	attributes, err := syscall.ParseNetlinkRouteAttr(&m)
	if err != nil {
		return "?"
	}
	for _, a := range attributes {
		if a.Attr.Type == unix.IFLA_IFNAME {
			return unix.ByteSliceToString(a.Value)
		}
	}
	return "?"
}
