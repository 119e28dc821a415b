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

// announce sends gratuitous ARP for the external addresses among the keys of added items. Each address is announced by
// an ARP request and an ARP reply (RFC 5227, section 3), because some systems accept only one of the two. announce also
// sends gratuitous ARP for those items of want whose last announcement failed, or was skipped because the interface had
// no carrier.
func (a *application) announce(added []string, want *network, r *Result) error {
	var failed error
	for key := range want.items {
		if a.unannounced[key] && !slices.Contains(added, key) {
			added = append(added, key)
		}
	}
	for i := range a.externals {
		x := &a.externals[i]
		var list []netip.Addr
		var keys []string
		for _, key := range added {
			fields := strings.Fields(key)
			switch {
			case !strings.HasSuffix(key+" ", " dev "+x.device+" ") && !strings.Contains(key, " dev "+x.device+" "):
			case fields[0] == "address":
				list, keys = append(list, netip.MustParsePrefix(fields[1]).Addr()), append(keys, key)
			case fields[0] == "neighbour":
				list, keys = append(list, netip.MustParseAddr(fields[2])), append(keys, key)
			}
		}
		if len(list) == 0 {
			continue
		}
		sent, err := a.edge.sendARP(x.device, list)
		for _, key := range keys {
			delete(a.unannounced, key)
			if !sent {
				a.unannounced[key] = true
			}
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("announce addresses on external network %s: %w", x.name, err))
			continue
		}
		if sent {
			r.Announced = append(r.Announced, list...)
		}
	}
	slices.SortFunc(r.Announced, netip.Addr.Compare)
	return failed
}

// sendARP sends gratuitous ARP for addresses from a device. It sends nothing and returns false if the device has no
// carrier, for example because the host's interface is down: the kernel would drop the frames.
func (s *space) sendARP(device string, list []netip.Addr) (sent bool, err error) {
	link, err := s.LinkByName(device)
	if err != nil || link.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
		return false, err
	}
	err = s.In(func() error {
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // protocol 0 receives nothing
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		to := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}
		for _, address := range list {
			for _, operation := range []uint16{1, 2} { // request, reply
				if err := unix.Sendto(socket, frameARP(link.Attrs().HardwareAddr, address, operation), 0, to); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return err == nil, err
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
