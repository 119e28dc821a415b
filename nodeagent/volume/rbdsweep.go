package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// baseName matches the names of base images, and of base images whose import was interrupted (RbdService.ImportImage).
var baseName = regexp.MustCompile(`^image-[0-9a-f]{64}(\.partial)?$`)

// unusedBase is the content of a base image's record while no volume is a clone of the base image.
type unusedBase struct {
	UnusedSince time.Time `json:"unused_since"` // by the clock of the host that wrote the record
}

// RemoveUnusedBases deletes the base images of which no volume has been a clone for the duration unused, according to
// earlier calls of RemoveUnusedBases on any host. The first call that finds a base image without clones only writes a
// record. It also deletes what interrupted imports have left. Several hosts may call RemoveUnusedBases at the same time.
//
// Another host may make a volume from a base image while it is being deleted. The cluster refuses to delete a snapshot
// with clones, and an image with snapshots. If the base image is deleted first, the other host imports it again.
func (p *RBDPool) RemoveUnusedBases(ctx context.Context, unused time.Duration) error {
	all, err := p.o.Client.ListImages(ctx, &rbdv1.ListImagesRequest{Pool: p.o.Pool})
	if err != nil {
		return fmt.Errorf("delete unused base images: %w", rbdError(err))
	}
	var failed error
	for _, name := range all.GetImages() {
		if !baseName.MatchString(name) {
			continue
		}
		if err := p.sweepBase(ctx, p.name(name), unused); err != nil {
			failed = errors.Join(failed, fmt.Errorf("delete the unused base image %s: %w", name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return failed
}

// sweepBase executes RemoveUnusedBases for one base image.
func (p *RBDPool) sweepBase(ctx context.Context, image *rbdv1.ImageName, unused time.Duration) error {
	out, err := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: image})
	if err != nil {
		return rbdError(err)
	}
	var record struct {
		lease
		unusedBase
	}
	known := json.Unmarshal(out.GetData(), &record) == nil
	if known && time.Now().Before(record.Until) {
		return nil // A host is importing the image.
	}
	i, err := p.o.Client.GetImage(ctx, &rbdv1.GetImageRequest{Name: image, Clones: true})
	if isCode(err, codes.NotFound) {
		return nil
	}
	if err != nil {
		return rbdError(err)
	}
	cloned := slices.ContainsFunc(i.GetSnapshots(), (*rbdv1.Snapshot).GetCloned) || len(i.GetClients()) > 0
	replace := func(before, after []byte) error {
		_, err := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: image, Before: before, After: after})
		if isCode(err, codes.Aborted) {
			return nil // Another host has changed the record. The next call reads it.
		}
		return rbdError(err)
	}
	switch {
	case cloned && known && !record.UnusedSince.IsZero():
		return replace(out.GetData(), nil)
	case cloned:
		return nil
	case record.UnusedSince.IsZero():
		text, err := json.Marshal(unusedBase{time.Now()})
		if err != nil {
			return err
		}
		return replace(out.GetData(), append(text, '\n'))
	case time.Since(record.UnusedSince) < unused && !mutant.On(mutant.SweepEarly):
		return nil
	}
	for _, s := range i.GetSnapshots() {
		if s.GetName() != baseSnapshot {
			return nil // an operator's snapshot
		}
		_, err := p.o.Client.RemoveSnapshot(ctx, &rbdv1.RemoveSnapshotRequest{Name: &rbdv1.SnapshotName{Image: image, Snapshot: baseSnapshot}})
		if isCode(err, codes.FailedPrecondition) {
			return nil // a clone was made meanwhile
		}
		if err != nil {
			return rbdError(err)
		}
	}
	_, err = p.o.Client.RemoveImage(ctx, &rbdv1.RemoveImageRequest{Name: image})
	if isCode(err, codes.FailedPrecondition) {
		return nil // A host uses the image again, and has made the snapshot anew.
	}
	if err != nil {
		return rbdError(err)
	}
	return replace(out.GetData(), nil)
}
