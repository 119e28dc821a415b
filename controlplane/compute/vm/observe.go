package vm

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

var _ node.VMController = (*Service)(nil)

// Assigned implements node.VMController.
func (s *Service) Assigned(v *store.View, on cloud.NodeID, vms ...cloud.VMID) ([]node.Assignment, error) {
	placed := map[cloud.VMID]*node.Placed{}
	if len(vms) == 0 {
		all, _, err := node.PlacedVMs.List(v, 0, string(on))
		if err != nil {
			return nil, err
		}
		for _, r := range all {
			id := cloud.VMID(r.Path[1])
			vms = append(vms, id)
			placed[id] = r.Value
		}
	}
	out := make([]node.Assignment, 0, len(vms))
	for _, id := range vms {
		p := placed[id]
		if p == nil {
			var err error
			if p, err = node.PlacedVMs.Get(v, string(on), string(id)); err != nil {
				return nil, err
			}
		}
		state, err := assigned(v, on, id, p)
		if err != nil {
			return nil, err
		}
		if state != nil {
			out = append(out, node.Assignment{VM: id, State: state})
		}
	}
	return out, nil
}

// assigned returns the desired state of one VM on a host, or nil if the VM is no longer placed there. p is the VM's
// Placed record.
func assigned(v *store.View, on cloud.NodeID, id cloud.VMID, p *node.Placed) (*agentv1.AssignedVm, error) {
	if p == nil {
		return nil, nil
	}
	if p.Gone {
		return &agentv1.AssignedVm{VmId: string(id), Generation: p.Generation, Power: agentv1.Power_POWER_DESTROYED}, nil
	}
	vm, err := VMs.Get(v, string(p.Project), string(id))
	if err != nil || vm == nil || !slices.Contains(vm.Hosts(), on) {
		return nil, err
	}
	out := convert.Assigned(vm)
	out.Migration = convert.AssignedMigration(vm.Migration, on)
	if out.Seed, err = assignedSeed(v, vm); err != nil {
		return nil, err
	}
	if vm.RestartsElsewhere() {
		why, err := immovable(v, vm)
		if err != nil {
			return nil, err
		}
		out.StopsWithLease = why == ""
	}
	return out, assignVolumes(v, vm, on, out)
}

// UsesImage implements node.VMController. An empty checksum matches no image.
func (s *Service) UsesImage(v *store.View, on cloud.NodeID, sha256 string) (bool, error) {
	if sha256 == "" {
		return false, nil
	}
	placed, _, err := node.PlacedVMs.List(v, 0, string(on))
	if err != nil {
		return false, err
	}
	for _, r := range placed {
		if r.Value.Gone {
			continue
		}
		vm, err := VMs.Get(v, string(r.Value.Project), r.Path[1])
		if err != nil {
			return false, err
		}
		if vm != nil && slices.Contains(vm.Hosts(), on) && usesImage(vm, sha256) {
			return true, nil
		}
	}
	return false, nil
}

// Describe implements node.VMController.
func (s *Service) Describe(r store.Reader, project cloud.ProjectID, id cloud.VMID) (string, error) {
	vm, err := VMs.Get(r, string(project), string(id))
	if err != nil || vm == nil {
		return string(id), err
	}
	return vm.Tenant().String() + "/" + vm.Name, nil
}

func usesImage(vm *cloud.VM, sha256 string) bool {
	is := func(i *cloud.ImageRef) bool { return i != nil && i.SHA256 == sha256 }
	if is(vm.CDROM) || vm.Rescue != nil && is(vm.Rescue.Image) {
		return true
	}
	return is(vm.Kernel) || is(vm.Initrd) || slices.ContainsFunc(vm.Disks, func(d cloud.ResolvedDisk) bool { return is(d.Image) })
}

