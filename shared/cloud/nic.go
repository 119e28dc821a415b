package cloud

import (
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// NIC is a network interface of a VM. In a request, an empty field means that the network service chooses the value. In
// the record of a VM, the fields have the values of the NIC's port and of the port's subnet at the time when the NIC
// was made.
type NIC struct {
	ID string
	// NetworkID is the ID of a VPC. In a request, "default" is the default VPC of the project.
	NetworkID      string
	SubnetID       string
	PortID         string
	MAC            string
	IP             string
	CIDR           string
	Gateway        string
	DHCP           bool
	Model          NICModel
	SecurityGroups []string

	// The fields below are not in the API. Visible returns a NIC without them.

	// IP6 is the port's IPv6 address, empty without IPv6.
	IP6 string `cbor:",omitempty"`
	// MTU is the MTU of the VPC.
	MTU uint16 `cbor:",omitempty"`
	// Change is what the host of a running VM has still to do with the NIC.
	Change DeviceChange `cbor:",omitempty"`
}

// NICRefusal is why a host could not attach a NIC to a guest or detach it.
type NICRefusal struct{ NIC, Error string }

// NICObservation is a host's report about one NIC of a running guest.
type NICObservation struct {
	ID string
	// Attached is true while the guest has the device. A guest keeps a device until it releases it.
	Attached bool
	// Error is why the host could not attach or detach the NIC as desired.
	Error string
}

// Visible returns the NIC with only those fields that the API has.
func (n NIC) Visible() NIC {
	n.IP6, n.MTU, n.Change = "", 0, DeviceUnchanged
	return n
}

// Addresses returns the addresses of the NIC's port.
func (n NIC) Addresses() (all []string) {
	for _, a := range []string{n.IP, n.IP6} {
		if a != "" {
			all = append(all, a)
		}
	}
	return all
}

func (s *Spec) checkNICs() error {
	if len(s.Network) > MaxNICs {
		return fault.Invalid("spec.network", "at most %d, got %d", MaxNICs, len(s.Network))
	}
	seen := map[string]bool{}
	for i, n := range s.Network {
		field := "spec.network[" + itoa(i) + "]."
		if err := n.Check(field); err != nil {
			return err
		}
		if seen[n.ID] {
			return fault.Invalid(field+"id", "is used twice")
		}
		seen[n.ID] = true
	}
	return nil
}

// Check returns an InvalidArgument fault if the NIC's ID or model is invalid. at is the name of the NIC in the request
// with a final dot. The network service checks the other fields.
func (n *NIC) Check(at string) error {
	if err := CheckDeviceID(at+"id", n.ID); err != nil {
		return err
	}
	if n.Model > ModelE1000 {
		return fault.Invalid(at+"model", "unknown value %d", n.Model)
	}
	return nil
}

// CheckDeviceID returns an InvalidArgument fault unless id may be the ID of a disk or NIC.
func CheckDeviceID(field, id string) error {
	if !devicePattern.MatchString(id) {
		return fault.Invalid(field, "must be 1 to 32 characters of a-z, 0-9 and -, starting with a letter or digit")
	}
	return nil
}

// FindNIC returns the index of the NIC in the VM's spec, or -1 if the VM has no NIC with this ID.
func (vm *VM) FindNIC(id string) int {
	return slices.IndexFunc(vm.Spec.Network, func(n NIC) bool { return n.ID == id })
}

// CheckNICChange returns FailedPrecondition unless NICs of the VM can be attached or detached now: the VM is STOPPED,
// so that it certainly has no process, or RUNNING, so that its host can ask the guest.
func (vm *VM) CheckNICChange(verb string) error {
	if vm.State != Stopped && vm.State != Running {
		return fault.New(fault.FailedPrecondition, "cannot %s a NIC of VM %s: it is %s", verb, vm.Name, vm.State)
	}
	return nil
}

// AttachNIC adds a NIC whose port is claimed. The host of a RUNNING VM then attaches it to the guest.
func (vm *VM) AttachNIC(n NIC) {
	n.Change = DeviceUnchanged
	if vm.State == Running {
		n.Change = DeviceAttaching
	}
	vm.Spec.Network = append(slices.Clone(vm.Spec.Network), n)
	vm.NICRefusal = nil
	vm.Generation++
}

// DetachNIC removes the NIC at index i from a STOPPED VM. Of a RUNNING VM it only marks the NIC: the NIC is removed when
// the host has reported that the guest has released the device (see Observe).
func (vm *VM) DetachNIC(i int) {
	if vm.State == Running && vm.Spec.Network[i].Change == DeviceDetaching {
		return
	}
	vm.Spec.Network = slices.Clone(vm.Spec.Network)
	if vm.State == Running {
		vm.Spec.Network[i].Change = DeviceDetaching
	} else {
		vm.Spec.Network = slices.Delete(vm.Spec.Network, i, i+1)
	}
	vm.NICRefusal = nil
	vm.Generation++
}

// observeNICs ends the changes of NICs that a host's report shows as done or refused, and returns whether it changed
// anything. A NIC that could not be attached is removed; one that could not be detached stays.
func (vm *VM) observeNICs(o Observation) bool {
	process, known := o.hasProcess()
	if !known {
		return false
	}
	changed, rest := false, make([]NIC, 0, len(vm.Spec.Network))
	for _, n := range vm.Spec.Network {
		report := o.nic(n.ID)
		attached := process && report.Attached && !(n.Change == DeviceDetaching && mutant.On(mutant.ReleaseAttachedNIC))
		result := n.Change.result(process, attached, report.Error)
		if result.refused {
			vm.NICRefusal = &NICRefusal{n.ID, report.Error}
			vm.Generation++
		}
		if result.ended {
			n.Change = DeviceUnchanged
			changed = true
		}
		if result.stays {
			rest = append(rest, n)
		}
	}
	if changed {
		vm.Spec.Network = rest
	}
	return changed
}

// nic returns the report about a NIC, or the zero value if there is none.
func (o *Observation) nic(id string) NICObservation {
	if i := slices.IndexFunc(o.NICs, func(n NICObservation) bool { return n.ID == id }); i >= 0 {
		return o.NICs[i]
	}
	return NICObservation{}
}
