// Package image keeps the images that VMs are made of: their records in the store, their bytes as files named by
// checksum on the members, never in the log.
//
// PENDING -> UPLOADING -> AVAILABLE, or ERROR with the reason in metadata trivet/error. The member that receives
// CreateImage opens the source, answers PENDING, copies, examines and hashes its copy; then the record has a checksum and
// is UPLOADING. The other members pull the bytes from those that hold them and verify them; AVAILABLE is written with the
// majority's last word. Bytes are examined in pure Go and believed over what was declared; nothing of a host is read but
// the file that was named, and that only beneath directories that were opened for imports.
//
// All copying belongs to Run: what is cut off by a stop or a crash is begun again from the records by the next Run.
//
// Decisions of this version: sources are file:// only (http(s) is FAILED_PRECONDITION until it can be enabled), VMDK and
// VHD wait for conversion (FAILED_PRECONDITION). An image that was not copied half an hour after it was asked for, or
// not held by a majority half an hour after the last member took it, is ERROR naming its importer, and its bytes go. A
// member that finds its copy gone says so and pulls it again; with the last copy gone the image is ERROR. A PUBLIC image
// is only system:admin's to change. The orgs that an image is shared with are shown to its own org only.
package image

import (
	"context"
	"log/slog"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// use is the mark of a VM on an image: image-use/<image>/<vm>.
type use struct {
	// Org is whose the VM is.
	Org cloud.OrgID
}

var (
	// Images is the table of images: image/<id>.
	Images = store.NewTable[cloud.Image]("image")
	uses   = store.NewTable[use]("image-use")
)

// Options of the service; all but ImportDirs are required.
type Options struct {
	Store    *store.Store
	Commands *leader.Commands
	Files    *Files
	// Self is this member, Members how many there are.
	Self    uint64
	Members int
	// Count, when set, is how many members there are now.
	Count func() int
	// Peers gives the bytes of other members.
	Peers Peers
	// ImportDirs are where file:// sources may lie.
	ImportDirs []ImportDir
	Log        *slog.Logger
}

// Service is the image service of one member.
type Service struct {
	opts Options
	// wake tells Run that there may be something to do.
	wake    chan struct{}
	errands *errands
	// imports and pulls are the slots of errands.
	imports, pulls chan struct{}
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	s := &Service{
		opts: opts, wake: make(chan struct{}, 1), imports: make(chan struct{}, importsAtOnce), pulls: make(chan struct{}, pullsAtOnce),
	}
	s.errands = newErrands(s.wakeUp, func(name string, err error) { opts.Log.Warn("image work failed", "work", name, "err", err) })
	leader.Register(opts.Commands, s, createCommand, finishImportCommand, addHolderCommand, removeHolderCommand, updateCommand, deleteCommand)
	return s
}

func noImage(id cloud.ImageID) error { return fault.New(fault.NotFound, "no image %s", id) }

// Usable is an image that a VM may be made of.
type Usable struct {
	cloud.Image
	user cloud.OrgID
}

// Lookup is an image that org may use and that is AVAILABLE.
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

// Use marks the image as used by a VM, so that it cannot be deleted.
func (u *Usable) Use(tx *store.Tx, vm cloud.VMID) {
	uses.Put(tx, &use{u.user}, string(u.ID), string(vm))
}

// Release takes the mark away.
func Release(tx *store.Tx, id cloud.ImageID, vm cloud.VMID) { uses.Delete(tx, string(id), string(vm)) }

// Built is what a host needs to know of it.
func (u *Usable) Built() *cloud.BuiltImage {
	return &cloud.BuiltImage{ID: u.ID, SHA256: u.SHA256, SizeBytes: u.SizeBytes, Format: u.Format}
}

// Get is one image that org may read.
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

// List is a page of the images of an org and of those shared with it, with the public ones when asked.
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

// Created is a new image, or the one that the same call created before.
type Created struct {
	Image    cloud.Image
	Replayed bool
}

type createAsk struct {
	Image cloud.Image
	Body  [32]byte
	// Missing asks for the answer of an earlier call only: the source cannot be opened now.
	Missing bool
}

// Create records an image and begins to import it on this member. It answers PENDING. A call that was answered before
// gets the same answer, also when the source has gone since.
func (s *Service) Create(ctx context.Context, i cloud.Image, body [32]byte) (Created, error) {
	if err := i.Check(); err != nil {
		return Created{}, err
	}
	if err := checkMetadata(i.Metadata); err != nil {
		return Created{}, err
	}
	if err := mayShow(ctx, &i); err != nil {
		return Created{}, err
	}
	if i.Format == cloud.FormatVMDK || i.Format == cloud.FormatVHD {
		return Created{}, fault.New(fault.FailedPrecondition, "format: VMDK and VHD are not served yet; convert with qemu-img convert -O qcow2")
	}
	source, err := s.open(ctx, i.Org, i.Source)
	missing := fault.Is(err, fault.NotFound) && auth.CallerOf(ctx).IdempotencyKey != ""
	if err != nil && !missing {
		return Created{}, err
	}
	i.Importer, i.Status, i.CreatedBy = s.opts.Self, cloud.ImagePending, auth.CallerOf(ctx).Name()
	if i.Project = auth.CallerOf(ctx).ProjectIn(i.Org); i.Project == "" && !auth.CallerOf(ctx).Governs() {
		return Created{}, fault.New(fault.PermissionDenied, "an image counts in the quota of a project: name one by the metadata trivet-project, or ask for a token with its project_id").
			WithReason(auth.TenantRequired)
	}
	if i.Visibility == cloud.VisibilityUnspecified {
		i.Visibility = cloud.Private
	}
	out, err := createCommand.Call(ctx, s.opts.Commands, createAsk{i, body, missing})
	switch {
	case source == nil:
	case err != nil || out.Replayed:
		source.Close()
	default:
		s.beginImport(out.Image, source)
	}
	return out, err
}

// Holds says that a project, or an org, has images: it cannot go before.
func Holds(r store.Reader, t cloud.Tenant) error {
	all, _, err := Images.List(r, 0)
	if err != nil {
		return err
	}
	for _, i := range all {
		if t.Project != "" && i.Value.Project == t.Project || t.Project == "" && i.Value.Org == t.Org {
			return fault.New(fault.FailedPrecondition, "image %s is still there: delete its images first", i.Value.ID)
		}
	}
	return nil
}

// count charges a new image to the quotas of its project and its org.
func count(tx *store.Tx, i *cloud.Image) error {
	if i.Project == "" {
		return nil
	}
	return tenant.Take(tx, cloud.Tenant{Org: i.Org, Project: i.Project}, tenant.Pictures, tenant.Amount{Images: 1}, tenant.Amount{}, func(p cloud.ProjectID) (sum tenant.Amount, err error) {
		all, _, err := Images.List(tx, 0)
		for _, r := range all {
			if r.Value.Project == p {
				sum.Images++
			}
		}
		return sum, err
	})
}

// mayShow says whether the caller may give an image its visibility.
func mayShow(ctx context.Context, i *cloud.Image) error {
	if i.Visibility == cloud.Public && !auth.CallerOf(ctx).Governs() {
		return fault.New(fault.PermissionDenied, "only %s may publish an image, or change a public one", cloud.SystemAdmin)
	}
	if i.Visibility != cloud.Shared {
		return nil
	}
	orgs := i.Metadata[cloud.SharedWith]
	if orgs == "" {
		return fault.Invalid("metadata", "a SHARED image names the orgs in %s", cloud.SharedWith)
	}
	for _, org := range strings.Split(orgs, ",") {
		if cloud.CheckCallerID("", org) != nil {
			return fault.Invalid("metadata", "%s names orgs separated by commas and nothing else: %q is none", cloud.SharedWith, org)
		}
	}
	return nil
}

// checkMetadata refuses what is not a caller's to say.
func checkMetadata(m map[string]string) error {
	if _, ok := m[cloud.ImageReason]; ok {
		return fault.Invalid("metadata", "%s is ours to set", cloud.ImageReason)
	}
	return nil
}

var createCommand = leader.NewCommand("image.create", leader.Keyed, (*Service).createOnLeader)

// createOnLeader is Create on the leader: it writes the record. The member that was called imports the bytes.
func (s *Service) createOnLeader(ctx context.Context, q createAsk) (out Created, err error) {
	id, err := uuid.NewV7()
	if err != nil {
		return out, err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out.Image, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Image.Org), "CreateImage", q.Body, func() (cloud.Image, error) {
			if q.Missing {
				return cloud.Image{}, errNoSource()
			}
			i := q.Image
			i.ID, i.CreatedAt, i.UpdatedAt = cloud.ImageID(id.String()), tx.Now(), tx.Now()
			if err := count(tx, &i); err != nil {
				return cloud.Image{}, err
			}
			Images.Put(tx, &i, string(i.ID))
			return i, nil
		})
		return err
	})
	return out, err
}

