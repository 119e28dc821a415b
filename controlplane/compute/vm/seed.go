package vm

import (
	"strings"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Metadata keys of CreateVm whose values go to the guest, by cloud-init or the metadata service. They are stored apart
// from the VM's record, because they are large and may contain secrets: no call returns them.
const (
	// SSHKeys are public keys in the format of authorized_keys, one per line.
	SSHKeys = "trivet/ssh-keys"
	// UserData is a script, cloud-config or other data for cloud-init.
	UserData = "trivet/user-data"
)

// Seed contains the SSH keys and the user data with which cloud-init configures the guest of a VM.
type Seed struct {
	SSHKeys  []string `cbor:",omitempty"`
	UserData string   `cbor:",omitempty"`
}

// seeds has the seeds of VMs, at vm-seed/<vm>. A VM without SSH keys and user data has none.
var seeds = store.NewTable[Seed]("vm-seed")

// takeSeed removes the seed from the metadata of a request and returns it, or nil if the metadata has none. The map
// itself is not changed.
func takeSeed(metadata map[string]string) (*Seed, map[string]string, error) {
	keys, user := metadata[SSHKeys], metadata[UserData]
	_, hasKeys := metadata[SSHKeys]
	_, hasUser := metadata[UserData]
	if !hasKeys && !hasUser {
		return nil, metadata, nil
	}
	rest := map[string]string{}
	for k, v := range metadata {
		if k != SSHKeys && k != UserData {
			rest[k] = v
		}
	}
	if len(keys) > cloudinit.MaxSSHKeys {
		return nil, nil, fault.Invalid("metadata", "%s must be at most %d bytes, got %d", SSHKeys, cloudinit.MaxSSHKeys, len(keys))
	}
	out := &Seed{UserData: user}
	for line := range strings.Lines(keys) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := cloudinit.CheckSSHKey(line); err != nil {
			return nil, nil, fault.Invalid("metadata", "%s: a key %s", SSHKeys, err)
		}
		out.SSHKeys = append(out.SSHKeys, line)
	}
	if err := cloudinit.CheckUserData([]byte(user)); err != nil {
		return nil, nil, fault.Invalid("metadata", "%s %s", UserData, err)
	}
	if len(out.SSHKeys) == 0 && user == "" {
		return nil, rest, nil
	}
	return out, rest, nil
}

// refuseSeed returns InvalidArgument if the metadata of a change contains a part of the seed, which only CreateVm sets.
func refuseSeed(metadata map[string]string) error {
	for _, key := range []string{SSHKeys, UserData} {
		if _, ok := metadata[key]; ok {
			return fault.Invalid("metadata", "%s is fixed when a VM is created", key)
		}
	}
	return nil
}

// assignedSeed returns the seed that a VM's host gives to the guest. It returns nil if the VM has neither keys nor user
// data, and DHCP configures all of its interfaces. The host name is the VM's name without final hyphens, which names of
// hosts cannot have (RFC 952).
func assignedSeed(v store.Reader, vm *cloud.VM) (*agentv1.AssignedSeed, error) {
	s, err := seeds.Get(v, string(vm.ID))
	if err != nil {
		return nil, err
	}
	out := &agentv1.AssignedSeed{HostName: strings.TrimRight(vm.Name, "-")}
	needed := s != nil
	if s != nil {
		out.SshKeys, out.UserData = s.SSHKeys, []byte(s.UserData)
	}
	for i := range vm.Spec.Network {
		n := &vm.Spec.Network[i]
		nic, err := network.SeedNIC(v, vm.Project, cloud.PortID(n.PortID))
		if err != nil {
			return nil, err
		}
		if nic == nil || n.Change == cloud.DeviceDetaching {
			continue
		}
		nic.NicId = n.ID
		out.Nics = append(out.Nics, nic)
		needed = needed || !nic.GetDhcp()
	}
	if !needed {
		return nil, nil
	}
	return out, nil
}
