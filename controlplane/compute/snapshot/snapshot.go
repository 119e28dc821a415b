// Package snapshot implements the calls for snapshots of volumes. It creates, lists and deletes snapshots, creates
// volumes from snapshots, and creates snapshots by schedule. The main type is Service.
//
// A snapshot is a copy of a volume at one instant, in the storage pool of the volume. The calls of this package only
// write records. Package volume defines these records, sends them to the volume's host as part of the volume's desired
// state, and applies the host's reports. The host makes and deletes the copies.
//
// Decisions:
//   - A snapshot is a file that does not depend on the volume's file. If no guest has the volume open, the file is a
//     reflink copy or a sparse copy of the volume's file. Otherwise QEMU makes the copy while the guest runs. Snapshots
//     therefore do not slow down reads of the volume, a snapshot is deleted by removing a file, and damage to the
//     volume does not damage its snapshots. The disadvantages are the duration of the copy, and the space in the
//     storage pool: each snapshot counts with the full size of the volume.
//   - A snapshot of a volume of the driver RBD is an RBD snapshot in the Ceph cluster. The RBD snapshot shares its
//     content with the volume, so it is complete at once and needs no space on a host. A volume that is made from the
//     snapshot is an RBD clone. The host of the new volume flattens the clone at once, without a request.
//   - A snapshot becomes ERROR if the host could not begin the copy within 10 minutes, or if the copy was interrupted.
//     The host does not repeat the copy, because a second copy would have the content of a later instant.
//   - If a volume was made from an image, its snapshots contain only the differences from the image. The image cannot
//     be deleted while the volume, or a volume that was made from its snapshots, needs the image.
//   - The snapshots of the volumes of one VM are separate records with the same group ID. Each of them can be used and
//     deleted separately.
//   - The schedule of a volume is in the volume's metadata. The value of trivet/snapshot-every is the length of an
//     interval, at least 15m. The value of trivet/snapshot-keep is the number of snapshots to keep. Intervals begin at
//     multiples of their length since 1970, in UTC. The schedule creates at most one snapshot in each interval. The
//     snapshot's name contains the beginning of the interval and the end of the volume's ID.
//   - Only AVAILABLE snapshots of the schedule count for trivet/snapshot-keep, so that failed snapshots do not replace
//     good ones. The schedule deletes no other snapshots than its own.
//
// The package must not know agents or hosts. It reads the content of snapshots by a Reader.
package snapshot

import (
	"context"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Service implements the snapshot service of one member.
type Service struct {
	store    *store.Store
	commands *leader.Commands
	volumes  *volume.Service
	read     Reader
}

// New creates the service and registers the commands that other members forward to the leader. The function read reads
// the content of snapshots.
func New(s *store.Store, commands *leader.Commands, volumes *volume.Service, read Reader) *Service {
	c := &Service{s, commands, volumes, read}
	leader.Register(commands, c, createCommand, createOfVMCommand, updateCommand, deleteCommand, createVolumeCommand)
	return c
}

// Result is the result of a call that changes snapshots. Replayed means that an earlier call with the same idempotency
// key made the change.
type Result struct {
	Snapshots []cloud.Snapshot
	Volume    cloud.Volume // of CreateVolume
	Replayed  bool
}

// change is the request of a command. Tenant and Body are always set. The other fields depend on the command.
type change struct {
	Tenant   cloud.Tenant
	Snapshot cloud.Snapshot
	VM       cloud.VMID
	Volume   cloud.Volume
	Body     [32]byte
}

var (
	createCommand       = newCommand("snapshot.create", "CreateSnapshot", (*Service).createOnLeader)
	createOfVMCommand   = newCommand("snapshot.create-of-vm", "CreateVmSnapshots", (*Service).createOfVMOnLeader)
	updateCommand       = newCommand("snapshot.update", "UpdateSnapshot", (*Service).updateOnLeader)
	deleteCommand       = newCommand("snapshot.delete", "DeleteSnapshot", (*Service).removeOnLeader)
	createVolumeCommand = newCommand("snapshot.create-volume", "CreateVolumeFromSnapshot", (*Service).createVolumeOnLeader)
)

// newCommand returns a command that executes run in one transaction, at most once for each idempotency key.
func newCommand(name, method string, run func(*Service, context.Context, *store.Tx, *change) (Result, error)) *leader.Command[*Service, change, Result] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, q change) (out Result, err error) {
		_, err = s.store.Update(ctx, func(tx *store.Tx) error {
			var replayed bool
			out, replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), method, q.Body, func() (Result, error) {
				return run(s, ctx, tx, &q)
			})
			out.Replayed = replayed
			return err
		})
		return out, err
	})
}

