package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/dhcp"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// guestRounds is the maximum number of rounds. A round boots four guests.
const guestRounds = 3

// blockBytes is the number of bytes that a guest writes at a time.
const blockBytes = 65536

// machine is a guest under QEMU's emulation, with its serial port.
type machine struct {
	cmd    *exec.Cmd
	serial io.WriteCloser
	lines  chan string // closed when QEMU has ended
}

// bootGuest starts a guest with one virtio network interface.
func bootGuest(b *bench, p plug, mac cloud.MAC) (*machine, error) {
	cmdline, err := onehost.Cmdline(b.guest)
	if err != nil {
		return nil, err
	}
	args := []string{
		"--net=/run/netns/" + p.namespace, "--", "qemu-system-x86_64", "-nodefaults", "-no-user-config",
		"-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "192", "-smp", "1", "-display", "none", "-no-reboot",
		"-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial",
		"-kernel", filepath.Join(b.guest, "vmlinuz"), "-initrd", filepath.Join(b.guest, "initrd.lz4"),
		"-append", cmdline,
		"-netdev", p.backend + ",id=net0,vhost=off", "-device", "virtio-net-pci,netdev=net0,mac=" + mac.String(),
	}
	m := &machine{cmd: exec.Command("nsenter", args...), lines: make(chan string, 1024)}
	m.cmd.Stderr = os.Stderr
	if p.tap != nil {
		m.cmd.ExtraFiles = []*os.File{p.tap}
	}
	if m.serial, err = m.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := m.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(m.lines)
		for scanner := bufio.NewScanner(output); scanner.Scan(); {
			m.lines <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	return m, nil
}

// await waits for a line of the guest that begins with words, and returns the rest of it.
func (m *machine) await(ctx context.Context, words string) (string, error) {
	for {
		select {
		case line, ok := <-m.lines:
			if !ok {
				return "", fmt.Errorf("the guest ended before it printed %q", words)
			}
			if rest, ok := strings.CutPrefix(line, guest.Prefix+words); ok {
				return rest, nil
			}
		case <-ctx.Done():
			return "", fmt.Errorf("wait for %q of the guest: %w", words, ctx.Err())
		}
	}
}

// start begins to run a shell line in the guest.
func (m *machine) start(line string) error {
	_, err := io.WriteString(m.serial, "run "+line+"\n")
	return err
}

// finish waits until the shell line has ended with exit code 0.
func (m *machine) finish(ctx context.Context) error {
	code, err := m.await(ctx, "RAN rc=")
	if err == nil && code != "0" {
		err = fmt.Errorf("exit code %s", code)
	}
	return err
}

// close kills the guest.
func (m *machine) close() {
	_ = m.cmd.Process.Kill() // it may have ended
	for range m.lines {
	}
	_ = m.cmd.Wait() // the error is that it was killed
}

// plug is the end of a guest's interface that is attached to the network.
type plug struct {
	namespace string   // in which QEMU runs
	backend   string   // options of QEMU's -netdev
	tap       *os.File // file descriptor 3 of QEMU, if not nil
}

// guestNet connects guests to a network.
type guestNet interface {
	// plug makes the end of the interface of a port that is attached to the network. The caller closes the tap when
	// QEMU has started.
	plug(ctx context.Context, number int) (plug, error)
	// ready is called when QEMU has started.
	ready(ctx context.Context) error
}

// measureGuests measures the throughput of TCP between two guests on one host.
func measureGuests(ctx context.Context, b *bench) (err error) {
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return err
	}
	s, err := newSite(ctx, "g")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	h := s.hosts[0]
	vpc := newVPC("guests", 100)
	vpc.Groups = []cloud.HostGroup{groupOf("measured", 9, "members")}
	vpc.Members = []cloud.GroupMembers{membersOf("members", near, b.size.members)}
	vpc.Subnets[0].Ports = []cloud.HostPort{portOf(near, "measured"), portOf(local, "measured")}
	if err := h.apply(ctx, vpc); err != nil {
		return err
	}
	plain, err := newPlainBridge(ctx, "plain")
	if err != nil {
		return err
	}
	// Both networks have the agent's DHCP server, because the guests have no other configuration.
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	bridges := map[string]string{h.device.Namespace(vpc.ID): netdev.Bridge(100), plain.name: "br0"}
	for namespace, bridge := range bridges {
		server := dhcp.New(namespace, bridge, log)
		defer server.Close()
		if err := server.Set(dhcp.Subnet{HostSubnet: vpc.Subnets[0], MTU: vpc.MTU, Domain: "bench.internal"}); err != nil {
			return err
		}
	}
	turn := func(net guestNet, isPeer bool) error {
		rate, err := guestThroughput(ctx, b, net)
		if err != nil {
			return err
		}
		b.results.Add("guests", isPeer, rate)
		return nil
	}
	b.results.Note("guests", fmt.Sprintf("%d MB from dd through nc; the emulation of the guests takes most of the CPU", b.size.megabytes))
	err = b.InTurn(ctx, min(b.rounds, guestRounds),
		func(int) error { return turn(ourGuests{h, vpc}, false) },
		func(int) error { return turn(plainGuests{plain}, true) },
	)
	f := b.results.Of("guests")
	report.Say("guests: %.0f Mbit/s, peer %.0f Mbit/s", figure.Median(f.Ours), figure.Median(f.Peer))
	return err
}