// Observed implements node.VMController. Most reports change no record. For these it only reads this member's records,
// without a transaction.
func (s *Service) Observed(ctx context.Context, on cloud.NodeID, reports []cloud.Observation) (changed int, err error) {
	var changes []cloud.Observation
	err = s.opts.Store.Local(func(v *store.View) error {
		for _, o := range reports {
			known, changed, err := s.applyReport(v, nil, on, o, s.opts.Store.Now())
			if err != nil {
				return err
			}
			if known {
				s.storeUsage(o)
				s.storeProgress(o)
			}
			if changed {
				changes = append(changes, o)
			}
		}
		return nil
	})
	if err != nil || len(changes) == 0 {
		return 0, err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for _, o := range changes {
			if _, _, err := s.applyReport(tx, tx, on, o, tx.Now()); err != nil {
				return err
			}
		}
		return nil
	})
	return len(changes), err
}

func (s *Service) storeUsage(o cloud.Observation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case o.Observed != cloud.ObservedRunning:
		delete(s.usage, o.VM)
	case o.Usage != nil:
		u := *o.Usage
		u.GuestAddresses = cloud.CheckedAddresses(u.GuestAddresses)
		s.usage[o.VM] = u
	}
}

// applyReport applies a host's report about one VM to the VM's records. If tx is nil, it writes nothing. known is true
// if the VM is placed on the host and not deleted. changed is true if the report changes a record. A report about a VM
// that is not placed on the host is ignored. During a migration, a report of the host that is not vm.Node changes only
// vm.Migration.
func (s *Service) applyReport(r store.Reader, tx *store.Tx, on cloud.NodeID, o cloud.Observation, now cloud.Time) (known, changed bool, err error) {
	if cloud.CheckUUID("vm_id", string(o.VM)) != nil {
		return false, false, nil
	}
	p, err := node.PlacedVMs.Get(r, string(on), string(o.VM))
	if err != nil || p == nil {
		return false, false, err
	}
	if p.Gone {
		// The report must have the generation of the deletion or a later one. In an earlier report, ABSENT may mean
		// that the host has not built the VM yet.
		if o.Observed != cloud.ObservedAbsent || o.Generation < p.Generation {
			return false, false, nil
		}
		if tx == nil {
			return false, true, nil
		}
		node.PlacedVMs.Delete(tx, string(on), string(o.VM))
		if err := releaseVolumes(tx, p.Project, o.VM, p.Volumes); err != nil {
			return false, true, err
		}
		return false, true, releaseCapacity(tx, on, p.Held)
	}
	vm, err := VMs.Get(r, string(p.Project), string(o.VM))
	if err != nil || vm == nil || !slices.Contains(vm.Hosts(), on) {
		return false, false, err
	}
	truncateReport(&o)
	generation, nics, volumes, reserved := vm.Generation, vm.Spec.Network, vm.Spec.Volumes(), vm.Reserved()
	migration := vm.ObserveMigration(on, o)
	if changed := vm.Node == on && vm.Observe(o, now); !changed && !migration {
		return true, false, nil
	}
	if tx != nil {
		save := s.save
		if vm.Migration != nil {
			save = s.saveMigration
		}
		if _, err := s.advanceMigration(tx, vm); err != nil {
			return true, false, err
		}
		if err := releaseRemovedNICs(tx, vm, nics); err != nil {
			return true, false, err
		}
		if err := releaseReserved(tx, vm, reserved); err != nil {
			return true, false, err
		}
		removed := slices.DeleteFunc(volumes, func(id cloud.VolumeID) bool { return slices.Contains(vm.Spec.Volumes(), id) })
		if err := releaseVolumes(tx, vm.Project, vm.ID, removed); err != nil {
			return true, false, err
		}
		err = save(tx, vm, generation)
	}
	return true, true, err
}

// Limits on what a host can write into a record: bytes of an error text, number of addresses, bytes of one address,
// number of NICs and of disks.
// Longer texts are cut and remain valid UTF-8.
const (
	maxLastError = 1 << 10
	maxAddresses = 64
	maxAddress   = 64
	maxNICs      = 2 * cloud.MaxNICs
	maxDisks     = 2 * cloud.MaxDisks
)

