package edge

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// announce sends gratuitous ARP for the external addresses among the keys of added items, as an ARP request and a reply
// (RFC 5227, part 3): some systems accept only one of them.
func (a *application) announce(added []string, r *Result) error {
	var failed error
	for i := range a.externals {
		x := &a.externals[i]
		var list []netip.Addr
		for _, key := range added {
			fields := strings.Fields(key)
			switch {
			case !strings.HasSuffix(key+" ", " dev "+x.device+" ") && !strings.Contains(key, " dev "+x.device+" "):
			case fields[0] == "address":
				list = append(list, netip.MustParsePrefix(fields[1]).Addr())
			case fields[0] == "neighbour":
				list = append(list, netip.MustParseAddr(fields[2]))
			}
		}
		if len(list) == 0 {
			continue
		}
		if err := a.edge.sendARP(x.device, list); err != nil {
			failed = errors.Join(failed, fmt.Errorf("announce addresses on external network %s: %w", x.name, err))
			continue
		}
		r.Announced = append(r.Announced, list...)
	}
	slices.SortFunc(r.Announced, netip.Addr.Compare)
	return failed
}

// sendARP sends gratuitous ARP for addresses from a device.
func (s *space) sendARP(device string, list []netip.Addr) error {
	return s.In(func() error {
		link, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // protocol 0 receives nothing
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		to := &unix.SockaddrLinklayer{Ifindex: link.Index}
		for _, address := range list {
			for _, operation := range []uint16{1, 2} { // request, reply
				if err := unix.Sendto(socket, frameARP(link.HardwareAddr, address, operation), 0, to); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// frameARP returns an Ethernet frame with a gratuitous ARP packet (RFC 826).
func frameARP(mac net.HardwareAddr, address netip.Addr, operation uint16) []byte {
	broadcast := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	frame := slices.Concat(broadcast, mac)
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_ARP)
	frame = binary.BigEndian.AppendUint16(frame, 1) // Ethernet
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP)
	frame = append(frame, 6, 4) // lengths of the addresses
	frame = binary.BigEndian.AppendUint16(frame, operation)
	return slices.Concat(frame, mac, address.AsSlice(), broadcast, address.AsSlice())
}
