package volume

import (
	"cmp"
	"context"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// RBDImage names an RBD image of a Ceph cluster. An empty Cluster or Pool means the cluster or pool of the storage
// class.
type RBDImage struct {
	Cluster string // fsid
	Pool    string
	Image   string
}

// registration is the record of a registered RBD image, at external-image/<fsid>/<pool>/<image>. The key does not
// contain the storage class, because several classes can name the same pool. The record outlives the record of the
// volume: it is deleted when the volume's host has removed its own record of the image.
type registration struct {
	Project cloud.ProjectID
	Volume  cloud.VolumeID
}

var registrations = store.NewTable[registration]("external-image")

var registerCommand = newCommand("volume.register", "RegisterExternalVolume", register, Billing.AdmitVolume)

// RegisterExternal creates the record of a volume for an existing RBD image. It uses the name, size, driver, class,
// metadata and labels of v. The caller of the API must be system:admin.
func (s *Service) RegisterExternal(ctx context.Context, t cloud.Tenant, v cloud.Volume, at RBDImage, body [32]byte) (Result, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Result{}, err
	}
	d, err := s.draft(id, t, v, "")
	if err != nil {
		return Result{}, err
	}
	if err := cloud.CheckExternalImage(at.Image); err != nil {
		return Result{}, err
	}
	d.Volume.ExternalImage = at.Image
	return registerCommand.Call(ctx, s.commands, change{Tenant: t, Volume: d.Volume, At: at, Body: body})
}

// register implements RegisterExternal in a transaction of the leader.
func register(ctx context.Context, tx *store.Tx, q *change) (v cloud.Volume, err error) {
	class, err := storageclass.Resolve(tx, q.Volume.Class, q.Volume.Driver)
	if err != nil {
		return v, err
	}
	if class.RBD == nil {
		return v, errNotExternal()
	}
	if class.Encrypted {
		return v, fault.New(fault.FailedPrecondition, "storage class %s is encrypted, and an existing RBD image cannot become an encrypted volume: choose a class that is not encrypted", class.Name)
	}
	at := RBDImage{cmp.Or(q.At.Cluster, class.RBD.FSID), cmp.Or(q.At.Pool, class.RBD.Pool), q.At.Image}
	if !mutant.On(mutant.RegisterElsewhere) {
		if at.Cluster != class.RBD.FSID {
			return v, fault.Invalid("rbd.cluster_id", "storage class %s is in the Ceph cluster %s", class.Name, class.RBD.FSID)
		}
		if at.Pool != class.RBD.Pool {
			return v, fault.Invalid("rbd.pool", "storage class %s is in the Ceph pool %s", class.Name, class.RBD.Pool)
		}
	}
	if err := checkUnregistered(tx, at); err != nil && !mutant.On(mutant.RegisterTwice) {
		return v, err
	}
	registrations.Put(tx, &registration{q.Volume.Project, q.Volume.ID}, at.Cluster, at.Pool, at.Image)
	return create(ctx, tx, q)
}

// errNotExternal returns the error of RegisterExternalVolume for the driver MANAGED.
func errNotExternal() error {
	return fault.New(fault.FailedPrecondition, "a volume of the driver MANAGED cannot be registered, because its host creates its file; "+
		"import the file as an image, and create a volume with image_id").WithReason("DRIVER_NOT_EXTERNAL")
}

// checkUnregistered returns AlreadyExists if an RBD image is registered.
func checkUnregistered(tx *store.Tx, at RBDImage) error {
	r, err := registrations.Get(tx, at.Cluster, at.Pool, at.Image)
	if err != nil || r == nil {
		return err
	}
	v, err := Volumes.Get(tx, string(r.Project), string(r.Volume))
	if err != nil {
		return err
	}
	if v == nil {
		return fault.New(fault.AlreadyExists, "RBD image %s/%s was registered as volume %s, which was deleted, and no host has released the image yet: try again later",
			at.Pool, at.Image, r.Volume).WithReason("IMAGE_NOT_RELEASED")
	}
	return fault.New(fault.AlreadyExists, "RBD image %s/%s is registered as volume %s in project %s", at.Pool, at.Image, v.Name, v.Project).
		WithReason("IMAGE_REGISTERED").With("volume", string(v.ID))
}

// unregister deletes the registration of an RBD image in the Ceph pool of a class. It does nothing if image is empty,
// which means that the volume is not a registered one.
func unregister(tx *store.Tx, class, image string) error {
	if image == "" {
		return nil
	}
	c, err := storageclass.Classes.Get(tx, class)
	if err != nil || c == nil || c.RBD == nil {
		return err
	}
	registrations.Delete(tx, c.RBD.FSID, c.RBD.Pool, image)
	return nil
}
