package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/dhcpv6/nclient6"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/sys/unix"
)

// lease6 is an IPv6 address that a DHCPv6 server has assigned.
type lease6 struct {
	address net.IP
	reply   *dhcpv6.Message
	renew   time.Duration // after the reply
	valid   time.Duration // after the reply
}

// runDHCPv6 is the DHCPv6 client of an interface (Debian's busybox has none). It waits until a router advertises
// that addresses come from DHCPv6, adds the assigned address to the interface, and renews the lease, until ctx ends. It
// uses only the address: resolvers and the host name come from DHCPv4.
func (m *machine) runDHCPv6(ctx context.Context, name string) {
	reported := ""
	for wait(ctx, pollIPv6) {
		if err := m.keepLease6(ctx, name); err != nil && ctx.Err() == nil && err.Error() != reported {
			reported = err.Error()
			m.say("ERROR network: DHCPv6 of %s: %v", name, err)
		}
	}
}

// keepLease6 gets an address and renews it. It returns after it has removed the address from the interface, or at once
// if no router advertises DHCPv6 or no server answers.
func (m *machine) keepLease6(ctx context.Context, name string) error {
	asked, err := managed(name)
	if err != nil || !asked {
		return err
	}
	card, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	client, err := nclient6.New(name, nclient6.WithTimeout(time.Second), nclient6.WithRetry(3))
	if err != nil {
		return nil // the link-local address is not usable yet
	}
	defer client.Close()
	lease, err := requestLease6(ctx, client, card.HardwareAddr)
	if errors.Is(err, nclient6.ErrNoResponse) {
		return nil // no server answers
	}
	if err != nil {
		return err
	}
	if err := changeAddress6("add", lease.address, name); err != nil {
		return err
	}
	address, expires := lease.address, time.Now().Add(lease.valid)
	for pause := lease.renew; time.Now().Before(expires); {
		if !wait(ctx, min(pause, time.Until(expires))) {
			return nil
		}
		next, err := renewLease6(ctx, client, lease)
		switch {
		case err != nil: // no server answers, or the reply has no address
			pause = max(lease.renew/10, time.Second)
			continue
		case !next.address.Equal(address):
			return changeAddress6("del", address, name)
		}
		lease, pause, expires = next, next.renew, time.Now().Add(next.valid)
	}
	return changeAddress6("del", address, name)
}

// requestLease6 asks for an address. The client's identifier is derived from the MAC address (DUID-LL), so that it is
// the same after each boot.
func requestLease6(ctx context.Context, client *nclient6.Client, mac net.HardwareAddr) (lease6, error) {
	id := dhcpv6.WithClientID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: mac})
	offer, err := client.Solicit(ctx, id)
	if err != nil {
		return lease6{}, err
	}
	reply, err := client.Request(ctx, offer)
	if err != nil {
		return lease6{}, err
	}
	return newLease6(reply)
}

// renewLease6 asks the server that has assigned a lease to extend it.
func renewLease6(ctx context.Context, client *nclient6.Client, last lease6) (lease6, error) {
	m, err := dhcpv6.NewMessage()
	if err != nil {
		return lease6{}, err
	}
	m.MessageType = dhcpv6.MessageTypeRenew
	m.AddOption(dhcpv6.OptElapsedTime(0))
	for _, code := range []dhcpv6.OptionCode{dhcpv6.OptionClientID, dhcpv6.OptionServerID, dhcpv6.OptionIANA} {
		m.AddOption(last.reply.GetOneOption(code))
	}
	reply, err := client.SendAndRead(ctx, client.RemoteAddr(), m, nclient6.IsMessageType(dhcpv6.MessageTypeReply))
	if err != nil {
		return lease6{}, err
	}
	return newLease6(reply)
}

// newLease6 returns the lease in a reply. A server may send the former address with the lifetime 0 beside the new one.
func newLease6(reply *dhcpv6.Message) (lease6, error) {
	ia := reply.Options.OneIANA()
	if ia == nil || reply.GetOneOption(dhcpv6.OptionClientID) == nil || reply.GetOneOption(dhcpv6.OptionServerID) == nil {
		return lease6{}, errors.New("the reply has no address or identifier")
	}
	for _, a := range ia.Options.Addresses() {
		if a.ValidLifetime > 0 {
			l := lease6{address: a.IPv6Addr, reply: reply, renew: ia.T1, valid: a.ValidLifetime}
			if l.renew == 0 { // the client's choice, RFC 8415 section 21.4
				l.renew = l.valid / 2
			}
			return l, nil
		}
	}
	return lease6{}, fmt.Errorf("the reply has no address: %v", ia.Options.Status())
}

// changeAddress6 adds or deletes an address. The prefix length is 128, because DHCPv6 does not say which addresses are
// on the link; router advertisements do (RFC 8415 section 18.2.10.1). The function reap may collect the exit status, as
// process 1 does for all processes. Then the text that busybox prints for each error says whether it succeeded.
func changeAddress6(command string, address net.IP, name string) error {
	out, err := exec.Command("/bin/busybox", "ip", "-6", "addr", command, address.String()+"/128", "dev", name).CombinedOutput()
	if err != nil && (!errors.Is(err, unix.ECHILD) || len(out) > 0) {
		return fmt.Errorf("%s address %s: %w: %s", command, address, err, out)
	}
	return nil
}
