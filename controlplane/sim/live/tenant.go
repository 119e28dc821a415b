package live

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// tenantClient simulates one tenant with its own VMs. It repeats each call, under one idempotency key, until it gets a
// final response.
type tenantClient struct {
	f    *fleet
	name string
	rng  *rand.Rand
	// asks is the number of calls made; it is part of the idempotency keys.
	asks int

	// have lists the VMs whose creation a member has acknowledged and whose deletion no member has acknowledged.
	have []owned
	// gone lists the VMs whose deletion a member has acknowledged.
	gone []cloud.VMID
	// networks lists the network resources whose creation a member has acknowledged, and deleted the IDs of those whose
	// deletion a member has acknowledged.
	networks map[resourceKind][]networkResource
	deleted  []string
	// volumes and goneVolumes are the volumes that correspond to the VMs in have and gone.
	volumes     []ownedVolume
	goneVolumes []cloud.VolumeID
	// snapshots are the snapshots whose creation a member has acknowledged, and which the tenant has not called to
	// delete.
	snapshots []cloud.SnapshotID
}

// owned is a VM whose creation a member has acknowledged to the tenant.
type owned struct {
	id   cloud.VMID
	name string
	// leaving is true if the tenant called Delete for the VM and got no final response, so the VM may or may not exist.
	leaving bool
	// renaming is true if the tenant called Rename for the VM and got no final response, so the VM may have another name.
	renaming bool
}

const mostVMs = 5

// life makes random calls for the tenant until fleet.closing returns true.
func (t *tenantClient) life(ctx context.Context) {
	for ctx.Err() == nil && !t.f.closing() {
		t.once(ctx)
		pause := time.NewTimer(time.Duration(t.rng.IntN(4000)) * time.Millisecond)
		select {
		case <-pause.C:
		case <-t.f.rush():
			if len(t.have) < 2*mostVMs {
				t.create(ctx)
			}
		case <-ctx.Done():
		}
		pause.Stop()
	}
}

func (t *tenantClient) once(ctx context.Context) {
	if t.rng.IntN(2) == 0 {
		t.network(ctx)
	}
	if t.rng.IntN(2) == 0 {
		t.storage(ctx)
	}
	if t.rng.IntN(3) == 0 {
		t.snapshot(ctx)
	}
	n := t.rng.IntN(100)
	if len(t.have) == 0 || n < 25 && len(t.have) < mostVMs {
		t.create(ctx)
		return
	}
	at := t.rng.IntN(len(t.have))
	v := &t.have[at]
	if v.leaving {
		t.delete(ctx, at, true)
		return
	}
	switch {
	case n < 45:
		t.power(ctx, "start", v, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
			return p.vms.Start(ctx, tenant.Default, v.id, body)
		})
	case n < 70:
		grace := time.Duration(t.rng.IntN(20)) * time.Second
		t.power(ctx, "stop", v, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
			return p.vms.Stop(ctx, tenant.Default, v.id, grace, body)
		})
	case n < 76:
		t.power(ctx, "reboot", v, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
			return p.vms.Reboot(ctx, tenant.Default, v.id, body)
		})
	case n < 79:
		t.power(ctx, "reset", v, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
			return p.vms.Reset(ctx, tenant.Default, v.id, body)
		})
	case n < 86:
		t.migrate(ctx, v)
	case n < 88:
		t.rename(ctx, v)
	case n < 92:
		t.look(ctx)
	default:
		t.delete(ctx, at, t.rng.IntN(2) == 0)
	}
}

// ask makes a call up to 30 times, on random members and under one idempotency key, until a final response arrives. ok
// is false if none arrived.
func (t *tenantClient) ask(ctx context.Context, what string, call func(ctx context.Context, p *process, body [32]byte) error) (err error, ok bool) {
	t.asks++
	key, body := t.lastKey()
	for try := 0; try < 30 && ctx.Err() == nil; try++ {
		if err = t.call(ctx, key, func(ctx context.Context, p *process) error { return call(ctx, p, body) }); final(err) {
			t.f.trace.Add("%s %s: %v", key, what, err)
			if err == nil {
				t.f.count("calls answered")
			} else {
				t.f.count("calls refused")
			}
			return err, true
		}
		t.f.count("calls repeated")
		t.f.trace.Add("%s %s is asked again after: %v", key, what, err)
		if sleep(ctx, time.Duration(200+t.rng.IntN(2000))*time.Millisecond) != nil {
			break
		}
	}
	t.f.count("calls abandoned")
	return err, false
}

