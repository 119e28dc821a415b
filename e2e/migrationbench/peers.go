package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/dhcp"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	bridge = "br0"
	// namespaceName is a name of ip-netns(8) for the network namespace of this process, in which all peers run.
	namespaceName = "plain"
	// firstGuest is the last byte of the address of the neighbour. The guests that move have the next ones.
	firstGuest, lastGuest = 10, 60
	// filledMiB is the size of the data that a guest writes to its disk before it is moved.
	filledMiB = 64
)

// peers holds what the guests of QEMU by hand and of libvirt share: a bridge, to which the guests of both hosts are
// attached, a DHCP server, and a neighbour.
type peers struct {
	b         *bench
	cmdline   string
	responder *dhcp.Responder
	neighbour neighbour
	pinger    *process
	guests    int // number of addresses that were used
	libvirt   *libvirt.Daemon
	second    *second
}

func newPeers(ctx context.Context, b *bench) (_ *peers, err error) {
	p := &peers{b: b}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.cmdline, err = onehost.Cmdline(b.guest); err != nil {
		return nil, err
	}
	if err := commands(ctx, "ip link add "+bridge+" mtu 1450 type bridge mcast_snooping 0", "ip address add 10.9.0.1/24 dev "+bridge,
		"ip link set "+bridge+" up", fmt.Sprintf("ip netns attach %s %d", namespaceName, os.Getpid())); err != nil {
		return nil, err
	}
	p.responder = dhcp.New(namespaceName, bridge, slog.New(slog.DiscardHandler))
	subnet := cloud.HostSubnet{ID: "plain", CIDR: netip.MustParsePrefix("10.9.0.0/24"), Gateway: addressOf(1), DHCP: true}
	for number := firstGuest; number <= lastGuest; number++ {
		subnet.Ports = append(subnet.Ports, cloud.HostPort{
			ID: cloud.PortID(fmt.Sprintf("port-%d", number)), Device: fmt.Sprintf("p%d", number), MAC: macOf(number), IP: addressOf(number),
		})
	}
	if err := p.responder.Set(dhcp.Subnet{HostSubnet: subnet, MTU: 1450, Domain: "bench.internal"}); err != nil {
		return nil, err
	}
	if p.libvirt, err = p.startLibvirt(ctx); err != nil {
		return nil, err
	}
	if p.second, err = startSecond(ctx, b.dir); err != nil {
		return nil, err
	}
	number := p.next()
	if p.pinger, err = p.start(ctx, qemu{number: number, memoryMiB: neighbourMiB}); err != nil {
		return nil, err
	}
	p.neighbour = neighbour{namespace: "/run/netns/" + namespaceName, address: addressOf(number).String()}
	return p, p.neighbour.await(ctx)
}

func (p *peers) startLibvirt(ctx context.Context) (*libvirt.Daemon, error) {
	dir := filepath.Join(p.b.dir, "libvirt-1")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	return libvirt.Start(ctx, dir)
}

// next returns the number of the next guest, by which its address and its MAC address differ from those of others.
func (p *peers) next() int {
	p.guests++
	return firstGuest + p.guests - 1
}

func addressOf(number int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(number)}) }

func macOf(number int) cloud.MAC { return cloud.MAC{2, 0, 0, 9, 0, byte(number)} }

// await waits until the guest answers.
func (n neighbour) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	return lab.Until(ctx, "the guest at "+n.address+" answers", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, err := n.run(ctx, "true")
		return err
	})
}

// fill writes random data to the first disk of the guest.
func (n neighbour) fill(ctx context.Context) error {
	_, err := n.run(ctx, fmt.Sprintf("dd if=/dev/urandom of=/dev/vda bs=1M count=%d conv=fsync 2>/dev/null", filledMiB))
	return err
}

// close ends all guests and libvirt.
func (p *peers) close() error {
	var errs []error
	if p.pinger != nil {
		p.pinger.kill()
	}
	if p.responder != nil {
		p.responder.Close()
	}
	if p.second != nil {
		errs = append(errs, p.second.close())
	}
	if p.libvirt != nil {
		errs = append(errs, p.libvirt.Close())
	}
	return errors.Join(errs...)
}

// commands runs programs one after the other. Words are separated by spaces.
func commands(ctx context.Context, lines ...string) error {
	for _, l := range lines {
		if _, err := output(ctx, strings.Fields(l)...); err != nil {
			return err
		}
	}
	return nil
}
