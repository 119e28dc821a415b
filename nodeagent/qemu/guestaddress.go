package qemu

import "context"

// maxInterfacesReply is the maximum number of bytes that are read of the list of the guest's network interfaces.
const maxInterfacesReply = 256 << 10

// GuestAddresses returns the addresses of the guest's network interfaces, as its guest agent lists them. A guest can
// return any texts: callers must check them.
func (p *Process) GuestAddresses(ctx context.Context) (all []string, err error) {
	var interfaces []struct {
		Addresses []struct {
			Address string `json:"ip-address"`
		} `json:"ip-addresses"`
	}
	err = p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		g.limit.N = maxInterfacesReply
		return g.call(ctx, guestCallWithin, "guest-network-get-interfaces", nil, &interfaces)
	})
	for _, i := range interfaces {
		for _, a := range i.Addresses {
			all = append(all, a.Address)
		}
	}
	return all, err
}