// lastKey returns the idempotency key of the last call that ask has made, and the hash of its body.
func (t *tenantClient) lastKey() (key string, body [32]byte) {
	key = fmt.Sprintf("%s-%d", t.name, t.asks)
	return key, sha256.Sum256([]byte(key))
}

// final reports whether err is a final response, after which the tenant does not retry. A nil err means that the call
// was executed completely; another final error means that the call changed nothing.
func final(err error) bool {
	if err == nil {
		return true
	}
	f, ok := fault.From(err)
	return ok && !f.Retry && f.Kind != fault.Unavailable && f.Kind != fault.Unauthenticated && f.Kind != fault.Internal
}

// call makes one attempt of a call on a random member.
func (t *tenantClient) call(ctx context.Context, key string, f func(ctx context.Context, p *process) error) error {
	return t.callAt(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))], key, f)
}

func (t *tenantClient) callAt(ctx context.Context, s *memberSlot, key string, f func(ctx context.Context, p *process) error) error {
	p := s.current()
	if p == nil {
		return errNoRoute
	}
	ctx, leave := p.enter(ctx)
	if leave == nil {
		return errNoRoute
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	caller, err := p.identities.Verify(ctx, t.f.token)
	if err != nil {
		return err
	}
	caller.IdempotencyKey, caller.RequestID = key, key
	return f(auth.With(ctx, caller, auth.RPC), p)
}

func (t *tenantClient) create(ctx context.Context) {
	name := fmt.Sprintf("%s-vm-%d", t.name, t.asks+1)
	key := fmt.Sprintf("%s-%d", t.name, t.asks+1)
	w := vm.CreateRequest{
		Name: name, Labels: map[string]string{keyLabel: key},
		Spec: cloud.Spec{
			CPU: &cloud.CPU{VCPUs: uint32(1 + t.rng.IntN(4))}, Memory: &cloud.Memory{SizeMiB: uint64(512 << t.rng.IntN(4))},
			Disks: []cloud.Disk{{ID: "root", Image: t.f.image, SizeGiB: uint64(1 + t.rng.IntN(10))}},
		},
	}
	if t.rng.IntN(3) == 0 {
		w.Spec.Disks = append(w.Spec.Disks, cloud.Disk{ID: "data", Blank: true, SizeGiB: 5})
	}
	if d, ok := t.randomVolume(); ok {
		w.Spec.Disks = append(w.Spec.Disks, d)
	}
	if t.rng.IntN(2) == 0 {
		w.Metadata = map[string]string{cloud.RestartPolicy: "on-failure"}
	}
	switch t.rng.IntN(4) {
	case 0, 1:
		t.makeMovable(&w)
	case 2:
		t.migratable(&w)
	}
	for i := range t.rng.IntN(3) {
		n, ok := t.randomNIC(fmt.Sprintf("nic%d", i))
		if ok && !slices.ContainsFunc(w.Spec.Network, func(o cloud.NIC) bool { return o.PortID != "" && o.PortID == n.PortID }) {
			w.Spec.Network = append(w.Spec.Network, n)
		}
	}
	var made vm.Created
	err, ok := t.ask(ctx, "create "+name, func(ctx context.Context, p *process, body [32]byte) (err error) {
		made, err = p.vms.Create(ctx, tenant.Default, w, body)
		return err
	})
	switch {
	case !ok: // unknown whether a VM was created; the witness checks that there is at most one
	case err == nil:
		if made.Replayed {
			t.f.count("creates replayed")
		}
		t.f.count("VMs created")
		t.have = append(t.have, owned{id: made.VM.ID, name: name})
		t.look(ctx)
	case fault.Is(err, fault.ResourceExhausted), fault.Is(err, fault.FailedPrecondition):
	default:
		t.f.fail("creating %s was refused: %v", name, err)
	}
}

func (t *tenantClient) power(ctx context.Context, verb string, v *owned, call func(context.Context, *process, [32]byte) (vm.PowerResult, error)) {
	id := v.id
	err, _ := t.ask(ctx, verb+" "+short(id), func(ctx context.Context, p *process, body [32]byte) error {
		now, err := call(ctx, p, body)
		if err == nil && now.VM.ID != id {
			t.f.fail("%s of VM %s was answered with VM %s", verb, id, now.VM.ID)
		}
		if now.WaitEnded {
			t.f.count("calls that timed out")
		}
		return err
	})
	if fault.Is(err, fault.NotFound) {
		t.f.fail("VM %s, whose creation was acknowledged, is not found: %v", id, err)
	}
}

// rename gives a VM a name that no VM has had.
func (t *tenantClient) rename(ctx context.Context, v *owned) {
	name := fmt.Sprintf("%s-vm-%d", t.name, t.asks+1)
	err, ok := t.ask(ctx, "rename "+short(v.id)+" to "+name, func(ctx context.Context, p *process, _ [32]byte) error {
		_, err := p.vms.Rename(ctx, tenant.Default, v.id, name)
		return err
	})
	switch {
	case !ok:
		v.renaming = true
	case err == nil:
		t.f.count("VMs renamed")
		v.name, v.renaming = name, false
	case fault.Is(err, fault.FailedPrecondition): // the VM migrates
	default:
		t.f.fail("renaming VM %s was refused: %v", v.id, err)
	}
}

func (t *tenantClient) delete(ctx context.Context, at int, force bool) {
	v := t.have[at]
	err, ok := t.ask(ctx, fmt.Sprintf("delete %s, force %v", short(v.id), force), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.vms.Delete(ctx, tenant.Default, v.id, force, body)
		return err
	})
	switch {
	case !ok:
		t.have[at].leaving = true
	case err == nil, v.leaving && fault.Is(err, fault.NotFound):
		t.f.count("VMs deleted")
		t.gone = append(t.gone, v.id)
		t.have = slices.Delete(t.have, at, at+1)
		t.look(ctx)
	case fault.Is(err, fault.FailedPrecondition):
	default:
		t.f.fail("deleting VM %s was refused: %v", v.id, err)
	}
}

