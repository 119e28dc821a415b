// Package volume manages block volumes, which exist independently of VMs: their records, the calls that change them,
// and what hosts report of them. The main type is Service.
//
// A volume of the driver MANAGED is a file in a storage pool of one host. Its record says what the volume should be;
// the host makes, enlarges and deletes the file. CreateVolume only writes the record. The first attachment binds the
// volume to the host of the VM. From then on the volume takes room in the host's pool. It can be attached to VMs of
// this host only, unless hosts share the pool.
//
// A volume of the driver RBD is an RBD image of a Ceph cluster. Every host that serves RBD can use the volume. Within
// about a second after the creation of the volume, the leader binds the volume to such a host (Place), and the host
// makes the RBD image.
//
// Volumes of the driver RBD and volumes in shared pools can be used on several hosts, one at a time (the method Movable
// of cloud.Volume). The host of such a volume can change only while the volume is detached and flushed: Attach moves
// the volume to the host of the VM, and Place moves the volume to another host if its present host is not READY or no
// longer serves the storage of the volume.
//
// A volume is attached to at most one VM at a time. Only Attach and Release change this VM. Package vm calls them in
// the transactions that change a VM. The methods of cloud.Volume check the rules, and the comment of cloud.Volume
// explains the attachment generation.
//
// Decisions:
//
//   - A volume is detached when its host has reported that the VM has no process, or that the guest has released the
//     disk. If a VM is deleted while its host does not respond, its volumes therefore stay attached until the host has
//     reported that the VM is destroyed.
//
//   - The record of a deleted volume is removed at once. The host deletes the bytes later, and their room in the pool
//     becomes free when the host has reported that the volume is absent. Such a report counts only if its generation is
//     that of the deletion: an earlier report may mean that the host has not made the volume yet. A report with an
//     error does not count either: the host may have failed to look into the pool.
//
//   - If a host is removed from the cluster (node.Service.Evict), the volumes of deleted VMs that the host did not
//     report as destroyed are detached, so that they can be deleted. The removed host may still have an RBD volume
//     among them open. Therefore Place moves this volume to another host, which makes the Ceph cluster refuse the
//     requests of the removed host's QEMU and then reports the volume as flushed. Only then can the volume be attached
//     again. A volume in a pool of the host has the status ERROR or IN_USE. A volume in a shared pool is moved to
//     another host, which takes the lock of the file. The lock is free only when no process of the removed host has the
//     file open. Then the volume can be attached again.
//
//   - Hosts that report a pool as shared also report the ID that is stored in the directory. A volume moves only
//     between hosts that report the same name and ID, because two hosts can have different directories of one name. The
//     room of a shared pool is counted in one record (SharedPool) for all hosts, with the limit of the host on which
//     the volume is bound.
//
//   - A volume in a shared pool with a PENDING snapshot is attached only on its present host, because this host may be
//     copying the file. If the host is lost, another host records the snapshot as failed.
//
//   - The desired state of an RBD volume contains the key of the Ceph user. Only AssignedVolumes adds the key, and only
//     for the host that the volume is bound to. The storage class cannot be deleted until the RBD image is deleted,
//     because the host needs the key to delete the RBD image.
//
//   - Only system:admin can register an existing RBD image as a volume, because the Ceph user of a class can read every
//     image of the pool, and images carry no information about their owners. An image has at most one volume: the
//     transaction of RegisterExternal writes a record with the cluster, the pool and the name of the image (type
//     registration). After the deletion of the volume, this record remains until a host has removed its own record of
//     the image from the Ceph cluster. Until then, a VM may still have the image open, so the image cannot be
//     registered again. The host's record contains the ID of the volume. This prevents two Trivet clouds, or a cloud
//     that was restored from a backup, from using the same image.
//
//   - A change of a storage class reaches its volumes in separate transactions (ApplyClasses). New limits take effect
//     at the next attachment or start. The records of volumes do not contain the key of the Ceph user. If the key
//     changes, the leader sends the unchanged desired state of each RBD volume to its host again, with the new key.
//
//   - An image cannot be deleted until all volumes that were made from it are deleted or flattened, because the file of
//     a volume may refer to the image's file. The transaction that applies the host's report of a flattened volume also
//     deletes the record that the volume uses the image. Only a report about the newest generation of the volume
//     counts.
//
//   - A volume of an encrypted class gets a random key when it is created. The key is encrypted with the cluster key
//     and stored in a separate record. Therefore no volume record, list, response, stored idempotency response or watch
//     of volumes contains the key. AssignedVolumes sends the key only to the host that needs the key. The record with
//     the key is deleted with the volume. Earlier backups of the control plane still contain the encrypted key. The
//     history of the records on the members contains it until the compaction, for up to about 15 minutes.
//
//   - A snapshot is a copy of a volume. It counts with the size of the volume in the host's pool and in the quotas. The
//     desired state of a volume contains its snapshots, and the host's report about a volume contains the state of its
//     snapshots. Package snapshot implements the calls of the API.
//
//   - A volume that has snapshots cannot be deleted, because snapshots reach the host only as a part of the volume's
//     desired state. The record of a deleted snapshot is kept until the host has reported that it has deleted the
//     bytes. API callers do not see such a record.
//
//   - A volume cannot be resized while one of its snapshots is PENDING, so that the copy has the size in the snapshot's
//     record.
//
// Keys: volume/<project>/<id>, volume-name/<project>/<name>, snapshot/<project>/<id>, snapshot-name/<project>/<name>,
// volume-snapshot/<volume>/<snapshot>, snapshot-schedule/<project>/<volume>, volume-key/<project>/<id>,
// shared-pool/<pool ID>, external-image/<fsid>/<pool>/<image>.
package volume

