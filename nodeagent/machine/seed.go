package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// seed returns the disk image with which cloud-init configures the guest of an assigned VM. The error wraps
// qemu.ErrInvalid if cloud-init would not accept the content.
func seed(want *agentv1.AssignedVm) ([]byte, error) {
	s := want.GetSeed()
	instance := cloudinit.Instance{
		ID: want.GetVmId(), HostName: s.GetHostName(), SSHKeys: s.GetSshKeys(), UserData: s.GetUserData(),
	}
	var ports []cloudinit.Port
	for _, n := range want.GetNics() {
		p, err := seedPort(s, n)
		if err != nil {
			return nil, fmt.Errorf("%w: network interface %s: %w", qemu.ErrInvalid, n.GetId(), err)
		}
		ports = append(ports, p)
	}
	instance.NICs = cloudinit.NICs(ports)
	files, err := cloudinit.Render(&instance)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", qemu.ErrInvalid, err)
	}
	return cloudinit.Seed(files)
}

// anyIPv4 is a placeholder for the address of an interface that has no configuration in the seed. The guest gets the
// real address by DHCP.
var anyIPv4 = netip.MustParsePrefix("0.0.0.0/32")

// seedPort returns the configuration of a network interface in a seed. If s has no configuration of the interface, the
// interface uses DHCPv4: earlier versions of the control plane send no configuration.
func seedPort(s *agentv1.AssignedSeed, nic *agentv1.AssignedNic) (p cloudinit.Port, err error) {
	if p.MAC, err = net.ParseMAC(nic.GetMacAddress()); err != nil {
		return p, err
	}
	i := slices.IndexFunc(s.GetNics(), func(n *agentv1.AssignedSeedNic) bool { return n.GetNicId() == nic.GetId() })
	if i < 0 {
		p.DHCP, p.Addresses = true, []netip.Prefix{anyIPv4}
		return p, nil
	}
	n := s.GetNics()[i]
	if n.GetMtu() > math.MaxUint16 {
		return p, fmt.Errorf("the MTU is %d", n.GetMtu())
	}
	p.DHCP, p.MTU = n.GetDhcp(), uint16(n.GetMtu())
	if n.GetDomain() != "" {
		p.Search = []string{n.GetDomain()}
	}
	var errs [3]error
	p.Addresses, errs[0] = parseAll(n.GetAddresses(), netip.ParsePrefix)
	p.Gateways, errs[1] = parseAll(n.GetGateways(), netip.ParseAddr)
	p.DNS, errs[2] = parseAll(n.GetDnsServers(), netip.ParseAddr)
	return p, errors.Join(errs[:]...)
}

func parseAll[T any](texts []string, parse func(string) (T, error)) (out []T, err error) {
	for _, text := range texts {
		value, err := parse(text)
		if err != nil {
			return nil, err
		}
		out = append(out, value)
	}
	return out, nil
}

// writeSeed writes the seed of an assigned VM to its home, or removes the file if the VM has no seed. The file may hold
// secrets and belongs to root; QEMU gets a descriptor that is open for reading only.
func (v *VM) writeSeed(want *agentv1.AssignedVm) error {
	path := v.home.Seed()
	if want.GetSeed() == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove seed: %w", err)
		}
		return nil
	}
	image, err := seed(want)
	if err != nil {
		return fmt.Errorf("make seed: %w", err)
	}
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, image) {
		return nil
	}
	if err := atomicfile.WriteFile(path, image, 0o600); err != nil {
		return fmt.Errorf("write seed: %w", err)
	}
	return nil
}

// openSeed brings the seed of an assigned VM up to date and opens it. It returns nil if the VM has none.
func (v *VM) openSeed(want *agentv1.AssignedVm) (*os.File, error) {
	if err := v.writeSeed(want); err != nil || want.GetSeed() == nil {
		return nil, err
	}
	return os.Open(v.home.Seed())
}
