package vm

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// nicWait is how long AttachNIC and DetachNIC wait for the guest of a running VM.
const nicWait = 30 * time.Second

// claimNICs claims the ports of a new VM's NICs, and sets the fields of the NICs in the spec to the values of their
// ports. It returns the ports, which must be bound to the VM's host.
func claimNICs(tx *store.Tx, vm *cloud.VM) ([]cloud.Port, error) {
	if len(vm.Spec.Network) == 0 {
		return nil, nil
	}
	ports := make([]cloud.Port, 0, len(vm.Spec.Network))
	nics := make([]cloud.NIC, 0, len(vm.Spec.Network))
	for i := range vm.Spec.Network {
		n := &vm.Spec.Network[i]
		claimed, err := network.ClaimNIC(tx, vm.Tenant(), vm.ID, n, fmt.Sprintf("spec.network[%d].", i))
		if err != nil {
			return nil, err
		}
		ports = append(ports, claimed.Port)
		nics = append(nics, claimed.NIC(*n))
	}
	vm.Spec.Network = nics
	return ports, nil
}

// networkShortage returns a text that says why a host cannot have these NICs, or "" if it can.
func networkShortage(r store.Reader, node cloud.NodeID, nics []cloud.NIC) (string, error) {
	if len(nics) == 0 {
		return "", nil
	}
	mtu := uint16(0)
	for _, n := range nics {
		mtu = max(mtu, n.MTU)
	}
	host, err := network.HostNetworkOf(r, node)
	if err != nil {
		return "", err
	}
	return host.Shortage(mtu), nil
}

// visibleNICs returns the NICs with only those fields that the API has.
func visibleNICs(nics []cloud.NIC) []cloud.NIC {
	out := make([]cloud.NIC, len(nics))
	for i, n := range nics {
		out[i] = n.Visible()
	}
	return out
}

// releaseRemovedNICs releases the ports of those NICs in before that the VM no longer has.
func releaseRemovedNICs(tx *store.Tx, vm *cloud.VM, before []cloud.NIC) error {
	for _, n := range before {
		if vm.FindNIC(n.ID) >= 0 {
			continue
		}
		if err := network.ReleasePort(tx, vm.Tenant(), vm.ID, cloud.PortID(n.PortID)); err != nil {
			return err
		}
	}
	return nil
}

// nicRequest describes a NIC to attach or, with only the ID set, to detach.
type nicRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	NIC    cloud.NIC
	Body   [32]byte
}

var (
	attachNICCommand = leader.NewCommand("vm.nic.attach", leader.Keyed, (*Service).attachNICOnLeader)
	detachNICCommand = leader.NewCommand("vm.nic.detach", leader.Keyed, (*Service).detachNICOnLeader)
)

// attachNICOnLeader implements AttachNIC on the leader, without waiting for the host.
func (s *Service) attachNICOnLeader(ctx context.Context, q nicRequest) (powerResponse, error) {
	return s.changeNICs(ctx, q, "AttachNic", func(tx *store.Tx, vm *cloud.VM) error {
		if err := vm.CheckNICChange("attach"); err != nil {
			return err
		}
		if vm.FindNIC(q.NIC.ID) >= 0 {
			f := fault.New(fault.AlreadyExists, "VM %s has a NIC %s", vm.Name, q.NIC.ID)
			f.Field = "nic.id"
			return f
		}
		if len(vm.Spec.Network) >= cloud.MaxNICs {
			return fault.New(fault.FailedPrecondition, "VM %s has %d NICs, and a VM can have no more", vm.Name, cloud.MaxNICs)
		}
		claimed, err := network.ClaimNIC(tx, vm.Tenant(), vm.ID, &q.NIC, "nic.")
		if err != nil {
			return err
		}
		n := claimed.NIC(q.NIC)
		why, err := networkShortage(tx, vm.Node, []cloud.NIC{n})
		if err != nil {
			return err
		}
		if why != "" {
			return fault.New(fault.FailedPrecondition, "the host of VM %s has no network: %s", vm.Name, why)
		}
		if err := network.BindNIC(tx, &claimed.Port, vm.Node, vm.Name); err != nil {
			return err
		}
		vm.AttachNIC(n)
		return nil
	})
}

// detachNICOnLeader implements DetachNIC on the leader, without waiting for the host.
func (s *Service) detachNICOnLeader(ctx context.Context, q nicRequest) (powerResponse, error) {
	return s.changeNICs(ctx, q, "DetachNic", func(tx *store.Tx, vm *cloud.VM) error {
		if err := vm.CheckNICChange("detach"); err != nil {
			return err
		}
		i := vm.FindNIC(q.NIC.ID)
		if i < 0 {
			f := fault.New(fault.NotFound, "VM %s has no NIC %s", vm.Name, q.NIC.ID)
			f.Field = "nic_id"
			return f
		}
		before := vm.Spec.Network
		vm.DetachNIC(i)
		return releaseRemovedNICs(tx, vm, before)
	})
}

