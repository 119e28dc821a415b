// Package dhcp gives guests their addresses. For each subnet on a host, a [Responder] answers the DHCPv4, DHCPv6 and
// router solicitation messages of the subnet's ports on this host, and sends IPv6 router advertisements to them.
//
// A guest gets exactly the addresses of its port. The answer depends on the request and on the wanted state of the
// subnet ([Subnet]) only: there are no leases. All hosts answer as the same server, with the gateway's addresses, so a
// VM that moved to another host renews its addresses there.
//
// The functions answer4, answer6 and advertisement are pure: a packet and a table in, a packet out. [Responder] does
// the input and output.
//
// # Decisions
//
//   - Requests are read from packet sockets, because a UDP socket does not report the Ethernet source address. The
//     firewall drops frames with another source address than the port's, so this address identifies the port. The
//     hardware address in the message does not, and a message in which the two differ is ignored. An attacker can
//     therefore neither use up the rate limit of another port nor make the responder send to it.
//   - Replies are Ethernet frames to the port's MAC address, also if the IP destination is a broadcast or multicast
//     address. A client without an address cannot answer ARP (RFC 2131 section 4.1), and no other port has to see the
//     reply.
//   - UDP checksums of requests are not verified: frames from a veth device or a tap often carry an unfinished
//     checksum.
//   - A UDP socket that discards all data is bound to port 67. Without it the kernel would answer a unicast renewal
//     with "port unreachable".
//   - Every DHCPv4 reply has all options, requested or not. Common clients do not request the MTU, but use it.
//   - IPv6: router advertisements announce the default route, the on-link prefix without autonomous configuration, the
//     MTU, and that addresses come from DHCPv6 (flag M). Autonomous configuration would give the guest an address that
//     is not its port's. A guest without a DHCPv6 client therefore has no IPv6 address.
//   - Unsolicited advertisements are sent to each port of this host and not to the subnet: every host does so for its
//     own ports.
//   - A DHCPv4 or DHCPv6 address is valid for an hour and router advertisements for 2.5 hours, so guests lose them
//     if the agent is stopped for longer. Stopping an agent sends nothing: guests keep their configuration. Nor are
//     routers withdrawn when a subnet loses its IPv6 prefix: guests drop them when the time has passed.
//
// The package does not configure devices and does not know VMs. The bridge device must have the MAC address
// [cloud.GatewayMAC] and the link-local address that the kernel derives from it (EUI-64, the default).
package dhcp

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Subnet is the wanted state from which a responder answers. If DHCP is false in the HostSubnet, the responder sends
// nothing.
type Subnet struct {
	cloud.HostSubnet
	// MTU is the MTU of the guests' interfaces.
	MTU uint16
	// Domain is the DNS domain of the guests without a dot at its end, such as "shop.internal". It may be empty.
	Domain string
}

// Responder answers the guests of one subnet on this host. Its methods may be called concurrently.
type Responder struct {
	namespace, device string
	log               *slog.Logger
	table             atomic.Pointer[table]

	mu      sync.Mutex
	sockets *sockets       // nil before the first Set and after Close
	running sync.WaitGroup // goroutines that use sockets
}

// The time between unsolicited router advertisements to a port, RFC 4861 section 6.2.1.
const (
	minAdvertisementInterval = 200 * time.Second
	maxAdvertisementInterval = 600 * time.Second
)

// New returns a responder for the bridge device in the named network namespace (as in "ip netns"). It sends and
// receives nothing before Set.
func New(namespace, device string, log *slog.Logger) *Responder {
	return &Responder{namespace: namespace, device: device, log: log.With("namespace", namespace, "device", device)}
}

// Set replaces the state from which the responder answers. The caller must not change s afterwards. When Set returns
// nil, requests of the subnet's ports are answered. Sockets are opened only if there are none, or if the device is a
// different one from the one they were opened on.
func (r *Responder) Set(s Subnet) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.table.Load()
	if old == nil || !reflect.DeepEqual(old.subnet, s) {
		r.table.Store(newTable(s, old))
	}
	at, err := locate(r.namespace, r.device)
	if err != nil {
		return fmt.Errorf("answer DHCP on %s in %s: %w", r.device, r.namespace, err)
	}
	if r.sockets != nil && r.sockets.location == at {
		if !r.table.Load().sameAdvertisement(old) {
			r.sockets.wakeAdvertiser()
		}
		return nil
	}
	r.closeSockets()
	if r.sockets, err = openSockets(r.namespace, r.device); err != nil {
		return fmt.Errorf("answer DHCP on %s in %s: %w", r.device, r.namespace, err)
	}
	open := r.sockets
	r.running.Go(func() { r.serve(open.ipv4, open) })
	r.running.Go(func() { r.serve(open.ipv6, open) })
	r.running.Go(func() { r.advertise(open) })
	return nil
}

// Close stops the responder and waits until its goroutines have ended. Guests are not notified. Close must be called
// before the namespace is deleted, because an open socket keeps a namespace and its devices alive. Set starts the
// responder again.
func (r *Responder) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeSockets()
}

func (r *Responder) closeSockets() {
	if r.sockets != nil {
		r.sockets.close()
		r.running.Wait()
		r.sockets = nil
	}
}

// serve answers the frames that socket receives, until it is closed.
func (r *Responder) serve(socket *os.File, s *sockets) {
	buffer := make([]byte, maxFrame)
	for {
		n, err := socket.Read(buffer)
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.ENETDOWN): // the device was set down or removed; reading continues when it is up again
			r.log.Info("the device of a subnet is down")
		case err != nil:
			r.log.Warn("read DHCP requests", "error", err)
			if !s.wait(time.Second) {
				return
			}
		default:
			if reply := r.answer(buffer[:n]); reply != nil {
				if _, err := socket.Write(reply); err != nil && !errors.Is(err, os.ErrClosed) {
					r.log.Warn("send DHCP reply", "error", err)
				}
			}
		}
	}
}

// answer returns the frame that answers a received frame, or nil. A panic in the parsing of a guest's message is
// logged, because it must not stop the agent.
func (r *Responder) answer(frame []byte) (reply []byte) {
	defer func() {
		if e := recover(); e != nil {
			r.log.Error("panic while answering DHCP", "panic", e, "stack", string(debug.Stack()))
			reply = nil
		}
	}()
	t := r.table.Load()
	p, ok := parseFrame(frame)
	if !ok {
		return nil
	}
	c := t.clients[p.sourceMAC]
	if c == nil || !c.limiter.Allow() {
		return nil
	}
	reply, note := t.answer(c, p)
	if note != "" {
		r.log.Debug(note, "port", c.port.ID) // not above Debug, because guests cause it at any rate within their limit
	}
	return reply
}

// advertise sends router advertisements to all ports: at first, whenever their content changes, and periodically.
func (r *Responder) advertise(s *sockets) {
	for {
		for frame := range r.table.Load().advertisements() {
			if _, err := s.ipv6.Write(frame); err != nil {
				if !errors.Is(err, os.ErrClosed) {
					r.log.Warn("send router advertisement", "error", err)
				}
				break
			}
		}
		if !s.waitAdvertiser(minAdvertisementInterval + rand.N(maxAdvertisementInterval-minAdvertisementInterval)) {
			return
		}
	}
}
