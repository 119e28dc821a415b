package live

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ownedVolume is a volume whose creation a member has acknowledged to the tenant. leaving has the same meaning as in
// the type owned.
type ownedVolume struct {
	id      cloud.VolumeID
	sizeGiB uint64
	leaving bool
	movable bool // usable on all hosts
}

const mostVolumes = 4

// storage makes a random call about volumes.
func (t *tenantClient) storage(ctx context.Context) {
	n := t.rng.IntN(100)
	if len(t.volumes) == 0 || n < 15 && len(t.volumes) < mostVolumes {
		t.createVolume(ctx)
		return
	}
	at := t.rng.IntN(len(t.volumes))
	v := &t.volumes[at]
	switch {
	case v.leaving || n < 25:
		t.deleteVolume(ctx, at)
	case n < 35:
		t.resizeVolume(ctx, v)
	case n < 40:
		t.flattenVolume(ctx, v)
	case n < 68:
		t.attachVolume(ctx, v)
	default:
		t.detachVolume(ctx)
	}
}

// allowVolume reports a violation if a call about volumes failed with another fault than the expected ones.
func (t *tenantClient) allowVolume(what string, err error, kinds ...fault.Kind) {
	if err != nil && !slices.ContainsFunc(kinds, func(k fault.Kind) bool { return fault.Is(err, k) }) {
		t.f.fail("%s was refused: %v", what, err)
	}
}

func (t *tenantClient) createVolume(ctx context.Context) {
	size, class := uint64(1+t.rng.IntN(5)), ""
	if n := t.rng.IntN(5); n < 2 {
		class = cephClass
	} else if n < 4 {
		class = sharedClass
	}
	image, metadata := cloud.ImageID(""), map[string]string{}
	if t.rng.IntN(3) == 0 {
		image = t.f.image
	}
	if t.rng.IntN(3) == 0 {
		metadata = map[string]string{cloud.SnapshotEvery: snapshotEvery.String(), cloud.SnapshotKeep: strconv.Itoa(snapshotKeep)}
	}
	var made volume.Result
	name := fmt.Sprintf("%s-volume-%d", t.name, t.asks+1)
	err, ok := t.ask(ctx, "create "+name, func(ctx context.Context, p *process, body [32]byte) (err error) {
		made, err = p.volumes.Create(ctx, tenant.Default, cloud.Volume{Name: name, SizeGiB: size, Class: class, Metadata: metadata}, image, body)
		return err
	})
	if ok && err == nil {
		t.f.count("volumes created")
		t.volumes = append(t.volumes, ownedVolume{id: made.Volume.ID, sizeGiB: size, movable: class != ""})
		return
	}
	if ok {
		t.f.fail("creating %s was refused: %v", name, err)
	}
}

func (t *tenantClient) deleteVolume(ctx context.Context, at int) {
	v := t.volumes[at]
	err, ok := t.ask(ctx, "delete volume "+string(v.id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.volumes.Delete(ctx, tenant.Default, v.id, body)
		return err
	})
	switch {
	case !ok:
		t.volumes[at].leaving = true
	case err == nil, v.leaving && fault.Is(err, fault.NotFound):
		t.f.count("volumes deleted")
		t.goneVolumes = append(t.goneVolumes, v.id)
		t.volumes = slices.Delete(t.volumes, at, at+1)
	default:
		t.allowVolume("deleting volume "+string(v.id), err, fault.FailedPrecondition)
	}
}

func (t *tenantClient) flattenVolume(ctx context.Context, v *ownedVolume) {
	err, ok := t.ask(ctx, "flatten volume "+string(v.id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.volumes.Flatten(ctx, tenant.Default, v.id, body)
		return err
	})
	if ok {
		t.allowVolume("flattening volume "+string(v.id), err, fault.FailedPrecondition)
	}
}

func (t *tenantClient) resizeVolume(ctx context.Context, v *ownedVolume) {
	err, ok := t.ask(ctx, "resize volume "+string(v.id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.volumes.Resize(ctx, tenant.Default, v.id, v.sizeGiB+1, body)
		return err
	})
	if ok {
		t.allowVolume("resizing volume "+string(v.id), err, fault.ResourceExhausted, fault.FailedPrecondition, fault.InvalidArgument)
	}
	// If the call got no response, the volume may have been enlarged all the same.
	if err == nil || !ok {
		v.sizeGiB++
	}
}

func (t *tenantClient) attachVolume(ctx context.Context, v *ownedVolume) {
	if len(t.have) == 0 {
		return
	}
	vm := t.have[t.rng.IntN(len(t.have))]
	disk := cloud.Disk{ID: fmt.Sprintf("v%d", t.rng.IntN(3)), Volume: v.id}
	err, ok := t.ask(ctx, fmt.Sprintf("attach volume %s to %s", v.id, short(vm.id)), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.vms.AttachDisk(ctx, tenant.Default, vm.id, disk, body)
		return err
	})
	if ok {
		t.allowVolume("attaching a volume", err, fault.FailedPrecondition, fault.NotFound, fault.AlreadyExists)
	}
	if ok && err == nil {
		t.f.count("volumes attached")
	}
}

func (t *tenantClient) detachVolume(ctx context.Context) {
	if len(t.have) == 0 {
		return
	}
	vm := t.have[t.rng.IntN(len(t.have))]
	disk := fmt.Sprintf("v%d", t.rng.IntN(3))
	err, ok := t.ask(ctx, "detach "+disk+" from "+short(vm.id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.vms.DetachDisk(ctx, tenant.Default, vm.id, disk, body)
		return err
	})
	if ok {
		t.allowVolume("detaching a volume", err, fault.FailedPrecondition, fault.NotFound)
	}
	if ok && err == nil {
		t.f.count("volumes detached")
	}
}

// randomVolume returns a disk with one of the tenant's volumes for a new VM, or false.
func (t *tenantClient) randomVolume() (cloud.Disk, bool) {
	if len(t.volumes) == 0 || t.rng.IntN(3) > 0 {
		return cloud.Disk{}, false
	}
	v := t.volumes[t.rng.IntN(len(t.volumes))]
	return cloud.Disk{ID: "v0", Volume: v.id}, !v.leaving
}

// finalVolumes checks that the witness's copy of the records has each volume whose creation was acknowledged, and none
// whose deletion was acknowledged.
func (t *tenantClient) finalVolumes() {
	a := t.f.audit
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, v := range t.volumes {
		if a.volumes.all[v.id] == nil && !v.leaving {
			t.f.fail("volume %s, whose creation was acknowledged, is lost", v.id)
		}
	}
	for _, id := range t.goneVolumes {
		if a.volumes.all[id] != nil {
			t.f.fail("volume %s, whose deletion was acknowledged, is there", id)
		}
	}
}

// deleteVolumes deletes all volumes after all VMs were deleted. Every call must succeed at the first attempt.
func (t *tenantClient) deleteVolumes(ctx context.Context) {
	a := t.f.audit
	a.mu.Lock()
	all := make([]cloud.VolumeID, 0, len(a.volumes.all))
	for id := range a.volumes.all {
		all = append(all, id)
	}
	a.mu.Unlock()
	slices.Sort(all)
	for _, id := range all {
		err := t.callAt(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))], "", func(ctx context.Context, p *process) error {
			_, err := p.volumes.Delete(ctx, tenant.Default, id, [32]byte{})
			return err
		})
		if err != nil {
			t.f.fail("delete volume %s at peace: %v", id, err)
		}
	}
}
