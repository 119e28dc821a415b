package image

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of uploads in parts:
const (
	// MinPartBytes is the minimum size of each part but the last, in bytes.
	MinPartBytes = 5 << 20
	// maxPartBytes is the maximum size of a part, in bytes.
	maxPartBytes = 8 << 20
	// maxParts is the maximum number of parts of an upload. Parts are numbered from 1.
	maxParts = 10_000
	// uploadTime is the time after which an upload session expires.
	uploadTime = 24 * time.Hour
	// takeOverTime is the time since the completion of an upload after which the leader joins the parts itself, because
	// the importer may have failed.
	takeOverTime = importTime / 2
	// maxUploads is the maximum number of open upload sessions of an org.
	maxUploads = 100
	// completeWait is how long CompleteUpload waits until the image is AVAILABLE or ERROR.
	completeWait = 30 * time.Second
	// maxPartCalls is the maximum number of parts that a member stores at a time. Further calls wait.
	maxPartCalls = 8
	// maxOpenParts is the maximum number of concurrent calls of UploadPart on a member, including calls that wait, and
	// maxOpenPartsOf is the maximum for one org. Further calls are refused, because each call has a part of up to 8 MiB
	// in memory.
	maxOpenParts   = 32
	maxOpenPartsOf = maxOpenParts / 2
)

// Part describes a part of an upload.
type Part struct {
	SHA256 string
	Size   uint64
	// Holders are the IDs of members that stored the part before it was acknowledged: a majority.
	Holders []uint64
}

// parts is the table of the parts of open uploads, at image-part/<session>/<number as five digits>.
var parts = store.NewTable[Part]("image-part")

func partKey(n uint32) string { return fmt.Sprintf("%05d", n) }

type beginUploadRequest struct {
	Image cloud.Image
	Body  [32]byte
}

// BeginUpload creates the record of an image, as PENDING, with an upload session in its field Upload. A repeated call
// with the same idempotency key gets the same response. body is the hash of the request.
func (s *Service) BeginUpload(ctx context.Context, i cloud.Image, body [32]byte) (Created, error) {
	if err := prepare(ctx, &i); err != nil {
		return Created{}, err
	}
	if err := setProject(ctx, &i); err != nil {
		return Created{}, err
	}
	return beginUploadCommand.Call(ctx, s.opts.Commands, beginUploadRequest{i, body})
}

var beginUploadCommand = leader.NewCommand("image.upload", leader.Keyed, (*Service).beginUploadOnLeader)

// beginUploadOnLeader implements BeginUpload on the leader.
func (s *Service) beginUploadOnLeader(ctx context.Context, q beginUploadRequest) (out Created, err error) {
	id, err := uuid.NewV7()
	if err != nil {
		return out, err
	}
	session, err := uuid.NewRandom()
	if err != nil {
		return out, err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out.Image, out.Replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Image.Org), "BeginImageUpload", q.Body, func() (cloud.Image, error) {
			i := q.Image
			if err := checkUploads(tx, i.Org); err != nil {
				return i, err
			}
			i.ID, i.CreatedAt, i.UpdatedAt = cloud.ImageID(id.String()), tx.Now(), tx.Now()
			i.Upload = &cloud.ImageUpload{ID: session.String(), ExpiresAt: tx.Now() + uploadTime.Milliseconds()}
			if err := claimName(tx, &i, i.Name); err != nil {
				return i, err
			}
			if err := chargeQuota(tx, &i); err != nil {
				return i, err
			}
			Images.Put(tx, &i, string(i.ID))
			return i, nil
		})
		return err
	})
	return out, err
}

// checkUploads returns ResourceExhausted if an org has maxUploads open upload sessions. Concurrent calls may exceed the
// limit slightly: the transaction reads the images unguarded (later writes to them do not make it conflict), so that
// uploads do not conflict with all other changes of images.
func checkUploads(tx *store.Tx, org cloud.OrgID) error {
	all, _, err := Images.List(tx.Unguarded(), 0)
	if err != nil {
		return err
	}
	open := 0
	for _, r := range all {
		if r.Value.Org == org && r.Value.Uploading() {
			open++
		}
	}
	if open >= maxUploads {
		return fault.New(fault.ResourceExhausted, "org %s has %d open uploads: complete or abort some of them first", org, open)
	}
	return nil
}