type changeAsk struct {
	Org        cloud.OrgID
	ID         cloud.ImageID
	Name       string
	Visibility cloud.Visibility
	Metadata   map[string]string
}

// Update changes an image's name, visibility (when not unspecified) and metadata (merged).
func (s *Service) Update(ctx context.Context, org cloud.OrgID, id cloud.ImageID, name string, v cloud.Visibility, metadata map[string]string) (cloud.Image, error) {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return cloud.Image{}, err
	}
	if err := checkMetadata(metadata); err != nil {
		return cloud.Image{}, err
	}
	return updateCommand.Call(ctx, s.opts.Commands, changeAsk{org, id, name, v, metadata})
}

var updateCommand = leader.NewCommand("image.change", leader.Repeatable, (*Service).updateOnLeader)

// updateOnLeader is Update on the leader.
func (s *Service) updateOnLeader(ctx context.Context, q changeAsk) (out cloud.Image, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		i, err := owned(tx, q.Org, q.ID)
		if err != nil {
			return err
		}
		if q.Name != "" {
			i.Name = q.Name
		}
		if q.Visibility != cloud.VisibilityUnspecified && q.Visibility != i.Visibility {
			i.Visibility = q.Visibility
		}
		i.Metadata = cloud.Merge(i.Metadata, q.Metadata)
		if err := i.Check(); err != nil {
			return err
		}
		if err := mayShow(ctx, i); err != nil {
			return err
		}
		i.UpdatedAt = tx.Now()
		Images.Put(tx, i, string(q.ID))
		out = *i
		return nil
	})
	return out, err
}

