package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Taps opens the taps of ports. The host's network implements it.
type Taps interface {
	// OpenTap returns a new descriptor of the tap of a port. It fails if the host does not know the port yet, and may
	// be called again then. The tap may be open already in a process that ends.
	OpenTap(ctx context.Context, port cloud.PortID) (*os.File, error)
	// CloseTap is called when no process has the tap of a port open any more. It returns nil if the tap is not open, and
	// may be called for any port that the host once had.
	CloseTap(ctx context.Context, port cloud.PortID) error
	// PortCounters returns the counters of the ports that can be read. The counters of a port begin at 0 when its tap
	// is opened.
	PortCounters(ctx context.Context) map[cloud.PortID]cloud.PortCounters
}

const (
	// tapsWithin is the maximum time to open the taps of a VM, or to close them.
	tapsWithin = 15 * time.Second
	// attachPatience is how long attempts to attach or detach a device of a running guest may fail before the failure
	// is reported as final. The network may not know a port yet: the assignment and the state of the VPC come on
	// different streams. The guest may need time to release a disk.
	attachPatience = 30 * time.Second
)

var errNoNetworks = errors.New("this host does not offer network interfaces")

var models = map[vmv1.NicModel]qemu.Model{
	vmv1.NicModel_NIC_MODEL_UNSPECIFIED: qemu.VirtioNet, vmv1.NicModel_NIC_MODEL_VIRTIO_NET: qemu.VirtioNet,
	vmv1.NicModel_NIC_MODEL_E1000: qemu.E1000,
}

// nics returns the network interfaces of an assigned VM as package qemu describes them. Each has the slot -1.
func nics(want *agentv1.AssignedVm) []qemu.NIC {
	var out []qemu.NIC
	for _, n := range want.GetNics() {
		out = append(out, qemu.NIC{
			ID: n.GetId(), Model: models[n.GetModel()], MAC: n.GetMacAddress(), MTU: int(n.GetMtu()), Slot: -1,
			Port: n.GetPortId(),
		})
	}
	return out
}

// nicChange is a change of the network interfaces of a running guest.
type nicChange struct {
	action Action // PlugNIC or UnplugNIC
	nic    string // id of the interface
}

// nicChanges returns the changes that make the interfaces have of a process equal to those in want. An interface with
// another port, MAC address or model is removed, and attached in a later plan. So is an interface in the record without
// a device: QEMU may have its tap open, for example because an agent ended while it attached the interface, and the tap
// cannot be opened again until then. Another MTU takes effect at the next start.
func nicChanges(want []qemu.NIC, have []qemu.AttachedNIC) []nicChange {
	var out []nicChange
	for _, h := range have {
		at := slices.IndexFunc(want, func(w qemu.NIC) bool { return w.ID == h.ID })
		if at < 0 || !h.Present || want[at].Port != h.Port || want[at].MAC != h.MAC || want[at].Model != h.Model {
			out = append(out, nicChange{UnplugNIC, h.ID})
		}
	}
	for _, w := range want {
		if !slices.ContainsFunc(have, func(h qemu.AttachedNIC) bool { return h.ID == w.ID }) {
			out = append(out, nicChange{PlugNIC, w.ID})
		}
	}
	return out
}

// nextNICChange returns the change after that of the interface last, whose change failed, so that an interface that
// cannot be changed does not block the others. The parameter changes must not be empty.
func nextNICChange(changes []nicChange, last string) nicChange {
	at := slices.IndexFunc(changes, func(c nicChange) bool { return c.nic == last })
	return changes[(at+1)%len(changes)]
}

// deviceFailure is the failure to change a network interface or a volume of a running guest. It applies to one
// generation of the desired state only: the control plane may request the same change again by a new generation.
type deviceFailure struct {
	generation uint64
	since      time.Time
	text       string
	final      bool // to be reported now; otherwise after attachPatience
}

// addFailure adds to the map all the failure to attach, detach or resize the device with this id. It returns the map.
func addFailure(all map[string]deviceFailure, id string, generation uint64, err error, final bool) map[string]deviceFailure {
	f, ok := all[id]
	if !ok || f.generation != generation {
		f = deviceFailure{generation: generation, since: time.Now()}
	}
	f.text, f.final = brief(err), final
	if all == nil {
		all = map[string]deviceFailure{}
	}
	all[id] = f
	return all
}

// report returns the text of the failure if it must be reported for this generation of the desired state, and ""
// otherwise.
func (f deviceFailure) report(generation uint64) string {
	if f.text == "" || f.generation != generation || !f.final && time.Since(f.since) < attachPatience {
		return ""
	}
	return f.text
}

// changeNIC executes PlugNIC or UnplugNIC for the interface id, and records a failure for reportNICs.
func (v *VM) changeNIC(ctx context.Context, a Action, id string, want *agentv1.AssignedVm) error {
	v.lastNIC = id
	var err error
	if a == PlugNIC {
		err = v.plugNIC(ctx, id, want)
	} else {
		err = v.process.UnplugNIC(ctx, id, func(n qemu.NIC) error { return v.closeTaps(ctx, []qemu.NIC{n}) })
	}
	if err == nil {
		if a == PlugNIC { // after UnplugNIC the failure of an earlier PlugNIC stays: the two alternate until one succeeds
			delete(v.nicFailures, id)
		}
		return nil
	}
	final := errors.Is(err, qemu.ErrNotReleased) || errors.Is(err, qemu.ErrNoPort) || errors.Is(err, qemu.ErrInvalid) ||
		errors.Is(err, errNoNetworks)
	v.nicFailures = addFailure(v.nicFailures, id, want.GetGeneration(), err, final)
	return err
}