// UploadPart stores part n of an upload and returns its size in bytes. When it returns, a majority of the members has
// synced the part to disk. A part with other bytes replaces an earlier part n; a part with the same bytes is not stored
// again. UploadPart returns Unavailable if the member already has the maximum number of calls, in all or of the org.
func (s *Service) UploadPart(ctx context.Context, u UploadRef, n uint32, body []byte) (uint64, error) {
	if err := u.check(); err != nil {
		return 0, err
	}
	if n < 1 || n > maxParts {
		return 0, fault.Invalid("part_number", "must be 1 to %d, got %d", maxParts, n)
	}
	if len(body) == 0 || len(body) > maxPartBytes {
		return 0, fault.Invalid("body", "a part has 1 to %d bytes, got %d", maxPartBytes, len(body))
	}
	leave, err := s.enterUpload(u.Org)
	if err != nil {
		return 0, err
	}
	defer leave()
	part := Part{SHA256: checksum(body), Size: uint64(len(body))}
	var stored *Part
	if err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		if _, err = u.findOpen(v, s.opts.Store.Now()); err == nil {
			stored, err = parts.Get(v, u.Session, partKey(n))
		}
		return err
	}); err != nil {
		return 0, err
	}
	if stored != nil && stored.SHA256 == part.SHA256 {
		return stored.Size, nil
	}
	select {
	case s.partCalls <- struct{}{}:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { <-s.partCalls }()
	if part.Holders, err = s.spreadPart(ctx, part.SHA256, body); err != nil {
		return 0, err
	}
	if _, err := recordPartCommand.Call(ctx, s.opts.Commands, recordPartRequest{u, n, part}); err != nil {
		return 0, err
	}
	return part.Size, nil
}

// enterUpload counts a call of UploadPart of an org until the caller calls leave. It returns Unavailable if the member
// already has maxOpenParts calls, or maxOpenPartsOf calls of the org.
func (s *Service) enterUpload(org cloud.OrgID) (leave func(), err error) {
	if !s.openPartsOf.take(org) {
		return nil, fault.New(fault.Unavailable, "this member is already receiving %d parts of org %s: try again later", maxOpenPartsOf, org).
			MayRetry()
	}
	select {
	case s.openPartCalls <- struct{}{}:
		return func() { <-s.openPartCalls; s.openPartsOf.give(org) }, nil
	default:
		s.openPartsOf.give(org)
		return nil, fault.New(fault.Unavailable, "this member receives %d parts already", maxOpenParts).MayRetry()
	}
}

type recordPartRequest struct {
	Upload UploadRef
	Number uint32
	Part   Part
}

var recordPartCommand = leader.NewCommand("image.part", leader.Repeatable, (*Service).recordPartOnLeader)

// recordPartOnLeader writes the record of a part that a majority of the members has stored, and counts the part's bytes
// in the quotas. If the usage would exceed a quota, it writes no record and returns ResourceExhausted. The members
// later delete the bytes of a part without a record.
func (s *Service) recordPartOnLeader(ctx context.Context, q recordPartRequest) (struct{}, error) {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		i, err := q.Upload.findOpen(tx, tx.Now())
		if err != nil {
			return err
		}
		before, err := parts.Get(tx, q.Upload.Session, partKey(q.Number))
		if err != nil {
			return err
		}
		mib := i.CountedMiB + mibOf(q.Part.Size)
		if before != nil {
			mib -= min(mib, mibOf(before.Size))
		}
		if err := countBytes(tx, i, mib); err != nil {
			return err
		}
		Images.Put(tx, i, string(i.ID))
		parts.Put(tx, &q.Part, q.Upload.Session, partKey(q.Number))
		return nil
	})
	return struct{}{}, err
}

// NumberedPart is a part with its number.
type NumberedPart struct {
	Number uint32
	Part
}

// Parts returns up to limit stored parts of an open upload whose numbers are greater than after, and whether the upload
// has further parts. A client that was interrupted need not send these parts again.
func (s *Service) Parts(ctx context.Context, u UploadRef, after uint32, limit int) (list []NumberedPart, more bool, err error) {
	if err := u.check(); err != nil {
		return nil, false, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if _, err := u.findOpen(v, s.opts.Store.Now()); err != nil {
			return err
		}
		list, more, err = listParts(v, u.Session, after, limit)
		return err
	})
	return list, more, err
}

// listParts returns up to limit parts of a session whose numbers are greater than after; limit 0 means no limit.
func listParts(r store.Reader, session string, after uint32, limit int) ([]NumberedPart, bool, error) {
	found, more, err := parts.ListAfter(r, limit, []string{session, partKey(after)}, session)
	if err != nil {
		return nil, false, err
	}
	list := make([]NumberedPart, len(found))
	for i, f := range found {
		n, err := strconv.ParseUint(f.Path[1], 10, 32)
		if err != nil {
			return nil, false, fmt.Errorf("number of a part of session %s: %w", session, err)
		}
		list[i] = NumberedPart{uint32(n), *f.Value}
	}
	return list, more, nil
}

type completeRequest struct {
	Upload UploadRef
	// Member is the member that received the call. It joins the parts.
	Member uint64
}