// owned is an image that org may change. One that it may only see says so.
func owned(tx *store.Tx, org cloud.OrgID, id cloud.ImageID) (*cloud.Image, error) {
	i, err := Images.Get(tx, string(id))
	switch {
	case err != nil:
		return nil, err
	case i == nil || !i.VisibleTo(org):
		return nil, noImage(id)
	case i.Org != org:
		return nil, fault.New(fault.PermissionDenied, "image %s is another org's", id)
	}
	return i, nil
}

type removeAsk struct {
	Org  cloud.OrgID
	ID   cloud.ImageID
	Body [32]byte
}

// Delete removes an image that no VM uses. Members drop its bytes later.
func (s *Service) Delete(ctx context.Context, org cloud.OrgID, id cloud.ImageID, body [32]byte) error {
	if err := cloud.CheckUUID("image_id", string(id)); err != nil {
		return err
	}
	_, err := deleteCommand.Call(ctx, s.opts.Commands, removeAsk{org, id, body})
	return err
}

var deleteCommand = leader.NewCommand("image.delete", leader.Keyed, (*Service).deleteOnLeader)

// deleteOnLeader is Delete on the leader.
func (s *Service) deleteOnLeader(ctx context.Context, q removeAsk) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		_, _, err := store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Org), "DeleteImage", q.Body, func() (struct{}, error) {
			i, err := owned(tx, q.Org, q.ID)
			if err != nil {
				return struct{}{}, err
			}
			used, more, err := uses.List(tx, 3, string(q.ID))
			if err != nil {
				return struct{}{}, err
			}
			if len(used) > 0 {
				return struct{}{}, fault.New(fault.FailedPrecondition, "image %s is used by %s", q.ID, users(used, more, q.Org))
			}
			Images.Delete(tx, string(q.ID))
			if i.Project != "" {
				return struct{}{}, tenant.Give(tx, cloud.Tenant{Org: i.Org, Project: i.Project}, tenant.Pictures, tenant.Amount{Images: 1})
			}
			return struct{}{}, nil
		})
		return err
	})
	return struct{}{}, err
}

// users names an org's own VMs, and that there are others.
func users(used []store.Record[use], more bool, org cloud.OrgID) string {
	var out []string
	for _, u := range used {
		if u.Value.Org == org {
			out = append(out, "VM "+u.Path[1])
		} else {
			more = true
		}
	}
	if more {
		out = append(out, "other VMs")
	}
	return strings.Join(out, ", ")
}
