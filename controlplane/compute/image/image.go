// Package image manages the images that VMs are created from. The store has a record per image. The bytes are files on
// the members, named by their SHA-256, and never in the raft log. The main types are Service and Files.
//
// The status of an image is first PENDING, then UPLOADING, then AVAILABLE. It becomes ERROR on a failure, with the
// reason in metadata trivet/error. The member that receives CreateImage, the importer, opens the source and returns
// PENDING. It then copies the source, examines and hashes its copy, records the checksum and sets UPLOADING. The other
// members pull the bytes, which means that they copy them from members that have them, and verify the checksum. The
// image becomes AVAILABLE when a majority of the members has the bytes. The format is determined from the bytes, by
// pure Go code; an import with another declared format fails. The importer reads no file of its host except the named
// one, and only below the configured import directories.
//
// A client can also send the bytes in parts. A part is acknowledged when a majority of the members has synced it to
// disk (spreadPart) and its record is written. Parts are files like images, named by their SHA-256, and are deleted
// when no record names them. Every member can take parts and complete the upload, because the session is a field of the
// image's record. The member that completes the upload becomes the importer, and the joined parts are the source. If
// the importer does not finish in time, the leader becomes the importer. The parts are kept until the image is
// AVAILABLE. If no holder of the joined image can be reached before that, the other members join the parts themselves.
//
// Run does all copying. If a stop or a crash interrupts copying, the next Run reads the records and starts the copying
// again.
//
// Each member reads and verifies each of its files once a week. It removes a damaged file and pulls the image again
// from another member.
//
// A source is a file:// URL on the importer's host, or an https:// URL, which package websource fetches.
//
// The importer converts images of the formats VMDK, VHD and VHDX to QCOW2 with package vdisk. Package vdisk is pure Go
// and reads no other file than the importer's copy. Therefore the conversion runs in the member, and not as qemu-img in
// a sandbox of an agent, as the design had planned. A member converts one image at a time, and limits the duration, the
// memory and the output of a conversion. If the image is deleted, its import is cancelled.
//
// Decisions of this version: An image becomes ERROR if the importer has not copied it within half an hour after the
// call, or if no majority of the members has it half an hour after its record last changed. The reason then names the
// importer, and the bytes are deleted. A member that has lost its copy records the loss and pulls the image again. When
// the last copy is lost, the image becomes ERROR. Only system:admin may change a PUBLIC image. Only the image's own org
// sees the list of orgs that it is shared with. A member removes files only when it can read the newest records. The
// older records of a member that was cut off may lack a part that this member has stored and the cluster has
// acknowledged.
package image

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// use is a record in the store which states that a VM or a volume uses an image. Its key is image-use/<image>/<user>,
// where the user is the ID of the VM or volume. An image with such records cannot be deleted.
type use struct {
	// Org is the org of the VM or volume.
	Org cloud.OrgID
	// Volume is true if the user is a volume.
	Volume bool `cbor:",omitempty"`
}

var (
	// Images is the table of image records, at image/<id>.
	Images = store.NewTable[cloud.Image]("image")
	uses   = store.NewTable[use]("image-use")
	// names has the ID of the image that last got a name of an org, at image-name/<org>/<name>. See claimName.
	names = store.NewTable[cloud.ImageID]("image-name")
)

// Options configures New. All fields except ImportDirs and Web are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Files    *Files
	// Self is this member's ID.
	Self uint64
	// Members returns the IDs of the current members of the cluster, including this one.
	Members func() []uint64
	// Peers reads image bytes from other members.
	Peers Peers
	// ImportDirs are the directories from which file:// sources may be imported.
	ImportDirs []ImportDir
	// Web fetches https:// sources. If it is nil, such sources are refused.
	Web *websource.Client
	// Snapshots reads the snapshots of volumes from which images are made.
	Snapshots Snapshots
	Log       *slog.Logger
}

