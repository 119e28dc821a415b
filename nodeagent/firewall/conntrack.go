package firewall

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Attributes of connection-tracking messages that package nl does not define
// (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaProtoICMPType   = 5
	ctaProtoICMPCode   = 6
	ctaProtoICMPv6Type = 8
	ctaProtoICMPv6Code = 9
)

// connectionCount is the file with the number of tracked connections of the reader's network namespace.
const connectionCount = "/proc/sys/net/netfilter/nf_conntrack_count"

const conntrackMessage = 1 << 8 // NFNL_SUBSYS_CTNETLINK

// revoke deletes the tracked connections of the namespace that p does not permit. The rules must be in effect, because
// packets re-create a connection that the rules permit.
func revoke(ctx context.Context, ns netns.NsHandle, p *policy, r *Result) error {
	return revokeOf(ctx, ns, p, nil, r)
}

// revokeOf is like revoke, but only for connections from or to an address in only. If only is nil, it is for all
// connections. ns must be the calling thread's namespace. If ns has no connections, revokeOf does not list them,
// because the kernel would search the connections of all namespaces. The search takes about 2 ms for each IP version on
// a host without connections.
func revokeOf(ctx context.Context, ns netns.NsHandle, p *policy, only map[netip.Addr]bool, r *Result) error {
	if mutant.On(mutant.KeepRevoked) {
		return nil
	}
	count, err := readNumber(connectionCount)
	if err != nil {
		return fmt.Errorf("count connections: %w", err)
	}
	if count == 0 {
		return nil
	}
	if p.local, err = localAddresses(ns); err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	if deadline, ok := ctx.Deadline(); ok {
		limit := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		if err := errors.Join(socket.SetSendTimeout(&limit), socket.SetReceiveTimeout(&limit)); err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
	}
	sockets := map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: socket}}
	forbids := func(f *flow) bool {
		return (only == nil || only[f.source] || only[f.destination]) && !p.permits(f)
	}
	for _, version := range []uint8{unix.AF_INET, unix.AF_INET6} {
		if only != nil && !hasFamily(only, version == unix.AF_INET6) {
			continue
		}
		forbidden, err := forbiddenFlows(ctx, sockets, version, forbids)
		if err != nil {
			return fmt.Errorf("list connections: %w", err)
		}
		for _, attributes := range forbidden {
			if err := ctx.Err(); err != nil {
				return err
			}
			remove := conntrackRequest(sockets, version, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
			remove.AddRawData(attributes)
			_, err := remove.Execute(unix.NETLINK_NETFILTER, 0)
			if errors.Is(err, syscall.ENOENT) {
				continue
			}
			if err != nil {
				return fmt.Errorf("delete a connection: %w", err)
			}
			r.Writes++
			r.Revoked++
		}
	}
	return nil
}

// hasFamily reports whether one of the addresses is of an IP version.
func hasFamily(addresses map[netip.Addr]bool, ipv6 bool) bool {
	for a := range addresses {
		if a.Is6() == ipv6 {
			return true
		}
	}
	return false
}

// localAddresses returns the addresses of the namespace.
func localAddresses(ns netns.NsHandle) (map[netip.Addr]bool, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	list, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, err
	}
	local := map[netip.Addr]bool{}
	for i := range list {
		if a, ok := netip.AddrFromSlice(list[i].IP); ok {
			local[a.Unmap()] = true
		}
	}
	return local, nil
}

func conntrackRequest(sockets map[int]*nl.SocketHandle, version uint8, operation, flags int) *nl.NetlinkRequest {
	request := nl.NewNetlinkRequest(conntrackMessage|operation, flags)
	request.Sockets = sockets
	request.AddData(&nl.Nfgenmsg{NfgenFamily: version, Version: nl.NFNETLINK_V0})
	return request
}