// look lists the VMs on a random member and checks the list. It ignores errors of the call.
func (t *tenantClient) look(ctx context.Context) {
	_, _ = t.check(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))])
}

// check lists all VMs on a member and checks the list. A VM must be in the list if any member has acknowledged its
// creation to this tenant, and must not be in it if any member has acknowledged its deletion. It must have its last
// acknowledged name.
func (t *tenantClient) check(ctx context.Context, s *memberSlot) (all []*cloud.VM, err error) {
	err = t.callAt(ctx, s, "", func(ctx context.Context, p *process) error {
		for token := ""; ; {
			page, next, err := p.vms.List(ctx, tenant.Default, 3, token, "")
			if all = append(all, page...); err != nil || next == "" {
				return err
			}
			token = next
		}
	})
	if err != nil {
		return nil, err
	}
	t.f.count("lists checked")
	names := map[cloud.VMID]string{}
	for _, v := range all {
		if names[v.ID] != "" {
			t.f.fail("a list shows VM %s twice", v.ID)
		}
		names[v.ID] = v.Name
	}
	for _, v := range t.have {
		switch name := names[v.id]; {
		case name == "" && !v.leaving:
			t.f.fail("a list does not show VM %s, whose creation was acknowledged", v.id)
		case name != "" && name != v.name && !v.renaming:
			t.f.fail("a list shows VM %s with the name %s, but the name %s was acknowledged", v.id, name, v.name)
		}
	}
	for _, id := range t.gone {
		if names[id] != "" {
			t.f.fail("a list shows VM %s, whose deletion was acknowledged", id)
		}
	}
	return all, nil
}

// deleteAll deletes all VMs of the tenant after the faults have ended, also those whose creation was never
// acknowledged. Every call must succeed at the first attempt. Before that, every member must list the VMs correctly.
func (t *tenantClient) deleteAll(ctx context.Context) {
	var all []*cloud.VM
	var err error
	for _, s := range t.f.slots {
		if all, err = t.check(ctx, s); err != nil {
			t.f.fail("%s cannot list VMs at peace: %v", s.name, err)
		}
	}
	for _, v := range all {
		if !strings.HasPrefix(v.Name, t.name+"-") {
			continue
		}
		s := t.f.slots[t.rng.IntN(len(t.f.slots))]
		err := t.callAt(ctx, s, "", func(ctx context.Context, p *process) error {
			_, err := p.vms.Delete(ctx, tenant.Default, v.ID, true, [32]byte{})
			return err
		})
		if err != nil {
			t.f.fail("%s cannot delete VM %s at peace: %v", s.name, v.ID, err)
		}
	}
}

// final checks the witness's copy of the records. Every VM whose creation was acknowledged to this tenant must have a
// record, and no VM whose deletion was acknowledged may have one.
func (t *tenantClient) final() {
	a := t.f.audit
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, v := range t.have {
		if a.vms[v.id] == nil && !v.leaving {
			t.f.fail("VM %s (%s), whose creation was acknowledged, is lost", v.id, v.name)
		}
	}
	for _, id := range t.gone {
		if a.vms[id] != nil {
			t.f.fail("VM %s, whose deletion was acknowledged, is there", id)
		}
	}
}