// Service implements the image service of one member.
type Service struct {
	opts Options
	// wake has a value when Run must check the records.
	wake chan struct{}
	jobs *backgroundJobs
	// imports, fetches, pulls and partCalls are semaphores that limit concurrent imports of files and parts, imports of
	// https sources, pulls and calls of UploadPart. The semaphore partBodies limits the parts that REST handlers
	// receive concurrently, scrubs the files that are verified concurrently, and conversions the concurrent conversions
	// to QCOW2.
	imports, fetches, pulls, partCalls, partBodies, scrubs, conversions chan struct{}
	// convertTime is the maximum duration of a conversion. Only tests set another value than the constant convertTime.
	convertTime time.Duration
	// openPartCalls is a semaphore that limits the calls of UploadPart, including those that wait for partCalls.
	openPartCalls chan struct{}
	// importsOf, fetchesOf, openPartsOf and partBodiesOf are limits for each org. importsOf limits the imports of files
	// and parts, fetchesOf the imports of https sources, openPartsOf the calls of UploadPart, and partBodiesOf the
	// parts that REST handlers receive.
	importsOf, fetchesOf, openPartsOf, partBodiesOf *orgLimit
}

// New creates the service and registers the commands that other members forward to the leader.
func New(opts Options) *Service {
	s := &Service{
		opts: opts, wake: make(chan struct{}, 1), imports: make(chan struct{}, maxImports), fetches: make(chan struct{}, maxFetches), pulls: make(chan struct{}, maxPulls),
		partCalls: make(chan struct{}, maxPartCalls), partBodies: make(chan struct{}, maxPartBodies), scrubs: make(chan struct{}, 1),
		openPartCalls: make(chan struct{}, maxOpenParts), importsOf: newOrgLimit(maxImportsOf),
		fetchesOf: newOrgLimit(maxFetchesOf), openPartsOf: newOrgLimit(maxOpenPartsOf),
		partBodiesOf: newOrgLimit(maxPartBodiesOf), conversions: make(chan struct{}, maxConversions),
		convertTime: convertTime,
	}
	s.jobs = newBackgroundJobs(s.wakeUp, func(name string, err error) { opts.Log.Warn("image work failed", "work", name, "err", err) })
	leader.Register(opts.Commands, s, createCommand, finishImportCommand, addHolderCommand, removeHolderCommand, updateCommand, deleteCommand,
		beginUploadCommand, recordPartCommand, completeUploadCommand, abortUploadCommand)
	return s
}

func noImage(id cloud.ImageID) error { return fault.New(fault.NotFound, "no image %s", id) }

// Usable is an AVAILABLE image that an org, in the field forOrg, may use for VMs. Lookup returns it.
type Usable struct {
	cloud.Image
	forOrg cloud.OrgID
}

// Lookup returns the image with this ID if org may use it. It returns NotFound if org cannot see the image, and
// FailedPrecondition if the image is not AVAILABLE.
func Lookup(r store.Reader, org cloud.OrgID, id cloud.ImageID) (*Usable, error) {
	i, err := Images.Get(r, string(id))
	if err != nil {
		return nil, err
	}
	if i == nil || !i.VisibleTo(org) {
		return nil, noImage(id)
	}
	if i.Status != cloud.ImageAvailable {
		return nil, fault.New(fault.FailedPrecondition, "image %s is %s, not AVAILABLE", id, i.Status)
	}
	return &Usable{*i, org}, nil
}

// Use records in tx that the VM uses the image. While that record exists, the image cannot be deleted.
func (u *Usable) Use(tx *store.Tx, vm cloud.VMID) {
	uses.Put(tx, &use{Org: u.forOrg}, string(u.ID), string(vm))
}

// UseForVolume is like Use, for a volume that is made from the image.
func (u *Usable) UseForVolume(tx *store.Tx, volume cloud.VolumeID) {
	uses.Put(tx, &use{Org: u.forOrg, Volume: true}, string(u.ID), string(volume))
}

// ShareWithVolume records in tx that the volume to uses the same image as the volume from. It does not check whether
// the image is still visible to the org of the volumes. It does nothing if the volume from does not use the image.
func ShareWithVolume(tx *store.Tx, id cloud.ImageID, from, to cloud.VolumeID) error {
	u, err := uses.Get(tx, string(id), string(from))
	if err != nil || u == nil {
		return err
	}
	uses.Put(tx, u, string(id), string(to))
	return nil
}