import (
	"context"
	"log/slog"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	// Volumes is the table of volume records, at volume/<project>/<id>.
	Volumes = store.NewTable[cloud.Volume]("volume")
	names   = store.NewTable[cloud.VolumeID]("volume-name")
)

// Service implements the volume service of one member.
type Service struct {
	store    *store.Store
	commands *leader.Commands
	keys     sealer
	billing  Billing
	log      *slog.Logger
	// placements caches the last result of fleet.due.
	placements *store.Memo[*duePlacement]
}

// Options configures New. All fields except Billing are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	// Key encrypts and decrypts the keys of encrypted volumes, and decrypts the keys of Ceph users.
	Key *clusterkey.Key
	Log *slog.Logger
	// Billing is called for changes of volumes. It is nil if volumes are free of charge.
	Billing Billing
}

// New creates the service and registers the commands that other members forward to the leader.
func New(o Options) *Service {
	if o.Billing == nil {
		o.Billing = noBilling{}
	}
	v := &Service{
		store: o.Store, commands: o.Commands, keys: sealer{o.Key}, billing: o.Billing, log: o.Log,
		placements: store.NewMemo[*duePlacement](1),
	}
	leader.Register(o.Commands, v, createCommand, deleteCommand, resizeCommand, updateCommand, flattenCommand, registerCommand)
	return v
}

// Lookup returns the volume with this ID. It returns NotFound if the volume does not exist or does not belong to the
// tenant t.
func Lookup(r store.Reader, t cloud.Tenant, id cloud.VolumeID) (*cloud.Volume, error) {
	v, err := Volumes.Get(r, string(t.Project), string(id))
	if err != nil {
		return nil, err
	}
	if v == nil || v.Org != t.Org {
		return nil, fault.New(fault.NotFound, "no volume %s", id)
	}
	return v, nil
}

// Get returns the volume with this ID, or NotFound, like Lookup.
func (s *Service) Get(ctx context.Context, t cloud.Tenant, id cloud.VolumeID) (v *cloud.Volume, err error) {
	if err := cloud.CheckUUID("volume_id", string(id)); err != nil {
		return nil, err
	}
	err = s.store.View(ctx, func(r *store.View) error {
		v, err = Lookup(r, t, id)
		return err
	})
	return v, err
}

// Filter selects volumes of a list. An empty field selects all.
type Filter struct{ Name, Status, Class, VM string }

func (f Filter) matches(v *cloud.Volume) bool {
	return (f.Name == "" || f.Name == v.Name) && (f.Status == "" || f.Status == v.Status().String()) &&
		(f.Class == "" || f.Class == v.Class) && (f.VM == "" || f.VM == string(v.VM))
}

// List returns a page of the tenant's volumes that match f, and the token of the next page. Volumes are sorted by ID,
// which is the order of creation.
func (s *Service) List(ctx context.Context, t cloud.Tenant, size int32, token string, f Filter) ([]*cloud.Volume, string, error) {
	keep := func(v *cloud.Volume) bool { return v.Org == t.Org && f.matches(v) }
	query := "volumes\x00" + f.Name + "\x00" + f.Status + "\x00" + f.Class + "\x00" + f.VM
	return store.Page(ctx, s.store, Volumes, store.PageRequest{Size: size, Token: token, Query: query}, keep, string(t.Project))
}

// ListAll returns a page of the volumes within t (of all projects for the zero t), and the token of the next page. If
// host is not empty, it returns only volumes that are bound to this host. Volumes are sorted by project and ID.
func (s *Service) ListAll(
	ctx context.Context, t cloud.Tenant, host cloud.NodeID, size int32, token string,
) ([]*cloud.Volume, string, error) {
	keep := func(v *cloud.Volume) bool { return t.Contains(v.Tenant()) && (host == "" || v.Node == host) }
	req := store.PageRequest{Size: size, Token: token, Query: "all volumes\x00" + t.String() + "\x00" + string(host)}
	return store.Page(ctx, s.store, Volumes, req, keep)
}

// save stores a changed volume. The parameter before is the volume's generation before the change. If the generation
// has changed, save also writes the volume's Bound record, so that the leader sends the new desired state to the
// volume's host, and during a migration of the VM also to the other host.
func save(tx *store.Tx, v *cloud.Volume, before uint64) {
	v.UpdatedAt = tx.Now()
	Volumes.Put(tx, v, string(v.Project), string(v.ID))
	if v.Generation == before {
		return
	}
	for _, host := range []cloud.NodeID{v.Node, v.Other} {
		if host != "" {
			node.BoundVolumes.Put(tx, &node.Bound{
				Project: v.Project, Generation: v.Generation, Pool: v.Pool, PoolID: v.PoolID, Class: rbdClass(v),
			}, string(host), string(v.ID))
		}
	}
}

