package image

import (
	"context"
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Created is the result of Create. Replayed means that an earlier call with the same idempotency key created the image.
type Created struct {
	Image    cloud.Image
	Replayed bool
}

type createRequest struct {
	Image cloud.Image
	Body  [32]byte
	// Missing is true if the source cannot be opened. The leader then creates no image: it returns the response of an
	// earlier call with the same idempotency key, or NotFound if there is none.
	Missing bool
}

// Create creates the record of an image, starts to import the bytes on this member, and returns the image as PENDING. A
// repeated call with the same idempotency key gets the same response, even if the source no longer exists. body is the
// hash of the request.
func (s *Service) Create(ctx context.Context, i cloud.Image, body [32]byte) (Created, error) {
	if err := prepare(ctx, &i); err != nil {
		return Created{}, err
	}
	source, err := s.open(ctx, &i)
	missing := fault.Is(err, fault.NotFound) && auth.CallerOf(ctx).IdempotencyKey != ""
	if err != nil && !missing {
		return Created{}, err
	}
	if err := setProject(ctx, &i); err != nil {
		return Created{}, err
	}
	i.Importer = s.opts.Self
	out, err := createCommand.Call(ctx, s.opts.Commands, createRequest{i, body, missing})
	switch {
	case source == nil:
	case err != nil || out.Replayed:
		source.Close()
	default:
		s.beginImport(out.Image, source)
	}
	return out, err
}

// prepare checks the description of a new image and sets the fields that depend on the caller.
func prepare(ctx context.Context, i *cloud.Image) error {
	if err := i.Check(); err != nil {
		return err
	}
	if err := checkMetadata(i.Metadata); err != nil {
		return err
	}
	if err := cloud.CheckImageKeys(i.Metadata, nil); err != nil {
		return err
	}
	if err := checkVisibility(ctx, i); err != nil {
		return err
	}
	i.Status, i.CreatedBy = cloud.ImagePending, auth.CallerOf(ctx).Name()
	if i.Visibility == cloud.VisibilityUnspecified {
		i.Visibility = cloud.Private
	}
	return nil
}

// setProject sets the project in whose quota a new image counts. It returns PermissionDenied if the call names no
// project.
func setProject(ctx context.Context, i *cloud.Image) error {
	caller := auth.CallerOf(ctx)
	if i.Project = caller.ProjectIn(i.Org); i.Project == "" && !caller.IsCloudAdmin() {
		return fault.New(fault.PermissionDenied, "an image counts in the quota of a project: name the project with the metadata trivet-project, or request a token for the project").
			WithReason(auth.TenantRequired)
	}
	return nil
}

// checkVisibility returns PermissionDenied if the image is PUBLIC and the caller is not a system:admin. It returns
// InvalidArgument if the image is SHARED and its metadata does not list valid org IDs to share it with.
func checkVisibility(ctx context.Context, i *cloud.Image) error {
	if err := checkPublisher(ctx, i.Visibility); err != nil {
		return err
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
			return fault.Invalid("metadata", "%s must be org IDs separated by commas: %q is not an org ID", cloud.SharedWith, org)
		}
	}
	return nil
}

// checkPublisher returns PermissionDenied if the visibility v is PUBLIC and the caller is not a system:admin.
func checkPublisher(ctx context.Context, v cloud.Visibility) error {
	if v == cloud.Public && !auth.CallerOf(ctx).IsCloudAdmin() {
		return fault.New(fault.PermissionDenied, "only %s may publish an image, or change a public one", cloud.SystemAdmin)
	}
	return nil
}

// checkMetadata returns an error if m has a key that only the control plane may set.
func checkMetadata(m map[string]string) error {
	if _, ok := m[cloud.ImageReason]; ok {
		return fault.Invalid("metadata", "%s is set by the control plane only", cloud.ImageReason)
	}
	return nil
}

var createCommand = leader.NewCommand("image.create", leader.Keyed, (*Service).createOnLeader)

// createOnLeader implements Create on the leader: it writes the image's record. The member that received the call
// imports the bytes.
func (s *Service) createOnLeader(ctx context.Context, q createRequest) (out Created, err error) {
	id, err := uuid.NewV7()
	if err != nil {
		return out, err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out.Image, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Image.Org), "CreateImage", q.Body, func() (cloud.Image, error) {
			if q.Missing && isSnapshot(&q.Image) {
				return cloud.Image{}, fault.New(fault.NotFound, "no snapshot %s", snapshotOf(&q.Image))
			}
			if q.Missing {
				return cloud.Image{}, errNoSource()
			}
			i := q.Image
			i.ID, i.CreatedAt, i.UpdatedAt = cloud.ImageID(id.String()), tx.Now(), tx.Now()
			if err := claimName(tx, &i, i.Name); err != nil {
				return cloud.Image{}, err
			}
			if err := chargeQuota(tx, &i); err != nil {
				return cloud.Image{}, err
			}
			Images.Put(tx, &i, string(i.ID))
			return i, nil
		})
		return err
	})
	return out, err
}