// changeNICs runs change on the record of a VM and stores it, at most once per idempotency key of the method.
func (s *Service) changeNICs(ctx context.Context, q nicRequest, method string, change func(*store.Tx, *cloud.VM) error) (powerResponse, error) {
	return s.changeVM(ctx, q.Tenant, q.VM, method, q.Body, change)
}

// changeVM runs change on the record of a VM and stores it, at most once per idempotency key of the method.
func (s *Service) changeVM(ctx context.Context, t cloud.Tenant, id cloud.VMID, method string, body [32]byte, change func(*store.Tx, *cloud.VM) error) (out powerResponse, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out.VM, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(t.Project), method, body, func() (cloud.VM, error) {
			vm, err := getOwned(tx, t, id)
			if err != nil {
				return cloud.VM{}, err
			}
			generation := vm.Generation
			if err := change(tx, vm); err != nil {
				return cloud.VM{}, err
			}
			if vm.Generation != generation {
				err = s.save(tx, vm, generation)
			}
			return *vm, err
		})
		return err
	})
	return out, err
}

// AttachNIC adds a NIC to a VM that is STOPPED or RUNNING. For a RUNNING VM it waits up to nicWait until the guest has
// the NIC. If the host refuses, it returns FailedPrecondition, and the NIC is removed again.
func (s *Service) AttachNIC(ctx context.Context, t cloud.Tenant, id cloud.VMID, n cloud.NIC, body [32]byte) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return PowerResult{}, err
	}
	if err := n.Check("nic."); err != nil {
		return PowerResult{}, err
	}
	if n.Model == cloud.ModelUnspecified {
		n.Model = cloud.ModelVirtio
	}
	response, err := attachNICCommand.Call(ctx, s.opts.Commands, nicRequest{t, id, n, body})
	if err != nil {
		return PowerResult{}, err
	}
	return s.awaitVM(ctx, t, response, nicWait, func(_, vm *cloud.VM) (bool, error) {
		i := vm.FindNIC(n.ID)
		if i < 0 || vm.Spec.Network[i].Change == cloud.DeviceDetaching {
			return false, nicError(vm, n.ID, "attach", "it was detached meanwhile")
		}
		return vm.Spec.Network[i].Change == cloud.DeviceUnchanged, nil
	})
}

// DetachNIC removes a NIC from a VM that is STOPPED or RUNNING, and releases its port. For a RUNNING VM it waits up to
// nicWait until the guest has released the device. If the guest keeps it, DetachNIC returns FailedPrecondition, and the
// VM keeps the NIC.
func (s *Service) DetachNIC(ctx context.Context, t cloud.Tenant, id cloud.VMID, nic string, body [32]byte) (PowerResult, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return PowerResult{}, err
	}
	if err := cloud.CheckDeviceID("nic_id", nic); err != nil {
		return PowerResult{}, err
	}
	response, err := detachNICCommand.Call(ctx, s.opts.Commands, nicRequest{t, id, cloud.NIC{ID: nic}, body})
	if err != nil {
		return PowerResult{}, err
	}
	port := ""
	if i := response.VM.FindNIC(nic); i >= 0 {
		port = response.VM.Spec.Network[i].PortID
	}
	return s.awaitVM(ctx, t, response, nicWait, func(_, vm *cloud.VM) (bool, error) {
		i := vm.FindNIC(nic)
		switch {
		case i < 0 || vm.Spec.Network[i].PortID != port: // removed, and perhaps another NIC was attached with its ID
			return true, nil
		case vm.Spec.Network[i].Change != cloud.DeviceDetaching:
			return false, nicError(vm, nic, "detach", "another call changed it meanwhile")
		}
		return false, nil
	})
}

// reasonNICRefused is the reason in the error of AttachNIC and DetachNIC if the host could not change the NIC.
const reasonNICRefused = "NIC_REFUSED"

// nicError returns the error for a NIC that was not changed as requested: the refusal of the host, or otherwise the
// error with the text in otherwise.
func nicError(vm *cloud.VM, nic, verb, otherwise string) error {
	if r := vm.NICRefusal; r != nil && r.NIC == nic {
		return fault.New(fault.FailedPrecondition, "%s NIC %s of VM %s: %s", verb, nic, vm.Name, r.Error).WithReason(reasonNICRefused)
	}
	return fault.New(fault.FailedPrecondition, "%s NIC %s of VM %s: %s", verb, nic, vm.Name, otherwise)
}

// isFinal reports whether a repeat of the call, under its idempotency key, also returns the error err: the refusal of a
// device, or a migration that has failed.
func isFinal(err error) bool {
	f, ok := fault.From(err)
	return ok && (f.Reason == reasonNICRefused || f.Reason == reasonDiskRefused || f.Reason == ReasonNotMigrated)
}