// CompleteUpload ends an upload session. This member then joins the parts and examines the result like an imported
// file, and the other members copy the image. CompleteUpload waits up to completeWait for the image to become AVAILABLE
// or ERROR, and returns the image in its current state. A repeated call waits again. If another member receives the
// repeated call, for example because the first member has failed, that other member joins the parts.
func (s *Service) CompleteUpload(ctx context.Context, u UploadRef) (*cloud.Image, error) {
	if err := u.check(); err != nil {
		return nil, err
	}
	i, err := completeUploadCommand.Call(ctx, s.opts.Commands, completeRequest{u, s.opts.Self})
	if err != nil {
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, completeWait)
	defer cancel()
	settled := func(now *cloud.Image) (bool, error) {
		if now == nil {
			return true, noImage(u.Image)
		}
		i = *now
		return i.Status == cloud.ImageAvailable || i.Status == cloud.ImageError, nil
	}
	_, err = store.Await(waiting, s.opts.Store, Images, settled, string(u.Image))
	if err != nil && !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	return &i, nil
}

var completeUploadCommand = leader.NewCommand("image.complete", leader.Repeatable, (*Service).completeUploadOnLeader)

// completeUploadOnLeader implements CompleteUpload on the leader.
func (s *Service) completeUploadOnLeader(ctx context.Context, q completeRequest) (out cloud.Image, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		i, err := q.Upload.find(tx)
		if err != nil {
			return err
		}
		if i.Upload.CompletedAt == 0 {
			if i, err = q.Upload.findOpen(tx, tx.Now()); err != nil {
				return err
			}
			list, _, err := listParts(tx, q.Upload.Session, 0, 0)
			if err != nil {
				return err
			}
			if err := checkParts(list); err != nil {
				return err
			}
			upload := *i.Upload
			upload.CompletedAt, upload.Parts, upload.Size = tx.Now(), uint32(len(list)), 0
			for _, p := range list {
				upload.Size += p.Size
			}
			i.Upload = &upload
		}
		if i.Status == cloud.ImagePending && i.Importer != q.Member {
			i.Importer, i.UpdatedAt = q.Member, tx.Now()
			Images.Put(tx, i, string(i.ID))
		}
		out = *i
		return nil
	})
	return out, err
}

// checkParts returns FailedPrecondition if a part is missing, or if a part other than the last is too small.
func checkParts(list []NumberedPart) error {
	if len(list) == 0 {
		return fault.New(fault.FailedPrecondition, "no part was uploaded")
	}
	for i, p := range list {
		if p.Number != uint32(i+1) {
			return fault.New(fault.FailedPrecondition, "part %d is missing: upload it, then complete again", i+1).With("missing_part", i+1)
		}
		if i+1 < len(list) && p.Size < MinPartBytes {
			return fault.New(fault.FailedPrecondition, "part %d has %d bytes: each part but the last has %d to %d bytes", p.Number, p.Size, MinPartBytes, maxPartBytes)
		}
	}
	return nil
}

type abortRequest struct {
	Upload UploadRef
	Body   [32]byte
}

// aborted is the result of abortUploadCommand. Image is the ID of the deleted image. It is empty in idempotency
// responses that an earlier version stored.
type aborted struct{ Image cloud.ImageID }

// AbortUpload ends an upload session, deletes its image and returns the image's ID. The members delete the parts later.
// If u.Image is empty, the image is the one with the session u.Session. body is the hash of the request.
func (s *Service) AbortUpload(ctx context.Context, u UploadRef, body [32]byte) (cloud.ImageID, error) {
	if u.Image != "" {
		if err := u.check(); err != nil {
			return "", err
		}
	}
	out, err := abortUploadCommand.Call(ctx, s.opts.Commands, abortRequest{u, body})
	return out.Image, err
}

var abortUploadCommand = leader.NewCommand("image.abort", leader.Keyed, (*Service).abortUploadOnLeader)

// abortUploadOnLeader implements AbortUpload on the leader. It looks up the image within store.Idempotent, because a
// repeated call must get the first response although the image no longer exists.
func (s *Service) abortUploadOnLeader(ctx context.Context, q abortRequest) (out aborted, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out, _, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InOrg(q.Upload.Org), "AbortImageUpload", q.Body, func() (aborted, error) {
			u := q.Upload
			if u.Image == "" {
				if u.Image, err = u.findImage(tx.Unguarded()); err != nil {
					return aborted{}, err
				}
			}
			i, err := u.find(tx)
			if err != nil {
				return aborted{}, err
			}
			if i.Upload.CompletedAt != 0 {
				return aborted{}, fault.New(fault.FailedPrecondition, "the upload is complete: delete image %s instead", i.ID)
			}
			return aborted{i.ID}, remove(tx, i)
		})
		return err
	})
	return out, err
}