// Create creates a snapshot of a volume. It uses the name, volume and labels of snap. body is the hash of the request,
// as in the other methods.
func (s *Service) Create(ctx context.Context, t cloud.Tenant, snap cloud.Snapshot, body [32]byte) (Result, error) {
	if err := cloud.CheckSnapshot(snap.Name, snap.Labels); err != nil {
		return Result{}, err
	}
	if err := cloud.CheckUUID("volume_id", string(snap.Volume)); err != nil {
		return Result{}, err
	}
	return createCommand.Call(ctx, s.commands, change{Tenant: t, Snapshot: snap, Body: body})
}

func newID() (cloud.SnapshotID, error) {
	id, err := uuid.NewV7()
	return cloud.SnapshotID(id.String()), err
}

// createOnLeader implements Create in a transaction of the leader.
func (*Service) createOnLeader(ctx context.Context, tx *store.Tx, q *change) (Result, error) {
	one := q.Snapshot
	var err error
	if one.ID, err = newID(); err != nil {
		return Result{}, err
	}
	one.CreatedBy = auth.CallerOf(ctx).Name()
	if err := volume.AddSnapshot(tx, q.Tenant, &one); err != nil {
		return Result{}, err
	}
	return Result{Snapshots: []cloud.Snapshot{one}}, nil
}

// CreateOfVM creates a snapshot of each volume that is attached to a VM, all of the same instant. It uses the name and
// labels of snap.
func (s *Service) CreateOfVM(ctx context.Context, t cloud.Tenant, vm cloud.VMID, snap cloud.Snapshot, body [32]byte) (Result, error) {
	if err := cloud.CheckSnapshot(snap.Name, snap.Labels); err != nil {
		return Result{}, err
	}
	if err := cloud.CheckUUID("vm_id", string(vm)); err != nil {
		return Result{}, err
	}
	return createOfVMCommand.Call(ctx, s.commands, change{Tenant: t, VM: vm, Snapshot: snap, Body: body})
}

// createOfVMOnLeader implements CreateOfVM in a transaction of the leader.
func (*Service) createOfVMOnLeader(ctx context.Context, tx *store.Tx, q *change) (Result, error) {
	volumes, err := volume.VolumesOf(tx, q.Tenant, q.VM)
	if err != nil {
		return Result{}, err
	}
	if len(volumes) == 0 {
		return Result{}, fault.New(fault.NotFound, "no volume of the project is attached to a VM %s, and only volumes have snapshots: "+
			"a disk is a volume if it was created with a storage class", q.VM)
	}
	group, err := newID()
	if err != nil {
		return Result{}, err
	}
	var out Result
	var ids []cloud.VolumeID
	for _, v := range volumes {
		ids = append(ids, v.ID)
	}
	for _, v := range volumes {
		one := q.Snapshot
		one.Name, one.Volume, one.Group, one.GroupVolumes = q.Snapshot.Name+"-"+v.Disk, v.ID, string(group), ids
		one.CreatedBy = auth.CallerOf(ctx).Name()
		if err := cloud.CheckName("name", one.Name); err != nil {
			return Result{}, err
		}
		if one.ID, err = newID(); err != nil {
			return Result{}, err
		}
		if err := volume.AddSnapshot(tx, q.Tenant, &one); err != nil {
			return Result{}, err
		}
		out.Snapshots = append(out.Snapshots, one)
	}
	return out, nil
}

// Update changes the name of a snapshot, unless name is empty, and merges labels into those of the snapshot.
func (s *Service) Update(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID, name string, labels map[string]string, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("snapshot_id", string(id)); err != nil {
		return Result{}, err
	}
	if name != "" {
		if err := cloud.CheckName("name", name); err != nil {
			return Result{}, err
		}
	}
	if err := cloud.CheckPairs("labels", labels); err != nil {
		return Result{}, err
	}
	return updateCommand.Call(ctx, s.commands, change{Tenant: t, Snapshot: cloud.Snapshot{ID: id, Name: name, Labels: labels}, Body: body})
}