// ReleaseVolume deletes the record that UseForVolume wrote.
func ReleaseVolume(tx *store.Tx, id cloud.ImageID, volume cloud.VolumeID) {
	uses.Delete(tx, string(id), string(volume))
}

// Release deletes the record that Use wrote, so that the VM no longer prevents the deletion of the image.
func Release(tx *store.Tx, id cloud.ImageID, vm cloud.VMID) { uses.Delete(tx, string(id), string(vm)) }

// CheckUnused returns FailedPrecondition if a VM or a volume uses the image. The error names those that belong to org.
func CheckUnused(r store.Reader, id cloud.ImageID, org cloud.OrgID) error {
	used, more, err := uses.List(r, 3, string(id))
	if err != nil {
		return err
	}
	if len(used) > 0 {
		return fault.New(fault.FailedPrecondition, "image %s is used by %s", id, describeUsers(used, more, org))
	}
	return nil
}

// Built returns the fields of the image that a host needs to build a disk from it.
func (u *Usable) Built() *cloud.ImageRef {
	return &cloud.ImageRef{ID: u.ID, SHA256: u.SHA256, SizeBytes: u.SizeBytes, Format: u.Format}
}

// Get returns the image with this ID if org can see it, and NotFound otherwise.
func (s *Service) Get(ctx context.Context, org cloud.OrgID, id cloud.ImageID) (i *cloud.Image, err error) {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if i, err = Images.Get(v, string(id)); err != nil {
			return err
		}
		if i == nil || !i.VisibleTo(org) {
			return noImage(id)
		}
		return nil
	})
	return i, err
}

// List returns a page of images, and the token of the next page. It lists the images of org and those shared with org.
// If public is true, it also lists the public images of other orgs.
func (s *Service) List(ctx context.Context, org cloud.OrgID, public bool, size int32, token string) ([]*cloud.Image, string, error) {
	keep := func(i *cloud.Image) bool {
		return i.VisibleTo(org) && (public || i.Org == org || i.Visibility != cloud.Public)
	}
	query := "images\x00" + string(org)
	if public {
		query += "\x00public"
	}
	return store.Page(ctx, s.opts.Store, Images, store.PageRequest{Size: size, Token: token, Query: query}, keep)
}

// ListAll returns a page of the images within t (of all orgs for the zero t), and the token of the next page. Images are
// sorted by ID.
func (s *Service) ListAll(ctx context.Context, t cloud.Tenant, size int32, token string) ([]*cloud.Image, string, error) {
	keep := func(i *cloud.Image) bool { return t.Contains(cloud.Tenant{Org: i.Org, Project: i.Project}) }
	req := store.PageRequest{Size: size, Token: token, Query: "all images\x00" + t.String()}
	return store.Page(ctx, s.opts.Store, Images, req, keep)
}

// CheckNoImages returns FailedPrecondition if the project t.Project still has images. If t.Project is empty, it checks
// all images of the org t.Org instead. A project or org with images cannot be deleted.
func CheckNoImages(r store.Reader, t cloud.Tenant) error {
	all, _, err := Images.List(r, 0)
	if err != nil {
		return err
	}
	for _, i := range all {
		if t.Project != "" && i.Value.Project == t.Project || t.Project == "" && i.Value.Org == t.Org {
			return fault.New(fault.FailedPrecondition, "image %s (%s) still exists: delete the images first", i.Value.Name, i.Value.ID)
		}
	}
	return nil
}

type updateRequest struct {
	Org        cloud.OrgID
	ID         cloud.ImageID
	Name       string
	Visibility cloud.Visibility
	Metadata   map[string]string
}

// Update changes an image's name, its visibility and its metadata. An empty name and an unspecified visibility v leave
// the old value. The new metadata is merged into the old. Only the image's own org may update it.
func (s *Service) Update(ctx context.Context, org cloud.OrgID, id cloud.ImageID, name string, v cloud.Visibility, metadata map[string]string) (cloud.Image, error) {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return cloud.Image{}, err
	}
	if err := checkMetadata(metadata); err != nil {
		return cloud.Image{}, err
	}
	return updateCommand.Call(ctx, s.opts.Commands, updateRequest{org, id, name, v, metadata})
}

var updateCommand = leader.NewCommand("image.change", leader.Repeatable, (*Service).updateOnLeader)

