package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// seed returns the disk image with which cloud-init configures the guest of an assigned VM. The error wraps
// qemu.ErrInvalid if cloud-init would not accept the content. Every network interface gets its addresses by DHCP.
func seed(want *agentv1.AssignedVm) ([]byte, error) {
	s := want.GetSeed()
	instance := cloudinit.Instance{
		ID: want.GetVmId(), HostName: s.GetHostName(), SSHKeys: s.GetSshKeys(), UserData: s.GetUserData(),
	}
	for _, n := range want.GetNics() {
		mac, err := net.ParseMAC(n.GetMacAddress())
		if err != nil {
			return nil, fmt.Errorf("%w: network interface %s: %w", qemu.ErrInvalid, n.GetId(), err)
		}
		instance.NICs = append(instance.NICs, cloudinit.NIC{MAC: mac, DHCP4: true})
	}
	files, err := cloudinit.Render(&instance)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", qemu.ErrInvalid, err)
	}
	return cloudinit.Seed(files)
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