func truncateReport(o *cloud.Observation) {
	o.LastError = truncate(o.LastError, maxLastError)
	o.Addresses = slices.Clone(o.Addresses[:min(len(o.Addresses), maxAddresses)])
	for i, a := range o.Addresses {
		o.Addresses[i] = truncate(a, maxAddress)
	}
	if o.Migration != nil {
		m := *o.Migration
		m.Error, m.Address = truncate(m.Error, maxLastError), truncate(m.Address, maxAddress)
		o.Migration = &m
	}
	o.NICs = slices.Clone(o.NICs[:min(len(o.NICs), maxNICs)])
	for i := range o.NICs {
		o.NICs[i].Error = truncate(o.NICs[i].Error, maxLastError)
	}
	o.Disks = slices.Clone(o.Disks[:min(len(o.Disks), maxDisks)])
	for i := range o.Disks {
		o.Disks[i].Error = truncate(o.Disks[i].Error, maxLastError)
	}
}

func truncate(s string, most int) string { return strings.ToValidUTF8(s[:min(len(s), most)], "") }

// deadline is the time at which a timeout ends the transient state of a VM, such as STARTING.
type deadline struct {
	project cloud.ProjectID
	at      cloud.Time
}

// deadlineFields has the fields of a VM record that Follow needs. Decoding only these takes much less time than
// decoding the complete record.
type deadlineFields struct {
	ID       cloud.VMID
	Project  cloud.ProjectID
	Deadline cloud.Time
	State    cloud.State
	Recovery *cloud.Recovery
	// Migration is decoded without its fields, because Follow needs to know only whether it is nil.
	Migration *struct{}
}

// vmDeadlines decodes VM records to deadlineFields. Do not write records with it: that would delete all other fields of
// the VM.
var vmDeadlines = store.NewTable[deadlineFields]("vm")

// Follow keeps s.deadlines equal to the deadlines in the VM records. Package leader runs it on the leader until the end
// of the term.
func (s *Service) Follow(ctx context.Context) error {
	var from int64
	err := s.opts.Store.View(ctx, func(v *store.View) error {
		from = v.Revision() + 1
		all, _, err := vmDeadlines.List(v, 0)
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		clear(s.deadlines)
		clear(s.usage)
		clear(s.recoveries)
		clear(s.migrations)
		clear(s.progress)
		for _, r := range all {
			s.trackDeadline(r.Value)
		}
		return nil
	})
	if err != nil {
		return err
	}
	w := vmDeadlines.Watch(s.opts.Store, from)
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		s.mu.Lock()
		for _, c := range changes {
			if c.Value == nil {
				delete(s.deadlines, cloud.VMID(c.Path[1]))
				delete(s.usage, cloud.VMID(c.Path[1]))
				delete(s.recoveries, cloud.VMID(c.Path[1]))
				delete(s.migrations, cloud.VMID(c.Path[1]))
				delete(s.progress, cloud.VMID(c.Path[1]))
			} else {
				s.trackDeadline(c.Value)
			}
		}
		s.mu.Unlock()
	}
}

func (s *Service) trackDeadline(vm *deadlineFields) {
	s.trackRecovery(vm)
	s.trackMigration(vm)
	if vm.Deadline == 0 {
		delete(s.deadlines, vm.ID)
	} else {
		s.deadlines[vm.ID] = deadline{vm.Project, vm.Deadline}
	}
}

// SettleEvery is the interval at which package leader calls Settle on the leader.
const SettleEvery = time.Second

// Settle applies a timeout to each VM whose deadline has passed (cloud.VM.TimeOut), which ends the VM's transient
// state. It runs only on the leader.
func (s *Service) Settle(ctx context.Context) error {
	now := s.opts.Store.Now()
	late := map[cloud.VMID]deadline{}
	s.mu.Lock()
	for id, d := range s.deadlines {
		if now >= d.at {
			late[id] = d
		}
	}
	s.mu.Unlock()
	var failed error
	for id, d := range late { // An error of one VM does not delay the others.
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			vm, err := VMs.Get(tx, string(d.project), string(id))
			if err != nil || vm == nil {
				return err
			}
			generation := vm.Generation
			if !vm.TimeOut(tx.Now()) {
				return nil
			}
			return s.save(tx, vm, generation)
		})
		failed = errors.Join(failed, err)
	}
	return failed
}