// guestThroughput boots two guests and sends bytes from one to the other. It returns the throughput in Mbit/s.
func guestThroughput(ctx context.Context, b *bench, net guestNet) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	var guests []*machine
	for _, number := range []int{near, local} {
		p, err := net.plug(ctx, number)
		if err != nil {
			return 0, err
		}
		m, err := bootGuest(b, p, macOf(number))
		if p.tap != nil {
			err = errors.Join(err, p.tap.Close())
		}
		if m != nil {
			defer m.close()
			guests = append(guests, m)
		}
		if err = errors.Join(err, net.ready(ctx)); err != nil {
			return 0, err
		}
	}
	for _, m := range guests {
		if _, err := m.await(ctx, "NIC name=eth0 mac"); err != nil {
			return 0, err
		}
	}
	sender, receiver := guests[0], guests[1]
	if err := receiver.start("nc -l -p 5001 >/dev/null"); err != nil {
		return 0, err
	}
	// The receiver listens when its command is running. The sender's bytes are the same in every round.
	blocks := b.size.megabytes * 1_000_000 / blockBytes
	line := fmt.Sprintf("sleep 1; dd if=/dev/zero bs=%d count=%d 2>/dev/null | nc %s 5001", blockBytes, blocks, addressOf(local))
	began := time.Now()
	if err := sender.start(line); err != nil {
		return 0, err
	}
	if err := errors.Join(sender.finish(ctx), receiver.finish(ctx)); err != nil {
		return 0, err
	}
	took := time.Since(began) - time.Second
	return float64(blocks*blockBytes*8) / 1e6 / took.Seconds(), nil
}

// ourGuests connects guests to a VPC of the agent's packages.
type ourGuests struct {
	host *host
	vpc  cloud.HostVPC
}

func (o ourGuests) plug(ctx context.Context, number int) (plug, error) {
	tap, err := o.host.device.OpenTap(ctx, o.vpc, portOf(number).ID)
	return plug{o.host.name, "tap,fd=3", tap}, err
}

func (o ourGuests) ready(ctx context.Context) error {
	_, err := o.host.device.Activate(ctx, o.vpc)
	return err
}

// plainGuests connects guests to a bridge that is made by hand.
type plainGuests struct{ bridge *plainBridge }

func (p plainGuests) plug(ctx context.Context, number int) (plug, error) {
	device := fmt.Sprintf("tap%d", number)
	_ = commands(ctx, fmt.Sprintf("ip -n %s link delete %s", p.bridge.name, device)) // of the round before
	end := plug{namespace: p.bridge.name, backend: "tap,ifname=" + device + ",script=no,downscript=no"}
	return end, commands(ctx,
		fmt.Sprintf("ip -n %s tuntap add %s mode tap vnet_hdr", p.bridge.name, device),
		fmt.Sprintf("ip -n %s link set %s mtu 1450 master br0 up", p.bridge.name, device),
	)
}

func (plainGuests) ready(context.Context) error { return nil }