// updateOnLeader implements Update on the leader.
func (s *Service) updateOnLeader(ctx context.Context, q updateRequest) (out cloud.Image, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		i, err := getOwned(tx, q.Org, q.ID)
		if err != nil {
			return err
		}
		// The visibility before the change is checked too. Otherwise the image's org could make a PUBLIC image PRIVATE.
		if err := checkPublisher(ctx, i.Visibility); err != nil {
			return err
		}
		if q.Name != "" && q.Name != i.Name {
			if err := claimName(tx, i, q.Name); err != nil {
				return err
			}
			if err := releaseName(tx, i); err != nil {
				return err
			}
			i.Name = q.Name
		}
		if q.Visibility != cloud.VisibilityUnspecified && q.Visibility != i.Visibility {
			i.Visibility = q.Visibility
		}
		if err := cloud.CheckImageKeys(q.Metadata, i.Metadata); err != nil {
			return err
		}
		i.Metadata = cloud.Merge(i.Metadata, q.Metadata)
		if err := i.Check(); err != nil {
			return err
		}
		if err := checkVisibility(ctx, i); err != nil {
			return err
		}
		i.UpdatedAt = tx.Now()
		Images.Put(tx, i, string(q.ID))
		out = *i
		return nil
	})
	return out, err
}

// getOwned returns the image with this ID if it belongs to org. It returns PermissionDenied, with the ID of the owning
// org, if it belongs to another org and org can see it, and NotFound otherwise.
func getOwned(tx *store.Tx, org cloud.OrgID, id cloud.ImageID) (*cloud.Image, error) {
	i, err := Images.Get(tx, string(id))
	switch {
	case err != nil:
		return nil, err
	case i == nil || !i.VisibleTo(org):
		return nil, noImage(id)
	case i.Org != org:
		return nil, fault.New(fault.PermissionDenied, "image %s belongs to org %s, and only that org can change or delete it", id, i.Org)
	}
	return i, nil
}

type deleteRequest struct {
	Org  cloud.OrgID
	ID   cloud.ImageID
	Body [32]byte
}

// Delete deletes the record of an image. It returns FailedPrecondition if a VM or a volume uses the image. The members
// delete its bytes later. body is the hash of the request.
func (s *Service) Delete(ctx context.Context, org cloud.OrgID, id cloud.ImageID, body [32]byte) error {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return err
	}
	_, err := deleteCommand.Call(ctx, s.opts.Commands, deleteRequest{org, id, body})
	return err
}

var deleteCommand = leader.NewCommand("image.delete", leader.Keyed, (*Service).deleteOnLeader)

// deleteOnLeader implements Delete on the leader.
func (s *Service) deleteOnLeader(ctx context.Context, q deleteRequest) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		_, _, err := store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Org), "DeleteImage", q.Body, func() (struct{}, error) {
			i, err := getOwned(tx, q.Org, q.ID)
			if err != nil {
				return struct{}{}, err
			}
			if err := CheckUnused(tx, q.ID, q.Org); err != nil {
				return struct{}{}, err
			}
			return struct{}{}, remove(tx, i)
		})
		return err
	})
	return struct{}{}, err
}

// remove deletes the record of an image and frees its quota.
func remove(tx *store.Tx, i *cloud.Image) error {
	if err := releaseName(tx, i); err != nil {
		return err
	}
	Images.Delete(tx, string(i.ID))
	if i.Project == "" {
		return nil
	}
	return tenant.Give(tx, cloud.Tenant{Org: i.Org, Project: i.Project}, tenant.Images, amountOf(i))
}

// describeUsers returns, for an error message, the IDs of those VMs and volumes in the list used that belong to org. If
// the list contains VMs or volumes of other orgs, or if the parameter named more is true, it adds "others".
func describeUsers(used []store.Record[use], more bool, org cloud.OrgID) string {
	var out []string
	for _, u := range used {
		switch {
		case u.Value.Org != org:
			more = true
		case u.Value.Volume:
			out = append(out, "volume "+u.Path[1])
		default:
			out = append(out, "VM "+u.Path[1])
		}
	}
	if more {
		out = append(out, "others")
	}
	return strings.Join(out, ", ")
}
