package live

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/snapshot"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const mostSnapshots = 4

// snapshot makes a random call about snapshots.
func (t *tenantClient) snapshot(ctx context.Context) {
	n := t.rng.IntN(100)
	switch {
	case n < 40 && len(t.snapshots) < mostSnapshots:
		t.createSnapshot(ctx)
	case n < 50 && len(t.snapshots) < mostSnapshots:
		t.createVMSnapshots(ctx)
	case n < 75:
		t.deleteSnapshot(ctx)
	default:
		t.restore(ctx)
	}
}

// createSnapshot creates a snapshot of a random volume.
func (t *tenantClient) createSnapshot(ctx context.Context) {
	if len(t.volumes) == 0 {
		return
	}
	v := t.volumes[t.rng.IntN(len(t.volumes))]
	t.addSnapshots(ctx, "create a snapshot of volume "+string(v.id), func(ctx context.Context, p *process, name string, body [32]byte) (snapshot.Result, error) {
		return p.snapshots.Create(ctx, tenant.Default, cloud.Snapshot{Name: name, Volume: v.id}, body)
	})
}

// createVMSnapshots creates snapshots of all volumes of a random VM.
func (t *tenantClient) createVMSnapshots(ctx context.Context) {
	if len(t.have) == 0 {
		return
	}
	vm := t.have[t.rng.IntN(len(t.have))]
	t.addSnapshots(ctx, "create snapshots of VM "+short(vm.id), func(ctx context.Context, p *process, name string, body [32]byte) (snapshot.Result, error) {
		return p.snapshots.CreateOfVM(ctx, tenant.Default, vm.id, cloud.Snapshot{Name: name}, body)
	})
}

func (t *tenantClient) addSnapshots(ctx context.Context, what string, call func(context.Context, *process, string, [32]byte) (snapshot.Result, error)) {
	var made snapshot.Result
	name := fmt.Sprintf("%s-snapshot-%d", t.name, t.asks+1)
	err, ok := t.ask(ctx, what, func(ctx context.Context, p *process, body [32]byte) (err error) {
		made, err = call(ctx, p, name, body)
		return err
	})
	if !ok {
		return
	}
	if err != nil {
		t.allowVolume(what, err, fault.FailedPrecondition, fault.NotFound, fault.ResourceExhausted)
		return
	}
	for _, s := range made.Snapshots {
		t.snapshots = append(t.snapshots, s.ID)
		t.f.count("snapshots created")
	}
}

func (t *tenantClient) deleteSnapshot(ctx context.Context) {
	if len(t.snapshots) == 0 {
		return
	}
	at := t.rng.IntN(len(t.snapshots))
	id := t.snapshots[at]
	err, ok := t.ask(ctx, "delete snapshot "+string(id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := p.snapshots.Delete(ctx, tenant.Default, id, body)
		return err
	})
	if ok {
		t.allowVolume("deleting snapshot "+string(id), err, fault.FailedPrecondition)
	}
	if ok && err == nil {
		t.f.count("snapshots deleted")
	}
	if !ok || err == nil {
		t.snapshots = slices.Delete(t.snapshots, at, at+1)
	}
}

// restore creates a volume from a random snapshot.
func (t *tenantClient) restore(ctx context.Context) {
	if len(t.snapshots) == 0 || len(t.volumes) >= mostVolumes {
		return
	}
	id := t.snapshots[t.rng.IntN(len(t.snapshots))]
	name := fmt.Sprintf("%s-restored-%d", t.name, t.asks+1)
	var made snapshot.Result
	err, ok := t.ask(ctx, "create "+name+" from snapshot "+string(id), func(ctx context.Context, p *process, body [32]byte) (err error) {
		made, err = p.snapshots.CreateVolume(ctx, tenant.Default, id, cloud.Volume{Name: name}, body)
		return err
	})
	if ok {
		t.allowVolume("creating a volume from a snapshot", err, fault.FailedPrecondition, fault.NotFound, fault.ResourceExhausted)
	}
	if ok && err == nil {
		t.volumes = append(t.volumes, ownedVolume{id: made.Volume.ID, sizeGiB: made.Volume.SizeGiB})
	}
}

// snapshotEvery and snapshotKeep are the schedule of the volumes that have one.
const (
	snapshotEvery = 15 * time.Minute
	snapshotKeep  = 1
)

// endSchedules removes the schedules of all volumes. Every call must succeed at the first attempt.
func (t *tenantClient) endSchedules(ctx context.Context) {
	for _, id := range t.f.audit.scheduledVolumes() {
		err := t.callAt(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))], "", func(ctx context.Context, p *process) error {
			_, err := p.volumes.Update(ctx, tenant.Default, id, "", map[string]string{cloud.SnapshotEvery: ""}, nil, [32]byte{})
			return err
		})
		if err != nil {
			t.f.fail("end the schedule of volume %s at peace: %v", id, err)
		}
	}
	time.Sleep(time.Second) // until the witness has seen the last snapshots
}

// deleteSnapshots deletes all snapshots. Every call must succeed at the first attempt.
func (t *tenantClient) deleteSnapshots(ctx context.Context) {
	for _, id := range t.f.audit.snapshotIDs() {
		err := t.callAt(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))], "", func(ctx context.Context, p *process) error {
			_, err := p.snapshots.Delete(ctx, tenant.Default, id, [32]byte{})
			return err
		})
		if err != nil {
			t.f.fail("delete snapshot %s at peace: %v", id, err)
		}
	}
}

// finalSnapshots checks that the witness's copy of the records has each snapshot whose creation was acknowledged,
// unless a call has deleted it.
func (t *tenantClient) finalSnapshots() {
	a := t.f.audit
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range t.snapshots {
		if s := a.snapshots[id]; s == nil || s.Deleted {
			t.f.fail("snapshot %s, whose creation was acknowledged, is lost", id)
		}
	}
}