// updateOnLeader implements Update in a transaction of the leader.
func (*Service) updateOnLeader(_ context.Context, tx *store.Tx, q *change) (Result, error) {
	one, err := volume.UpdateSnapshot(tx, q.Tenant, q.Snapshot.ID, q.Snapshot.Name, q.Snapshot.Labels)
	if err != nil {
		return Result{}, err
	}
	return Result{Snapshots: []cloud.Snapshot{*one}}, nil
}

// Delete deletes the record of a snapshot. The host deletes the bytes later.
func (s *Service) Delete(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("snapshot_id", string(id)); err != nil {
		return Result{}, err
	}
	return deleteCommand.Call(ctx, s.commands, change{Tenant: t, Snapshot: cloud.Snapshot{ID: id}, Body: body})
}

// removeOnLeader implements Delete in a transaction of the leader.
func (*Service) removeOnLeader(_ context.Context, tx *store.Tx, q *change) (Result, error) {
	gone, err := volume.DropSnapshot(tx, q.Tenant, q.Snapshot.ID)
	if err != nil {
		return Result{}, err
	}
	return Result{Snapshots: []cloud.Snapshot{*gone}}, nil
}

// CreateVolume creates a volume with the content of a snapshot. It uses the name, size, metadata and labels of v. A
// size of 0 means the size of the snapshot.
func (s *Service) CreateVolume(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID, v cloud.Volume, body [32]byte) (Result, error) {
	if err := cloud.CheckUUID("snapshot_id", string(id)); err != nil {
		return Result{}, err
	}
	checked := v
	checked.SizeGiB = max(v.SizeGiB, 1)
	if err := cloud.CheckVolume(&checked); err != nil {
		return Result{}, err
	}
	return createVolumeCommand.Call(ctx, s.commands, change{Tenant: t, Snapshot: cloud.Snapshot{ID: id}, Volume: v, Body: body})
}

// createVolumeOnLeader implements CreateVolume in a transaction of the leader.
func (s *Service) createVolumeOnLeader(ctx context.Context, tx *store.Tx, q *change) (Result, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Result{}, err
	}
	v := q.Volume
	v.ID, v.CreatedBy = cloud.VolumeID(id.String()), auth.CallerOf(ctx).Name()
	err = s.volumes.CreateFrom(tx, q.Tenant, &v, q.Snapshot.ID)
	return Result{Volume: v}, err
}

// Get returns the snapshot with this ID, or NotFound.
func (s *Service) Get(ctx context.Context, t cloud.Tenant, id cloud.SnapshotID) (out *cloud.Snapshot, err error) {
	if err := cloud.CheckUUID("snapshot_id", string(id)); err != nil {
		return nil, err
	}
	err = s.store.View(ctx, func(r *store.View) error {
		out, err = volume.LookupSnapshot(r, t, id)
		return err
	})
	return out, err
}

// Filter selects snapshots of a list. An empty field selects all.
type Filter struct {
	Volume       cloud.VolumeID
	Name, Status string
}

func (f Filter) matches(s *cloud.Snapshot) bool {
	return (f.Volume == "" || f.Volume == s.Volume) && (f.Name == "" || f.Name == s.Name) && (f.Status == "" || f.Status == s.Status.String())
}

// List returns a page of the tenant's snapshots that match f, and the token of the next page. Snapshots are sorted by
// ID, which is the order of creation.
func (s *Service) List(ctx context.Context, t cloud.Tenant, size int32, token string, f Filter) ([]*cloud.Snapshot, string, error) {
	keep := func(one *cloud.Snapshot) bool { return one.Org == t.Org && !one.Deleted && f.matches(one) }
	query := "snapshots\x00" + string(f.Volume) + "\x00" + f.Name + "\x00" + f.Status
	return store.Page(ctx, s.store, volume.Snapshots, store.PageRequest{Size: size, Token: token, Query: query}, keep, string(t.Project))
}

// ListAll returns a page of the snapshots within t (of all projects for the zero t), and the token of the next page.
// Snapshots are sorted by project and ID.
func (s *Service) ListAll(ctx context.Context, t cloud.Tenant, size int32, token string) ([]*cloud.Snapshot, string, error) {
	keep := func(one *cloud.Snapshot) bool {
		return !one.Deleted && t.Contains(cloud.Tenant{Org: one.Org, Project: one.Project})
	}
	req := store.PageRequest{Size: size, Token: token, Query: "all snapshots\x00" + t.String()}
	return store.Page(ctx, s.store, volume.Snapshots, req, keep)
}