// forbiddenFlows returns the attributes of the entries for which forbids returns true. A dump that concurrent changes
// interrupted is repeated, because it may lack entries. If the tenth dump is interrupted too, its entries are returned,
// so that a VPC with constant changes does not prevent the deletion of the others.
func forbiddenFlows(
	ctx context.Context, sockets map[int]*nl.SocketHandle, version uint8, forbids func(*flow) bool,
) ([][]byte, error) {
	for attempt := 1; ; attempt++ {
		var forbidden [][]byte
		var parsing error
		dump := conntrackRequest(sockets, version, nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
		err := dump.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
			attributes := message[nl.SizeofNfgenmsg:]
			f, err := parseFlow(attributes)
			if err != nil {
				parsing = err
			} else if forbids(f) {
				forbidden = append(forbidden, attributes)
			}
			return true
		})
		if errors.Is(err, nl.ErrDumpInterrupted) {
			if err = ctx.Err(); err == nil && attempt < 10 {
				continue
			}
		}
		return forbidden, errors.Join(err, parsing)
	}
}

// parseFlow returns the flow of an entry of the connection tracking table.
func parseFlow(attributes []byte) (*flow, error) {
	list, err := nl.ParseRouteAttr(attributes)
	if err != nil {
		return nil, err
	}
	var original, reply tuple
	var mark uint32
	for _, attribute := range list {
		switch attribute.Attr.Type & nl.NLA_TYPE_MASK {
		case nl.CTA_TUPLE_ORIG:
			err = errors.Join(err, original.parse(attribute.Value))
		case nl.CTA_TUPLE_REPLY:
			err = errors.Join(err, reply.parse(attribute.Value))
		case nl.CTA_MARK:
			if len(attribute.Value) >= 4 {
				mark = binary.BigEndian.Uint32(attribute.Value)
			}
		}
	}
	if err == nil && (!original.source.IsValid() || !reply.source.IsValid()) {
		err = errors.New("an entry without addresses")
	}
	return &flow{
		source: original.source, destination: reply.source,
		protocol: original.protocol, port: reply.sourcePort,
		icmpType: original.icmpType, icmpCode: original.icmpCode,
		fromPort: mark&fromPort != 0,
	}, err
}

// tuple has the fields of one direction of a connection. The destination address follows from the other direction.
type tuple struct {
	source             netip.Addr
	protocol           uint8
	sourcePort         uint16
	icmpType, icmpCode uint8
}

func (t *tuple) parse(value []byte) error {
	parts, err := nl.ParseRouteAttr(value)
	if err != nil {
		return err
	}
	for _, part := range parts {
		fields, err := nl.ParseRouteAttr(part.Value)
		if err != nil {
			return err
		}
		for _, field := range fields {
			switch part.Attr.Type & nl.NLA_TYPE_MASK {
			case nl.CTA_TUPLE_IP:
				t.parseAddress(field)
			case nl.CTA_TUPLE_PROTO:
				t.parseProtocol(field)
			}
		}
	}
	return nil
}

func (t *tuple) parseAddress(field syscall.NetlinkRouteAttr) {
	switch field.Attr.Type & nl.NLA_TYPE_MASK {
	case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
		t.source, _ = netip.AddrFromSlice(field.Value)
	}
}

func (t *tuple) parseProtocol(field syscall.NetlinkRouteAttr) {
	kind := field.Attr.Type & nl.NLA_TYPE_MASK
	switch {
	case kind == nl.CTA_PROTO_SRC_PORT && len(field.Value) >= 2:
		t.sourcePort = binary.BigEndian.Uint16(field.Value)
	case len(field.Value) < 1:
	case kind == nl.CTA_PROTO_NUM:
		t.protocol = field.Value[0]
	case kind == ctaProtoICMPType, kind == ctaProtoICMPv6Type:
		t.icmpType = field.Value[0]
	case kind == ctaProtoICMPCode, kind == ctaProtoICMPv6Code:
		t.icmpCode = field.Value[0]
	}
}