// Result is the result of a call that changes a volume. Replayed means that an earlier call with the same idempotency
// key made the change.
type Result struct {
	Volume   cloud.Volume
	Replayed bool
}

// change is the request of a command that changes a volume. Which fields of Volume are set depends on the command.
type change struct {
	Tenant cloud.Tenant
	Volume cloud.Volume
	Image  cloud.ImageID
	// At is the RBD image of a registered volume.
	At RBDImage
	// Key is a key for a new volume. It is stored only if the class of the volume is encrypted.
	Key  sealedKey
	Body [32]byte
}

var (
	createCommand = newCommand("volume.create", "CreateVolume", create, Billing.AdmitVolume)
	deleteCommand = newCommand("volume.delete", "DeleteVolume", remove, Billing.VolumeRemoved)
	resizeCommand = newCommand("volume.resize", "ResizeVolume", resize, Billing.VolumeChanged)
	updateCommand = newCommand("volume.update", "UpdateVolume", update, Billing.VolumeChanged)
)

// newCommand returns a command that executes run and then bill in one transaction, at most once for each idempotency
// key.
func newCommand(
	name, method string, run func(context.Context, *store.Tx, *change) (cloud.Volume, error),
	bill func(Billing, *store.Tx, *cloud.Volume) error,
) *leader.Command[*Service, change, Result] {
	return leader.NewCommand(name, leader.Keyed, func(s *Service, ctx context.Context, q change) (out Result, err error) {
		_, err = s.store.Update(ctx, func(tx *store.Tx) error {
			out.Volume, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), method, q.Body, func() (cloud.Volume, error) {
				v, err := run(ctx, tx, &q)
				if err != nil {
					return v, err
				}
				return v, bill(s.billing, tx, &v)
			})
			return err
		})
		return out, err
	})
}

// chargeQuota counts a new or changed volume in the quotas of its project and its org. The parameter named more is the
// amount that the volume will use, and the one named less is the amount that it has used so far. It returns
// ResourceExhausted if a quota would be exceeded.
func chargeQuota(tx *store.Tx, t cloud.Tenant, more, less tenant.Amount) error {
	return tenant.Take(tx, t, tenant.Storage, more, less, func(p cloud.ProjectID) (sum tenant.Amount, err error) {
		all, _, err := Volumes.List(tx, 0, string(p))
		for _, r := range all {
			sum = sum.Plus(amountOf(r.Value.SizeGiB))
		}
		if err != nil {
			return sum, err
		}
		snapshots, _, err := Snapshots.List(tx, 0, string(p))
		for _, r := range snapshots {
			if !r.Value.Deleted {
				sum = sum.Plus(snapshotAmount(r.Value))
			}
		}
		return sum, err
	})
}

// amountOf returns the part of its project's quota that a volume of this size uses.
func amountOf(gib uint64) tenant.Amount { return tenant.Amount{Volumes: 1, VolumeGiB: gib} }

// CheckNoVolumes returns an error if the project t.Project still has volumes, because a project with volumes cannot be
// deleted.
func CheckNoVolumes(r store.Reader, t cloud.Tenant) error {
	if t.Project == "" {
		return nil
	}
	found, _, err := Volumes.List(r, 1, string(t.Project))
	if err != nil || len(found) == 0 {
		return err
	}
	return fault.New(fault.FailedPrecondition, "project %s has volume %s: delete its volumes first", t.Project, found[0].Value.Name)
}

// useImage sets the image with whose content a new volume begins, and records that the volume uses the image. It
// returns NotFound if the volume's org cannot see the image, and InvalidArgument if the volume is smaller than the
// image.
func useImage(tx *store.Tx, v *cloud.Volume, id cloud.ImageID) error {
	i, err := image.Lookup(tx, v.Org, id)
	if err != nil {
		return err
	}
	if v.SizeBytes() < i.VirtualSize {
		return fault.Invalid("size_gib", "the image is %d bytes large, the volume of %d GiB only %d", i.VirtualSize, v.SizeGiB, v.SizeBytes())
	}
	if v.SizeGiB < uint64(i.MinDiskGiB) {
		return fault.Invalid("size_gib", "image %s needs %d GiB, got %d", id, i.MinDiskGiB, v.SizeGiB)
	}
	v.Image = i.Built()
	i.UseForVolume(tx, v.ID)
	return nil
}

// ServedClasses implements node.VolumeController.
func (s *Service) ServedClasses(r store.Reader, n *cloud.Node) ([]string, error) {
	return storageclass.Served(r, n)
}

// rbdClass returns the storage class of a volume of the driver RBD, and "" for other volumes.
func rbdClass(v *cloud.Volume) string {
	if v.Driver != cloud.DriverRBD {
		return ""
	}
	return v.Class
}