func (v *VM) plugNIC(ctx context.Context, id string, want *agentv1.AssignedVm) error {
	all := nics(want)
	at := slices.IndexFunc(all, func(n qemu.NIC) bool { return n.ID == id })
	if at < 0 {
		return fmt.Errorf("the VM has no network interface %s", id)
	}
	taps, err := v.openTaps(ctx, all[at:at+1])
	if err != nil {
		return err
	}
	defer closeFiles(taps)
	err = v.process.PlugNIC(ctx, all[at], taps[id])
	recorded := slices.ContainsFunc(v.process.Record().Spec.NICs, func(n qemu.NIC) bool { return n.ID == id })
	if err != nil && !recorded { // QEMU does not have the tap, and UnplugNIC would not find the interface.
		err = errors.Join(err, v.closeTaps(ctx, all[at:at+1]))
	}
	return err
}

// openTaps opens the taps of the interfaces in all. If one cannot be opened, it closes the others. The caller must
// close the files.
func (v *VM) openTaps(ctx context.Context, all []qemu.NIC) (taps map[string]*os.File, err error) {
	if len(all) == 0 {
		return nil, nil
	}
	if v.set.o.Taps == nil {
		return nil, errNoNetworks
	}
	bounded, cancel := context.WithTimeout(ctx, tapsWithin)
	defer cancel()
	taps = map[string]*os.File{}
	for i, n := range all {
		tap, err := v.set.o.Taps.OpenTap(bounded, cloud.PortID(n.Port))
		if err != nil {
			closeFiles(taps)
			err = fmt.Errorf("connect network interface %s to port %s: %w", n.ID, n.Port, err)
			return nil, errors.Join(err, v.closeTaps(ctx, all[:i]))
		}
		taps[n.ID] = tap
	}
	return taps, nil
}

func closeFiles(files map[string]*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// closeTaps closes the taps of the interfaces in all, of which no process has a descriptor any more.
func (v *VM) closeTaps(ctx context.Context, all []qemu.NIC) error {
	if v.set.o.Taps == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tapsWithin)
	defer cancel()
	var errs []error
	for _, n := range all {
		if err := v.set.o.Taps.CloseTap(ctx, cloud.PortID(n.Port)); err != nil {
			errs = append(errs, fmt.Errorf("disconnect network interface %s from port %s: %w", n.ID, n.Port, err))
		}
	}
	return errors.Join(errs...)
}

// lastNICs returns the interfaces in the record of the VM's last start. They include every interface whose tap may be
// open in the host's network.
func (v *VM) lastNICs() ([]qemu.NIC, error) {
	if v.home == nil {
		return nil, nil
	}
	last, err := v.home.Record()
	if errors.Is(err, qemu.ErrNotStarted) {
		return nil, nil
	}
	return last.Spec.NICs, err
}

// closeLastTaps closes the taps of the last process, which has ended, except those of the ports in keep.
func (v *VM) closeLastTaps(ctx context.Context, keep []qemu.NIC) error {
	last, err := v.lastNICs()
	if err != nil {
		return err
	}
	last = slices.DeleteFunc(last, func(n qemu.NIC) bool {
		return slices.ContainsFunc(keep, func(k qemu.NIC) bool { return k.Port == n.Port })
	})
	return v.closeTaps(ctx, last)
}

// observeNICs updates v.nics. If QEMU cannot be queried, every interface in the record counts as present, so that no
// port is released while QEMU may have its tap.
func (v *VM) observeNICs(ctx context.Context) {
	recorded := v.process.Record().Spec.NICs
	v.nics = nil
	for _, n := range recorded {
		v.nics = append(v.nics, qemu.AttachedNIC{NIC: n, Present: true})
	}
	if v.guest != Running || len(recorded) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, statusWithin)
	defer cancel()
	if present, err := v.process.NICs(ctx); err == nil {
		v.nics = present
	} else {
		v.guest, v.trouble = Unresponsive, "QEMU does not answer"
	}
}

// reportNICs returns the report of the VM's network interfaces: those of its process, and those of the desired state
// want that could not be attached. An interface to be removed counts as attached until its tap is closed.
func (v *VM) reportNICs(want *agentv1.AssignedVm) []cloud.NICObservation {
	if v.process == nil {
		return nil
	}
	pending := map[string]Action{}
	for _, c := range nicChanges(nics(want), v.nics) {
		pending[c.nic] = c.action
	}
	var out []cloud.NICObservation
	report := func(id string, attached bool) {
		o := cloud.NICObservation{ID: id, Attached: attached}
		if pending[id] != Nothing {
			o.Error = v.nicFailures[id].report(want.GetGeneration())
		}
		out = append(out, o)
	}
	for _, n := range v.nics {
		wanted := slices.ContainsFunc(want.GetNics(), func(w *agentv1.AssignedNic) bool { return w.GetId() == n.ID })
		report(n.ID, n.Present || !wanted)
	}
	for _, n := range want.GetNics() {
		if !slices.ContainsFunc(v.nics, func(h qemu.AttachedNIC) bool { return h.ID == n.GetId() }) {
			report(n.GetId(), false)
		}
	}
	return out
}
